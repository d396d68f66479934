"""Put our attention in the place of SGLang's Triton backend, where the settings ask for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from kvdefrag.attention import default_crossover, load_crossover
from kvdefrag.config import Config
from kvdefrag.sglang.attention_compat import check_seams
from kvdefrag.sglang.refusal import Refusal

logger = logging.getLogger(__name__)

_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


def hook_attention(config: Config, version: str) -> None:
    """Register the class in this process; a refusal leaves SGLang's own and says so.

    Raises:
        ConfigError: The table of measurements cannot be read.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    given = config.attention.crossover
    table = load_crossover(given) if given is not None else default_crossover()
    try:
        seams = check_seams(version)
    except Refusal as refusal:
        why = str(refusal)
        logger.warning("kvdefrag: attention stays stock: %s", why)
        HookRegistry.register(_STATE, _showing(why), HookType.AFTER)
        return
    from kvdefrag.sglang.attention_backend import backend_class

    HookRegistry.register(_BACKEND, backend_class(table, seams), HookType.REPLACE)
    HookRegistry.register(_STATE, _showing(None), HookType.AFTER)


def backends_of(scheduler: Any) -> Iterator[Any]:
    """Yield the backends of a scheduler's target that may be ours, wrappers opened."""
    runner = scheduler.tp_worker.model_runner
    waiting = [getattr(runner, "attn_backend", None)]
    while waiting:
        backend = waiting.pop()
        if hasattr(backend, "kvdefrag_state"):
            yield backend
            continue
        for name in ("prefill_backend", "decode_backend", "primary", "full_attn_backend"):
            inner = getattr(backend, name, None)
            if inner is not None:
                waiting.append(inner)


def _showing(refused: str | None) -> Any:
    def show(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        try:
            states = [backend.kvdefrag_state() for backend in backends_of(scheduler)]
            if not states:
                why = refused or "the server does not use the Triton backend"
                states = [{"active": False, "refused": why}]
            result.internal_state["kvdefrag_attention"] = states
        except Exception:
            logger.exception("kvdefrag: the state of its attention could not be shown")

    return show
