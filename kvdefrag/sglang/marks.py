"""Marks the three callers of the allocator, and gives reserved slots back where SGLang lets go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.common import evict_from_tree_cache

from kvdefrag.core.demand import Demand, IntArray, Kind
from kvdefrag.sglang.allocator import KvdefragAllocator
from kvdefrag.sglang.compat import Compat

Original = Callable[..., Any]


class ExtendMark:
    """A prefill batch, whose rows are known only once it allocates."""

    def __init__(self, compat: Compat, batch: Any) -> None:
        self._compat, self._batch = compat, batch

    def demand(self) -> Demand:
        rows = _rows(self._compat, self._batch.reqs)
        starts = np.array(self._batch.prefix_lens, dtype=np.int64)
        return Demand(Kind.EXTEND, rows, starts, np.array(self._batch.extend_lens, dtype=np.int64))

    def make_room(self, count: int) -> None:
        evict_from_tree_cache(self._batch.tree_cache, count)


class DecodeMark:
    """A decode batch: one token to each request behind its allocated length."""

    def __init__(self, compat: Compat, batch: Any) -> None:
        self._compat, self._batch = compat, batch

    def demand(self) -> Demand:
        found = [self._compat.lengths(request) for request in self._batch.reqs]
        rows = np.array([k.row for k in found if k is not None], dtype=np.int64)
        starts = np.array([k.allocated for k in found if k is not None], dtype=np.int64)
        return Demand(Kind.DECODE, rows, starts, np.ones_like(rows))

    def make_room(self, count: int) -> None:
        evict_from_tree_cache(self._batch.tree_cache, count)


class SpeculativeMark:
    """Rows of a verify batch, and how far each is to hold slots."""

    def __init__(
        self, compat: Compat, tree: Any, reqs: Sequence[Any], lengths: tuple[Any, Any]
    ) -> None:
        self._compat, self._tree, self._reqs, self._lengths = compat, tree, reqs, lengths

    def demand(self) -> Demand:
        now, then = (t.numpy().astype(np.int64) for t in self._lengths)
        return Demand(Kind.SPECULATIVE, _rows(self._compat, self._reqs), now, then - now)

    def make_room(self, count: int) -> None:
        evict_from_tree_cache(self._tree, count)


class Marks:
    """Hooks around SGLang's allocation helpers.

    Args:
        compat: How this version keeps its requests.
    """

    def __init__(self, compat: Compat) -> None:
        self._compat = compat

    def around_extend(self, original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap `alloc_for_extend(batch)`."""
        mark = ExtendMark(self._compat, batch)
        return self._marked(batch.tree_cache, mark, original, batch, *args, **kwargs)

    def around_decode(self, original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap `alloc_for_decode(batch, token_per_req)`."""
        mark = DecodeMark(self._compat, batch)
        return self._marked(batch.tree_cache, mark, original, batch, *args, **kwargs)

    def around_speculative(
        self, original: Original, tree_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap `alloc_for_spec_decode(tree_cache, ...)`."""
        lengths = kwargs["cur_kv_lens_cpu"], kwargs["nxt_kv_lens_cpu"]
        mark = SpeculativeMark(self._compat, tree_cache, kwargs["reqs"], lengths)
        return self._marked(tree_cache, mark, original, tree_cache, *args, **kwargs)

    def around_release(
        self, original: Original, req: Any, tree_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap `release_kv_cache(req, tree_cache, ...)`: reserved slots go back first."""
        allocator = _taken_over(tree_cache)
        lengths = self._compat.lengths(req) if allocator is not None else None
        if allocator is not None and allocator.core is not None and lengths is not None:
            try:
                allocator.core.release(lengths.row, lengths.allocated)
            except Exception as fault:
                allocator.give_up(fault)
        return original(req, tree_cache, *args, **kwargs)

    def around_capacity(self, original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap `ScheduleBatch.check_decode_mem` (0.5.17): reserved slots count as well."""
        if original(batch, *args, **kwargs):
            return True
        allocator = _taken_over(batch.tree_cache)
        if allocator is None:
            return False
        return allocator.fits(batch.new_tokens_required_next_decode(*args, **kwargs))

    def _marked(self, tree: Any, mark: Any, original: Original, *args: Any, **kwargs: Any) -> Any:
        allocator = _taken_over(tree)
        if allocator is None:
            return original(*args, **kwargs)
        allocator.mark = mark
        try:
            return original(*args, **kwargs)
        finally:
            allocator.mark = None


def after_uncached(result: tuple[int, int], checker: Any) -> tuple[int, int]:
    """Count reserved slots among those that requests hold outside the tree."""
    allocator = checker.token_to_kv_pool_allocator
    if not isinstance(allocator, KvdefragAllocator) or allocator.core is None:
        return result
    return result[0] + allocator.core.reserved_size(), result[1]


def _rows(compat: Compat, reqs: Sequence[Any]) -> IntArray:
    found = [compat.row(request) for request in reqs]
    return np.array(found, dtype=np.int64)


def _taken_over(tree: Any) -> KvdefragAllocator | None:
    allocator = tree.token_to_kv_pool_allocator
    taken = isinstance(allocator, KvdefragAllocator) and allocator.core is not None
    return allocator if taken else None
