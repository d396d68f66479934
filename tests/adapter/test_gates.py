"""What keeps a single step from moving anything; the next one may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.errors import Busy


class ReqToTokenPool(SimpleNamespace):
    """A request table of two rows, of which some are free."""


def request(row: int, **more: Any) -> Any:
    """Return a request as either version keeps it, without a prefix."""
    kv = SimpleNamespace(
        kv_allocated_len=4,
        kv_committed_len=4,
        cache_protected_len=0,
        req_pool_idx=row,
        holds_kv=True,
    )
    flat = {"req_pool_idx": row, "cache_protected_len": 0, "kv_committed_len": 4}
    return SimpleNamespace(kv=kv, lock=None, last_node=None, **flat, **more)


def looker(*requests: Any, free: tuple[int, ...] = (), waiting: int = 0) -> Any:
    """Return a looker at a scheduler that runs `requests`."""
    from kvdefrag.sglang.compat import compat
    from kvdefrag.sglang.looker import Looker
    from kvdefrag.sglang.trees import NoTree

    pool = ReqToTokenPool(
        req_to_token=torch.zeros((3, 8), dtype=torch.int32),
        free_slots=list(free),
        req_generation=torch.zeros(3, dtype=torch.int64),
    )
    scheduler = SimpleNamespace(
        req_to_token_pool=pool,
        running_batch=SimpleNamespace(reqs=list(requests)),
        last_batch=None,
        chunked_req=None,
        waiting_queue=[None] * waiting,
        tree_cache=SimpleNamespace(session_records=dict),
    )
    return Looker(scheduler, compat(), NoTree("none"))


def test_all_rows_are_seen_once() -> None:
    view = looker(request(2), request(1), request(2)).view(7)

    assert (view.step, view.rows.tolist(), view.allocated.tolist()) == (7, [1, 2], [4, 4])


def test_case_26_a_row_of_unknown_owner_closes_the_gate() -> None:
    with pytest.raises(Busy, match="a row of unknown owner"):
        looker(request(1)).view(0)
    assert looker(request(1), free=(2,)).view(0).rows.tolist() == [1]


def test_a_group_of_beams_closes_the_gate() -> None:
    with pytest.raises(Busy, match="beam search"):
        looker(request(1), request(2, beam_group=object())).view(0)
    assert looker(request(1), request(2, beam_group=None)).view(0).rows.size == 2


def test_requests_that_wait_are_at_work_and_idle_rows_are_not() -> None:
    assert looker(request(1), free=(2,), waiting=3).view(0).at_work == 4
    assert looker(free=(1, 2)).view(0).at_work == 0


def test_an_open_free_group_closes_the_gate() -> None:
    from kvdefrag.sglang.allocator import KvdefragAllocator
    from kvdefrag.sglang.attachment import Attachment

    allocator = KvdefragAllocator(16, torch.float32, "cpu", MagicMock(), False)
    allocator.take_over(SlotAllocator(16, page=16))
    attachment = Attachment.__new__(Attachment)
    attachment.allocator = allocator

    assert attachment._gates() == ()
    allocator.free_group_begin()
    assert attachment._gates() == ("free group open",)
    allocator.free_group_end()
    assert attachment._gates() == ()
