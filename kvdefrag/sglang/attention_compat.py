"""What our attention needs of SGLang's Triton backend, checked by name before it is replaced."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from kvdefrag.sglang.refusal import Refusal

# Arguments up to here come by position, the others by keyword.
_DECODE = (
    "q", "k_buffer", "v_buffer", "o", "kv_indptr", "kv_indices", "attn_logits", "attn_lse",
    "num_kv_splits", "max_kv_splits", "sm_scale", "k_scale", "v_scale",
)  # fmt: skip
_EXTEND = (
    "q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr",
    "kv_indptr", "kv_indices", "custom_mask", "is_causal", "mask_indptr", "max_len_extend",
    "k_scale", "v_scale", "sm_scale",
)  # fmt: skip

# Keyword arguments, each with the values that change nothing of what we compute.
_PLAIN: dict[str, Callable[[Any], bool]] = {
    "logit_cap": lambda value: True,
    "sinks": lambda value: value is None,
    "xai_temperature_len": lambda value: value <= 0,
    "page_size": lambda value: value == 1,
    "score_mod": lambda value: value is None,
    "aux_tensors": lambda value: True,  # of a score_mod
    # How stock shares out its own work.
    "has_mla": lambda value: True,
    "use_pdl": lambda value: True,
    "enable_lean": lambda value: True,
    "lean_Mp": lambda value: True,
    "lean_Lp": lambda value: True,
    "lean_Op": lambda value: True,
    "lean_locks": lambda value: True,
    "uneven_batch": lambda value: True,
    "extend_seq_lens_cpu": lambda value: True,
    # What an extend may be asked for beside.
    "skip_prefix_custom_mask": lambda value: value is True,
    "sliding_window_size": lambda value: value < 0,
    "window_kv_offsets": lambda value: True,  # of a sliding window
    "lse_extend": lambda value: value is None,
    "skip_prefix": lambda value: not value,
    "skip_extend": lambda value: not value,
    "identity_kv_indices": lambda value: not value,
}
_DECODE_MORE = (
    "logit_cap", "sinks", "xai_temperature_len", "has_mla", "use_pdl", "page_size", "score_mod",
    "aux_tensors",
)  # fmt: skip
_EXTEND_MORE = (
    "logit_cap", "skip_prefix_custom_mask", "sliding_window_size", "sinks", "window_kv_offsets",
    "xai_temperature_len", "lse_extend", "skip_prefix", "skip_extend", "page_size", "score_mod",
    "aux_tensors",
)  # fmt: skip
_LEAN = ("enable_lean", "lean_Mp", "lean_Lp", "lean_Op", "lean_locks", "uneven_batch")
_FORWARD = (
    "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks", "score_mod",
    "aux_tensors",
)  # fmt: skip
_MADE = ("self", "model_runner", "skip_prefill", "kv_indptr_buf")
_FIELDS = (
    "max_extend_len", "kv_indptr", "kv_indices", "qo_indptr", "custom_mask", "mask_indptr",
)  # fmt: skip


class Seams(NamedTuple):
    """Arguments of what a version calls and of what it is called by.

    Attributes:
        made: Of the backend's `__init__`.
        decode, extend: Of the two functions that launch its kernels.
        translates: Says whether table entries are not slots of the pool.
    """

    made: tuple[str, ...]
    decode: tuple[str, ...]
    extend: tuple[str, ...]
    translates: Callable[[Any], bool]


SEAMS = {
    "0.5.17": Seams(
        _MADE,
        _DECODE + _DECODE_MORE,
        _EXTEND + _EXTEND_MORE,
        lambda backend: backend._translate_kv_loc is not None,
    ),
    "0.5.23": Seams(
        (*_MADE, "dllm_fa4"),
        _DECODE + _DECODE_MORE + _LEAN,
        (*_EXTEND, *_EXTEND_MORE, "extend_seq_lens_cpu", "identity_kv_indices"),
        lambda backend: bool(backend.kv_index_translator.is_translating),
    ),
}


def is_plain(more: dict[str, Any]) -> bool:
    """Say whether keyword arguments ask for nothing that we do not compute."""
    return all(name in _PLAIN and _PLAIN[name](value) for name, value in more.items())


def check_seams(version: str) -> Seams:
    """Compare the installed backend with what this version is known to have.

    Raises:
        Refusal: Something differs; names it.
    """
    if version not in SEAMS:
        raise Refusal(f"sglang {version}", f"versions {' and '.join(SEAMS)} are supported")
    if importlib.util.find_spec("triton") is None:
        raise Refusal("triton", "it must be installed")
    seams = SEAMS[version]
    try:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
        from sglang.srt.layers.attention import triton_backend
    except ImportError as error:
        raise Refusal("the Triton backend", f"it cannot be imported here: {error}") from error
    backend = triton_backend.TritonAttnBackend
    wanted: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
        (decode_attention_fwd, seams.decode),
        (extend_attention_fwd, seams.extend),
        (backend.__init__, seams.made),
        (backend.forward_decode, _FORWARD),
        (backend.forward_extend, _FORWARD),
        (backend.init_forward_metadata, ("self", "forward_batch")),
        (backend.init_forward_metadata_out_graph, ("self", "forward_batch", "in_capture")),
        (backend.init_forward_metadata_in_graph, ("self", "forward_batch")),
    )
    for function, names in wanted:
        found = tuple(inspect.signature(function).parameters)
        if found != names:
            raise Refusal(
                f"{function.__qualname__}({', '.join(found)})",
                f"this build of SGLang differs from {version}",
            )
    have = {field.name for field in dataclasses.fields(triton_backend.ForwardMetadata)}
    for name in _FIELDS:
        if name not in have:
            raise Refusal(f"ForwardMetadata.{name}", "this build of SGLang lacks it")
    return seams
