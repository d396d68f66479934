"""Every buffer that shares the slot numbers: moved completely, or the pool is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kvdefrag.sglang.refusal import Refusal

# By class name, exactly: a subclass may keep more than its parent does.
_BUFFERS = {
    "MHATokenToKVPool": ("k_buffer", "v_buffer"),
    "MLATokenToKVPool": ("kv_buffer",),
}
# Lists of views, pointers or work space, not rows of their own.
_NO_ROWS = frozenset({"mem_usage", "data_ptrs", "data_strides", "k_data_ptrs", "v_data_ptrs"})


def buffers_of(pool: Any, size: int) -> list[Tensor]:
    """Return the buffers of one pool, each of `size + 1` or more rows in its first dimension.

    Raises:
        Refusal: The class is unknown, a buffer is not laid out by rows, or the pool keeps another
            tensor with a row to each slot.
    """
    name = type(pool).__name__
    if name not in _BUFFERS:
        raise Refusal(f"pool {name}", f"{' and '.join(_BUFFERS)} are supported")
    if getattr(pool, "page_size", 1) != 1:
        raise Refusal(f"{name}.page_size {pool.page_size}", "1 is supported")
    found = [tensor for field in _BUFFERS[name] for tensor in getattr(pool, field)]
    for tensor in found:
        if tensor.shape[0] < size + 1 or not tensor[0].is_contiguous():
            raise Refusal(f"{name} buffer {tuple(tensor.shape)}", f"{size + 1} rows are needed")
    known = {tensor.data_ptr() for tensor in found}
    rows = found[0].shape[0]
    for field, tensor in _tensors(pool):
        if field not in _NO_ROWS and tensor.shape[:1] == (rows,) and tensor.data_ptr() not in known:
            raise Refusal(f"{name}.{field}", "a tensor with a row to each slot that is not known")
    return found


def all_buffers(scheduler: Any, size: int) -> list[Tensor]:
    """Return the buffers of the target's and every draft worker's pool, each once.

    Raises:
        Refusal: See `buffers_of`.
    """
    pools = [scheduler.token_to_kv_pool_allocator.get_kvcache(), *_draft_pools(scheduler)]
    found: dict[int, Tensor] = {}
    for pool in {id(pool): pool for pool in pools}.values():
        for tensor in buffers_of(pool, size):
            found[tensor.data_ptr()] = tensor
    return list(found.values())


def _draft_pools(scheduler: Any) -> Iterator[Any]:
    worker = getattr(scheduler, "draft_worker", None)
    algorithm = scheduler.spec_algorithm
    if worker is None or algorithm.is_none() or algorithm.is_ngram():
        return
    inner = worker.draft_worker
    if inner is None:
        return
    runners = getattr(inner, "draft_runners", None)
    if runners is None:
        runners = [inner.model_runner]
    for runner in runners:
        yield runner.token_to_kv_pool


def _tensors(pool: Any) -> Iterator[tuple[str, Tensor]]:
    for field, value in vars(pool).items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor) and item.ndim:
                yield field, item
