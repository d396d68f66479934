"""Every buffer that shares the slot numbers: moved completely, or the pool is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvdefrag.sglang.refusal import Refusal

# By class name, exactly: a subclass may keep more than its parent does. The scales are those of
# quantised pools, one row to each slot; a pool without them has None there, or no such field.
_BUFFERS = {
    "MHATokenToKVPool": ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"),
    "MHATokenToKVPoolFP4": ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"),
    "MHATokenToKVPoolMXFP8": ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"),
    "MLATokenToKVPool": ("kv_buffer", "kv_scale_buffer"),
    "MLATokenToKVPoolFP4": ("kv_buffer", "kv_scale_buffer"),
}
_NEEDED = ("k_buffer", "v_buffer", "kv_buffer")
_SCALED = ("FP4", "MXFP8")
# Lists of views, pointers or work space, not rows of their own.
_NO_ROWS = frozenset(
    {
        *("mem_usage", "data_ptrs", "data_strides", "k_data_ptrs", "v_data_ptrs"),
        *("dq_k_buffer", "dq_v_buffer"),
    }
)
_CANARY = ("k_head", "k_tail", "v_head", "v_tail")


def buffers_of(pool: Any, size: int) -> list[Tensor]:
    """Return the buffers of one pool, each of `size + 1` or more rows in its first dimension.

    Scales of quantised rows are among them.

    Raises:
        Refusal: The class is unknown, a buffer is not laid out by rows, or the pool keeps another
            tensor with a row to each slot.
    """
    name = type(pool).__name__
    if name not in _BUFFERS:
        raise Refusal(f"pool {name}", f"{', '.join(_BUFFERS)} are supported")
    _check_layout(name, pool)
    found: list[Tensor] = []
    for field in _BUFFERS[name]:
        tensors = getattr(pool, field, None)
        if tensors is None and (field in _NEEDED or name.endswith(_SCALED)):
            raise Refusal(f"{name}.{field}", "this build of SGLang lacks it")
        found += tensors or ()
    for tensor in found:
        _check_rows(name, tensor, size)
    known = {tensor.data_ptr() for tensor in found}
    rows = found[0].shape[0]
    for field, tensor in _tensors(pool):
        if field not in _NO_ROWS and tensor.shape[:1] == (rows,) and tensor.data_ptr() not in known:
            raise Refusal(f"{name}.{field}", "a tensor with a row to each slot that is not known")
    # Not every type of 8 bits can be gathered; a copy is one of bytes anyway.
    return [t.view(torch.uint8) if t.element_size() == 1 else t for t in found]


def all_buffers(scheduler: Any, size: int) -> list[Tensor]:
    """Return the buffers of the target's and every draft worker's pool, each once.

    With KV canary its fingerprints of each slot are among them.

    Raises:
        Refusal: See `buffers_of`.
    """
    pools = [scheduler.token_to_kv_pool_allocator.get_kvcache()]
    pools += [runner.token_to_kv_pool for runner in _draft_runners(scheduler)]
    found: dict[int, Tensor] = {}
    for pool in {id(pool): pool for pool in pools}.values():
        for tensor in buffers_of(pool, size):
            found[tensor.data_ptr()] = tensor
    for runner in (scheduler.tp_worker.model_runner, *_draft_runners(scheduler)):
        for tensor in _fingerprints(runner, size):
            found[tensor.data_ptr()] = tensor
    return list(found.values())


def _check_layout(name: str, pool: Any) -> None:
    if getattr(pool, "page_size", 1) != 1:
        raise Refusal(f"{name}.page_size {pool.page_size}", "1 is supported")
    layout = "hnd" if getattr(pool, "use_hnd", False) else getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise Refusal(f"{name} in layout {layout}", "nhd is supported")
    for field in ("native_k_scale_buffer", "native_v_scale_buffer"):
        if getattr(pool, field, None) is not None:
            raise Refusal(f"{name}.{field}", "scales of several slots lie in one another")
    if getattr(pool, "mxfp8_sf_interleaved", False):
        raise Refusal(f"{name} with interleaved scales", "one row of scales to each slot is needed")


def _check_rows(name: str, tensor: Tensor, size: int) -> None:
    if tensor.shape[0] < size + 1 or not tensor[0].is_contiguous():
        raise Refusal(f"{name} buffer {tuple(tensor.shape)}", f"{size + 1} rows are needed")


def _draft_runners(scheduler: Any) -> Iterator[Any]:
    worker = getattr(scheduler, "draft_worker", None)
    algorithm = scheduler.spec_algorithm
    if worker is None or algorithm.is_none() or algorithm.is_ngram():
        return
    inner = worker.draft_worker
    if inner is None:
        return
    runners = getattr(inner, "draft_runners", None)
    yield from [inner.model_runner] if runners is None else runners


def _fingerprints(runner: Any, size: int) -> Iterator[Tensor]:
    # KV canary keeps what each slot should hold beside the pool; it must follow a move.
    manager = getattr(runner, "canary_manager", None)
    if manager is None:
        return
    groups = getattr(manager, "_buffer_groups", None)
    if groups is None:
        raise Refusal("--kv-canary", "this build keeps its fingerprints elsewhere")
    for group in groups:
        for tensor in (getattr(group, field, None) for field in _CANARY):
            if tensor is not None:
                _check_rows("KV canary", tensor, size)
                yield tensor


def _tensors(pool: Any) -> Iterator[tuple[str, Tensor]]:
    for field, value in vars(pool).items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor) and item.ndim:
                yield field, item
