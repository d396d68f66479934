"""Gathering one request, and packing downward, with pages of 4."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.core.plan import MovePlan, violation
from kvdefrag.core.plan_gather import plan_gather, plan_lower
from kvdefrag.core.readback import Readback
from kvdefrag.core.two_ended import TwoEndedFreeList

PAGE = 4


def host(size: int) -> HostTwoEndedFreeList:
    return HostTwoEndedFreeList(size, page=PAGE)


def device(size: int) -> TwoEndedFreeList:
    return TwoEndedFreeList(size, page=PAGE, device=torch.device("cpu"), readback=Readback(0))


both = pytest.mark.parametrize("make", [host, device])


def gather(
    make, slots: list[int], previous: int | None, pages: list[int], size: int = 39
) -> MovePlan:
    """Plan with just these pages whole and free."""
    free = make(size)
    free.take_front(size)
    whole = [s for p in pages for s in range(p * PAGE, p * PAGE + PAGE)]
    free.put(torch.tensor(whole, dtype=torch.int64))
    free.reorder()
    before = None if previous is None else torch.tensor(previous)
    stretch = torch.tensor(slots, dtype=torch.int64)
    return plan_gather(stretch, before, free, page=PAGE)


def pairs(plan: MovePlan) -> list[tuple[int, int]]:
    both_ends = zip(plan.src.tolist(), plan.dst.tolist(), strict=True)
    return [(src, dst) for src, dst in both_ends if src != dst]


SIX = [1, 3, 5, 2, 6, 9]


@both
def test_a_stretch_goes_to_the_first_window_that_is_long_enough(make):
    plan = gather(make, SIX, None, [3, 5, 6, 8, 9])

    # Page 3 alone is too short; the last page is used in part.
    assert plan.dst.tolist() == [20, 21, 22, 23, 24, 25]
    assert plan.src.tolist() == SIX


@both
def test_it_goes_on_behind_the_token_before_it(make):
    plan = gather(make, SIX, 31, [3, 5, 6, 8, 9])

    assert plan.dst.tolist() == [32, 33, 34, 35, 36, 37]


@both
def test_a_token_before_it_amid_a_page_leaves_the_first_window(make):
    assert gather(make, SIX, 30, [5, 6, 8, 9]).dst.tolist()[0] == 20


@both
def test_pages_behind_that_are_too_few_leave_the_first_window(make):
    assert gather(make, SIX, 35, [5, 6, 9]).dst.tolist()[0] == 20
    assert gather(make, SIX, 31, [5, 6, 8]).dst.tolist()[0] == 20
    # Behind the last page of the pool there is nothing.
    assert gather(make, SIX, 39, [5, 6, 8]).dst.tolist()[0] == 20


@both
def test_without_a_window_the_lowest_whole_pages_serve(make):
    assert gather(make, SIX, None, [3, 5, 8]).dst.tolist() == [12, 13, 14, 15, 20, 21]


@both
def test_with_too_few_pages_nothing_moves(make):
    plan = gather(make, SIX, None, [5])

    assert plan.capacity == 6
    assert pairs(plan) == []
    assert pairs(gather(make, SIX, None, [])) == []


@both
def test_a_stretch_larger_than_the_pool_moves_nothing(make):
    plan = gather(make, list(range(1, 12)), 30, [1], size=7)

    assert plan.capacity == 11
    assert pairs(plan) == []


@both
def test_a_stretch_that_is_one_run_behind_its_predecessor_stays(make):
    assert pairs(gather(make, [13, 14, 15, 16], 12, [5, 6])) == []
    assert pairs(gather(make, [13, 14, 15, 16], None, [5, 6])) == []
    assert pairs(gather(make, [13], None, [5, 6])) == []


@both
def test_a_run_that_lies_elsewhere_than_behind_its_predecessor_moves(make):
    plan = gather(make, [13, 14], 30, [5, 6])

    assert pairs(plan) == [(13, 20), (14, 21)]


@both
@pytest.mark.parametrize("previous", [None, 7])
def test_case_47_an_empty_stretch_is_an_empty_plan(make, previous: int | None):
    plan = gather(make, [], previous, [5])

    assert plan.capacity == 0


def lower(movable: list[int], free: list[int], rows: int) -> MovePlan:
    return plan_lower(
        torch.tensor(movable, dtype=torch.int64), torch.tensor(free, dtype=torch.int64), rows=rows
    )


def test_the_highest_rows_go_to_the_lowest_slots():
    assert pairs(lower([5, 30, 9, 22], [3, 28, 1, 12], 3)) == [(30, 1), (22, 3)]
    # Slot 9 would have to go up to 12.
    assert pairs(lower([5, 30, 9, 22], [3, 28, 1, 12], 2)) == [(30, 1), (22, 3)]
    assert pairs(lower([5, 30, 9, 22], [3, 28, 1, 12], 1)) == [(30, 1)]


def test_case_5_packing_goes_downward_only():
    assert pairs(lower([1, 2, 3], [4, 5, 6], 3)) == []
    assert pairs(lower([10, 11], [12, 3], 2)) == [(11, 3)]


def test_a_packed_pool_an_empty_pool_and_a_full_one_stay():
    for movable, free in (([], [1, 2]), ([1, 2], []), ([], [])):
        plan = lower(movable, free, 4)
        assert plan.src.tolist() == plan.dst.tolist() == [0] * 4


def test_case_62_packing_brings_scattered_rows_together():
    live = list(range(16, 16_000, 16))
    free = sorted(set(range(1, 16_001)) - set(live))
    plan = lower(live, free, len(live))

    moved = dict(pairs(plan))
    after = sorted(moved.get(s, s) for s in live)
    assert after == list(range(1, 1000))


@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)), st.integers(0, 30))
@settings(max_examples=60)
def test_packing_is_sound_downward_and_lowers_the_high_water_mark(
    live: set[int], fixed: set[int], rows: int
):
    movable, free = sorted(live - fixed), sorted(set(range(1, 61)) - live)
    plan = lower(movable, free, rows)

    is_free = torch.zeros(61, dtype=torch.bool)
    is_free[torch.tensor(free, dtype=torch.int64)] = True
    assert plan.capacity == rows
    assert not bool(violation(plan, is_free, 60))
    moved = dict(pairs(plan))
    assert all(dst < src for src, dst in moved.items())
    if not fixed and len(moved) < rows:
        assert sorted(moved.get(s, s) for s in live) == list(range(1, len(live) + 1))


@pytest.mark.parametrize("make", [host, device])
@given(
    pages=st.sets(st.integers(1, 9)),
    count=st.integers(1, 20),
    previous=st.one_of(st.none(), st.integers(1, 39)),
)
@settings(max_examples=60)
def test_a_gathered_stretch_fills_whole_pages_in_order(make, pages: set[int], count: int, previous):
    live = [s for s in range(39, 0, -1) if s // PAGE not in pages]
    slots = [s for s in live if s != previous][:count]
    plan = gather(make, slots, previous, sorted(pages))

    assert plan.capacity == len(slots)
    moved = pairs(plan)
    assert len(moved) in (0, len(slots))
    need = -(-len(slots) // PAGE)
    if len(slots) > 1:
        assert bool(moved) is (need <= len(pages))
    for i, (_, dst) in enumerate(moved):
        assert dst // PAGE in pages
        assert dst % PAGE == i % PAGE
