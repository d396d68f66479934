"""Faults planted on purpose: each leaves out one part of a move, to show that a test would see it.

A plant is a context manager around a whole run; it gets the run once the scheduler is up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvdefrag.core import holders
from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.sglang.census import owners_of
from kvdefrag.sglang.compat import compat

Plant = Callable[[Any], AbstractContextManager[Any]]
Buffers = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def rows_left_out(run: Any) -> AbstractContextManager[Any]:
    """The table rows keep the old slots."""
    return patch.object(holders.TableRows, "remap", _nothing)


def tree_left_out(run: Any) -> AbstractContextManager[Any]:
    """Tree nodes and other copies keep the old slots."""
    return patch.object(holders.ValueTensors, "remap", _nothing)


def copies_left_out(run: Any) -> AbstractContextManager[Any]:
    """The prefix indices of a chunked request keep the old slots (0.5.17)."""
    return patch.object(run.attachment.looker, "copies", lambda: ())


@contextmanager
def substitution_left_out(run: Any) -> Iterator[None]:
    """The free list keeps what has been taken, and lacks what has become free."""
    with (
        patch.object(HostTwoEndedFreeList, "substitute", _nothing),
        patch.object(HostTwoEndedFreeList, "substitute_front", _nothing),
    ):
        yield


def table_replaced(run: Any) -> AbstractContextManager[Any]:
    """The table is a new tensor with the new slots; the old one, which others know, stays."""
    pool = run.scheduler.req_to_token_pool

    def remap(self: Any, lut: Tensor) -> None:
        table = pool.req_to_token.clone()
        flat = table.view(-1)
        flat[self._at] = lut[flat[self._at].long()].to(flat.dtype)
        pool.req_to_token = table

    return patch.object(holders.TableRows, "remap", remap)


def rows_exchanged(run: Any) -> AbstractContextManager[Any]:
    """Two rows of each plan land in each other's place."""

    def exchange(plan: Any) -> None:
        at = (plan.src != plan.dst).nonzero().flatten()
        if len(at) > 1:
            plan.src[at[:2]] = plan.src[at[:2]].flip(0)

    inner = run.mover._inner
    copy = inner.copy

    def wrong(plan: Any) -> None:
        twisted = type(plan)(src=plan.src.clone(), dst=plan.dst)
        exchange(twisted)
        copy(twisted)

    return patch.object(inner, "copy", wrong)


def row_spoilt(run: Any) -> AbstractContextManager[Any]:
    """Somebody writes over one live row of the first layer, outside any step."""
    at_top = run.engine.at_top

    def spoil(iteration: int) -> None:
        at_top(iteration)
        if iteration == 12:
            pool = run.scheduler.token_to_kv_pool_allocator.get_kvcache()
            request = run.scheduler.running_batch.reqs[0]
            slot = run.scheduler.req_to_token_pool.req_to_token[compat().row(request), 3]
            (pool.v_buffer if hasattr(pool, "v_buffer") else pool.kv_buffer)[0][int(slot)] += 1.0

    return patch.object(run.engine, "at_top", spoil)


def slot_lost(run: Any) -> AbstractContextManager[Any]:
    """A slot leaves the free list and nobody has it."""
    return _in_step(run, 12, lambda: run.attachment.allocator.core.alloc(1))


def slot_freed_twice(run: Any) -> AbstractContextManager[Any]:
    """A free slot stands in the free list twice, another one not at all."""
    allocator = type(run.attachment.allocator)
    listed = allocator.free_pages.fget

    def wrong(self: Any) -> Tensor:
        found = listed(self).clone()
        found[-1] = found[-2]
        return found

    return patch.multiple(
        allocator,
        free_pages=property(wrong, allocator.free_pages.fset),
        get_all_free_pages=wrong,
    )


def tree_spoilt(run: Any) -> AbstractContextManager[Any]:
    """A tree node names one slot twice."""

    def spoil() -> None:
        owners = owners_of(run.scheduler, compat())
        values = run.attachment.looker.tree_values(node for _, node in owners)
        if values:
            values[0][:1] = values[0][1:2]

    return _in_step(run, 12, spoil)


def tree_lock_spoilt(run: Any) -> AbstractContextManager[Any]:
    """The root of the tree is no longer locked (0.5.23, core in Python)."""

    def spoil() -> None:
        full = run.scheduler.tree_cache.tree_core.root_node.component_data[0]
        full.lock_ref -= 1

    return _in_step(run, 12, spoil)


def _in_step(run: Any, number: int, what: Callable[[], Any]) -> AbstractContextManager[Any]:
    step, count = run.attachment.step, iter(range(1, 1_000_000))

    def spoilt() -> None:
        step()
        if next(count) == number:
            with torch.inference_mode():
                what()

    return patch.object(run.attachment, "step", spoilt)


def last_buffer_left_out(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return all buffers but the last: the values of the last layer, or a draft's pool."""
    return buffers[:-1]


def all_buffers(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return all."""
    return buffers


# Name -> what is planted, and which buffers are moved.
PLANTS: dict[str, tuple[Plant, Buffers]] = {
    "a buffer is left out": (lambda run: nullcontext(), last_buffer_left_out),
    "two rows are exchanged": (rows_exchanged, all_buffers),
    "the rows are left out": (rows_left_out, all_buffers),
    "the tree is left out": (tree_left_out, all_buffers),
    "the prefix indices are left out": (copies_left_out, all_buffers),
    "the table is replaced": (table_replaced, all_buffers),
    "the substitution is left out": (substitution_left_out, all_buffers),
    "a row is spoilt": (row_spoilt, all_buffers),
    "a slot is lost": (slot_lost, all_buffers),
    "a slot is free twice": (slot_freed_twice, all_buffers),
    "a tree node is spoilt": (tree_spoilt, all_buffers),
    "a tree lock is spoilt": (tree_lock_spoilt, all_buffers),
}
