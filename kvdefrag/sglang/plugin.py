"""Entry point of group `sglang.srt.plugins`: inert unless it is enabled."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvdefrag.config import Config, load_config

logger = logging.getLogger(__name__)

_ATTRIBUTE, _REFUSED = "kvdefrag", "kvdefrag_refused"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def register() -> None:
    """Register the hooks in this process, if the settings say so.

    Raises:
        ConfigError: A setting is refused; SGLang logs it and serves as stock.
    """
    config = load_config(None, os.environ)
    if config.enabled:
        _hook(config)


def _hook(config: Config) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvdefrag.sglang.allocator import KvdefragAllocator
    from kvdefrag.sglang.compat import compat
    from kvdefrag.sglang.marks import Marks, after_uncached
    from kvdefrag.sglang.refusal import Refusal

    try:
        names = compat()
    except Refusal as refusal:
        logger.warning("kvdefrag refuses, the server runs as stock: %s", refusal)
        show = _state_of_a_refusal(str(refusal))
        HookRegistry.register(f"{_SCHEDULER}.get_internal_state", show, HookType.AFTER)
        return
    if config.attention.enabled:
        from kvdefrag.sglang.attention_hooks import hook_attention

        hook_attention(config, names.version)
    marks = Marks(names)
    add = HookRegistry.register
    memory, managers = "sglang.srt.mem_cache", "sglang.srt.managers"
    add(f"{memory}.allocator.token.TokenToKVPoolAllocator", KvdefragAllocator, HookType.REPLACE)
    add(f"{memory}.allocation.alloc_for_extend", marks.around_extend, HookType.AROUND)
    add(f"{memory}.allocation.alloc_for_decode", marks.around_decode, HookType.AROUND)
    add(f"{memory}.allocation.alloc_for_spec_decode", marks.around_speculative, HookType.AROUND)
    add(f"{memory}.common.release_kv_cache", marks.around_release, HookType.AROUND)
    if names.version == "0.5.17":
        add(
            f"{managers}.schedule_batch.ScheduleBatch.check_decode_mem",
            marks.around_capacity,
            HookType.AROUND,
        )
    checker = f"{managers}.scheduler_components.invariant_checker.SchedulerInvariantChecker"
    add(f"{checker}._get_total_uncached_sizes", after_uncached, HookType.AFTER)
    add(f"{_SCHEDULER}.__init__", _after_init(config), HookType.AFTER)
    add(f"{_SCHEDULER}.get_next_batch_to_run", _before_step, HookType.BEFORE)
    add(f"{_SCHEDULER}.get_internal_state", _after_state, HookType.AFTER)
    if config.control.enabled:
        _hook_control()


def _hook_control() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvdefrag.sglang.control import around_set_internal_state

    target = f"{_SCHEDULER}.set_internal_state"
    HookRegistry.register(target, around_set_internal_state, HookType.AROUND)


def _after_init(config: Config) -> Callable[..., None]:
    def attach(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        from kvdefrag.profiles import profile_or_default
        from kvdefrag.sglang.attachment import Attachment
        from kvdefrag.sglang.compat import compat
        from kvdefrag.sglang.refusal import Refusal

        setattr(scheduler, _ATTRIBUTE, None)
        try:
            found = Attachment(scheduler, config, compat(), profile_or_default(config.profile))
        except Refusal as refusal:
            _refuse(scheduler, str(refusal))
        except Exception as fault:
            # Whatever it is, the server is to start; nothing has been handed out yet.
            scheduler.token_to_kv_pool_allocator.__dict__.pop("core", None)
            _refuse(scheduler, f"{type(fault).__name__}: {fault}", exc_info=fault)
        else:
            setattr(scheduler, _ATTRIBUTE, found)
            if scheduler.metrics_collector_context.is_stats_logging_rank:
                logger.info(found.describe())

    return attach


def _refuse(scheduler: Any, why: str, *, exc_info: Exception | None = None) -> None:
    setattr(scheduler, _REFUSED, why)
    logger.warning("kvdefrag refuses, the server runs as stock: %s", why, exc_info=exc_info)


def _before_step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    attachment = getattr(scheduler, _ATTRIBUTE, None)
    if attachment is not None:
        attachment.step()


def _after_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    try:
        attachment = getattr(scheduler, _ATTRIBUTE, None)
        refused = getattr(scheduler, _REFUSED, None)
        state = attachment.state() if attachment else {"active": False, "refused": refused}
        result.internal_state[_ATTRIBUTE] = state
    except Exception:
        logger.exception("kvdefrag: its state could not be shown")


def _state_of_a_refusal(why: str) -> Callable[..., None]:
    def show(result: Any, *args: Any, **kwargs: Any) -> None:
        with suppress(Exception):
            result.internal_state[_ATTRIBUTE] = {"active": False, "refused": why}

    return show
