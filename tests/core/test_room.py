"""Eviction before an allocation: for slots, then for whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.readback import Readback
from kvdefrag.core.room import Wants, make_room, wants

PAGE = 4


def want(kind: Kind, *wanted: tuple[int, int, int]) -> Demand:
    """(row, start, count) of each request."""
    columns = [np.array([w[i] for w in wanted], dtype=np.int64) for i in range(3)]
    return Demand(kind, *columns)


class Pool:
    """Slots 1..31, of which every even one from 16 on is free and the rest are cached text.

    `cached` is evicted piece by piece, in order.
    """

    def __init__(self, cached: Sequence[Sequence[int]], **other: Any) -> None:
        table = torch.zeros((4, 32), dtype=torch.int32)
        settings = {"reservation": True, "evict_for_pages": True, "checks": "strict", **other}
        self.alloc = SlotAllocator(31, page=PAGE, table=table, **settings)
        self.alloc.alloc(31)
        self.alloc.free(torch.arange(16, 31, 2))
        self.cached = [torch.tensor(piece) for piece in cached]
        self.asked: list[int] = []

    def evict_until(self, count: int) -> None:
        self.asked.append(count)
        while self.cached and self.alloc.available_size() < count:
            self.alloc.free(self.cached.pop(0))

    def serve(self, demand: Demand) -> list[int]:
        make_room(self.alloc, demand, self.evict_until)
        slots = self.alloc.alloc_for(demand)
        assert slots is not None
        return slots.tolist()


PROMPT = want(Kind.EXTEND, (1, 0, 4))


def test_room_for_the_slots_is_not_yet_room_for_a_page():
    pool = Pool([[4, 5, 6, 7], [8, 9, 10, 11]], evict_for_pages=False)

    slots = pool.serve(PROMPT)

    assert pool.asked == []
    assert len({slot // PAGE for slot in slots}) == 2


def test_cached_text_goes_until_there_is_a_whole_page():
    pool = Pool([[4, 5, 6, 7], [8, 9, 10, 11]])

    assert pool.serve(PROMPT) == [4, 5, 6, 7]
    assert pool.asked == [8 + PAGE]  # 8 are free, and one page is short
    assert len(pool.cached) == 1


def test_it_goes_on_where_the_first_piece_made_no_whole_page_but_another():
    # The first piece completes page 4 only; two pages are wanted.
    pool = Pool([[17, 19, 1, 2, 5, 6, 9, 10], [4, 7, 13, 14], [12, 15]])

    slots = pool.serve(want(Kind.EXTEND, (1, 0, 8)))

    assert pool.asked == [16, 20]
    assert sorted(slots) == [4, 5, 6, 7, 16, 17, 18, 19]


def test_it_stops_once_evicting_gains_no_page():
    scattered = [[1], [5], [9], [13], [2], [6], [10], [14], [3]]
    pool = Pool(scattered)

    pool.serve(PROMPT)

    assert pool.asked == [12]
    assert len(pool.cached) == len(scattered) - 4


def test_it_stops_once_nothing_is_left_to_evict():
    pool = Pool([])

    assert len(pool.serve(PROMPT)) == 4
    assert pool.asked == [12]


def test_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch):
    # A cache that gives one slot a call, each of which seems to complete another page.
    pool = Pool([[slot] for slot in range(1, 16)])
    whole = (number // 2 for number in range(1, 100))
    monkeypatch.setattr(pool.alloc, "count_whole_pages", lambda: next(whole))

    def one_piece(count: int) -> None:
        pool.asked.append(count)
        pool.alloc.free(pool.cached.pop(0))

    make_room(pool.alloc, want(Kind.EXTEND, (1, 0, 28)), one_piece)

    assert len(pool.asked) == 1 + 4  # once for the slots, and four rounds for pages


def test_while_pages_are_known_to_be_there_the_list_is_not_sorted(monkeypatch: pytest.MonkeyPatch):
    pool = Pool([])
    pool.alloc.free(torch.tensor([4, 5, 6, 7]))
    assert pool.alloc.count_whole_pages() == 1
    pool.alloc.free(torch.tensor([1]))
    monkeypatch.setattr(pool.alloc, "count_whole_pages", lambda: pytest.fail("sorted"))

    make_room(pool.alloc, want(Kind.DECODE, (1, 0, 1)), pool.evict_until)

    assert pool.asked == []


def test_a_decode_step_evicts_for_the_page_that_a_row_begins():
    pool = Pool([[4, 5, 6, 7], [8, 9, 10, 11]])

    assert pool.serve(want(Kind.DECODE, (1, 0, 1))) == [4]
    assert pool.alloc.reserved_size() == 3
    pool.asked.clear()
    assert pool.serve(want(Kind.DECODE, (1, 1, 1))) == [5]
    assert pool.asked == []  # its row holds the slot


@pytest.mark.parametrize("discipline", ["fifo", "sorted"])
@pytest.mark.parametrize("kind", [Kind.EXTEND, Kind.DECODE])
def test_orders_that_know_no_pages_evict_for_slots_only(discipline: str, kind: Kind):
    pool = Pool([[4, 5, 6, 7]], discipline=discipline, reservation=False)

    pool.serve(want(kind, (1, 0, 1), (2, 0, 1)))

    assert pool.asked == []
    assert wants(pool.alloc, want(kind, (1, 0, 3))) == Wants(3, 0)


def test_decode_without_reservation_evicts_for_slots_only():
    pool = Pool([[4, 5, 6, 7]], reservation=False)

    pool.serve(want(Kind.DECODE, (1, 0, 1)))

    assert pool.asked == []


def test_a_list_that_hears_late_evicts_once_and_waits_for_news():
    readback = Readback(2)
    pool = Pool([[4, 5, 6, 7], [8, 9, 10, 11], [1, 2, 3]], readback=readback)

    assert pool.serve(PROMPT) == [4, 5, 6, 7]

    assert pool.asked == [12]


def test_a_row_amid_a_group_of_single_slots_wants_no_page():
    pool = Pool([])
    pool.alloc.whole_groups = True
    pool.serve(want(Kind.DECODE, (1, 0, 1)))  # no whole page there: it begins a group

    assert wants(pool.alloc, want(Kind.DECODE, (1, 1, 1))) == Wants(1, 0)
    pool.alloc.whole_groups = False
    assert wants(pool.alloc, want(Kind.DECODE, (1, 1, 1))) == Wants(PAGE, 1)
