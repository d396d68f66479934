"""What SGLang itself needs so that a CPU without AMX runs MLA, tree masks and overlap."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch


def apply() -> None:
    """Patch SGLang in this process; for every mode alike, stock included."""
    _absorbed_mla()
    _keep_the_backend_with_tree_masks()
    _lengths_of_drafts()
    _overlap_with_speculation()


def _absorbed_mla() -> None:
    # No handler is registered for these backends; the default reads the latent rows as heads.
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    def latent(attention: Any, batch: Any) -> Any:
        return handlers.AttnForwardMethod.MLA

    for backend in ("torch_native", "intel_amx"):
        handlers.AttentionBackendRegistry.register(backend, latent)


class _WithAmx:
    has_amx = True

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def _keep_the_backend_with_tree_masks() -> None:
    # Without AMX it is replaced by one that cannot verify a tree; its kernels are stubs here.
    from sglang.srt.arg_groups import overrides

    if hasattr(overrides, "get_platform"):
        platform = overrides.get_platform
        overrides.get_platform = lambda: _WithAmx(platform())
    else:
        overrides.cpu_has_amx_support = lambda: True


def _lengths_of_drafts() -> None:
    # 0.5.17 computes the lengths of verify and draft steps and then uses the batch's.
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend as Backend

    def patch(name: str, times: int, lengths: Any) -> None:
        original = getattr(Backend, name)
        if inspect.getsource(original).count("seq_lens = forward_batch.seq_lens") < times:
            return

        def fixed(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **kw: Any):
            right = lengths(self)
            kept = batch.seq_lens
            batch.seq_lens = kept if right is None else right
            try:
                return original(self, q, k, v, layer, batch, *rest, **kw)
            finally:
                batch.seq_lens = kept

        setattr(Backend, name, fixed)

    def of(field: str, index: int) -> Any:
        return lambda backend: found[index] if (found := getattr(backend, field)) else None

    patch("forward_extend", 1, of("extend_metadata", 0))
    patch("forward_decode", 2, of("draft_decode_metadata", 1))


def _overlap_with_speculation() -> None:
    # SGLang turns overlap off for speculation on CPU for want of three things.
    for module in ("sglang.srt.arg_groups.speculative_hook", "sglang.srt.server_args"):
        with contextlib.suppress(ImportError):
            found = __import__(module, fromlist=["_"])
            if hasattr(found, "_disable_overlap_schedule_for_cpu"):
                found._disable_overlap_schedule_for_cpu = lambda server_args: None

    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    from sglang.srt.managers import overlap_utils

    def gather(rows: Any, *buffers: Any) -> Any:
        at = rows.long()
        return tuple(None if buffer is None else buffer[at] for buffer in buffers)

    overlap_utils.gather_spec_extras = gather
