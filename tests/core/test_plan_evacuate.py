"""Which pages are emptied and where their rows go, with pages of 4."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.core.plan import MovePlan, violation
from kvdefrag.core.plan_evacuate import compact, plan_evacuation
from kvdefrag.core.readback import Readback
from kvdefrag.core.two_ended import TwoEndedFreeList

PAGE = 4


def host(size: int) -> HostTwoEndedFreeList:
    return HostTwoEndedFreeList(size, page=PAGE)


def device(size: int) -> TwoEndedFreeList:
    return TwoEndedFreeList(size, page=PAGE, device=torch.device("cpu"), readback=Readback(0))


both = pytest.mark.parametrize("make", [host, device])


def free_of(make, live: list[int], size: int):
    free = make(size)
    free.take_front(size)
    rest = sorted(set(range(1, size + 1)) - set(live))
    free.put(torch.tensor(rest, dtype=torch.int64))
    free.reorder()
    return free


def evacuate(
    make,
    live: list[int],
    *,
    size: int = 23,
    fixed: tuple[int, ...] = (),
    max_pages: int = 2,
    max_live: int = 3,
) -> MovePlan:
    movable = torch.tensor([s for s in live if s not in fixed], dtype=torch.int64)
    free = free_of(make, live, size)
    return plan_evacuation(movable, free, page=PAGE, max_pages=max_pages, max_live=max_live)


def pairs(plan: MovePlan) -> list[tuple[int, int]]:
    both_ends = zip(plan.src.tolist(), plan.dst.tolist(), strict=True)
    return [(src, dst) for src, dst in both_ends if src != dst]


# Page 0 is full, page 1 holds one row, page 2 three, page 3 two; pages 4 and 5 are free.
LIVE = [1, 2, 3, 4, 8, 9, 10, 12, 13]


@both
def test_the_sparsest_page_is_emptied_into_the_densest(make):
    plan = evacuate(make, LIVE)

    # Of three partly used pages one is emptied at most.
    assert pairs(plan) == [(4, 11)]
    assert plan.capacity == 6
    assert plan.src.tolist()[1:] == plan.dst.tolist()[1:] == [0] * 5


@both
def test_a_page_with_an_unmovable_row_is_kept(make):
    assert pairs(evacuate(make, LIVE, fixed=(4,))) == [(12, 11), (13, 7)]
    # The one fixed row of page 3 keeps its neighbour there too.
    plan = evacuate(make, LIVE, fixed=(4, 13))
    assert pairs(plan) == [(8, 15), (9, 14), (10, 7)]
    assert pairs(evacuate(make, LIVE, fixed=(4, 13, 9))) == []


@both
def test_a_page_with_too_many_rows_is_kept(make):
    assert pairs(evacuate(make, LIVE, fixed=(4,), max_live=1)) == []
    assert pairs(evacuate(make, LIVE, fixed=(4,), max_live=2)) == [(12, 11), (13, 7)]


@both
def test_a_full_page_is_kept_however_many_rows_may_move(make):
    # Page 1 is full; pages 2 and 3 hold three rows each.
    live = [4, 5, 6, 7, 8, 9, 10, 12, 13, 14]

    plan = evacuate(make, live, fixed=(8, 12), max_live=4)
    assert pairs(plan) == []


@both
def test_nothing_moves_without_movable_rows_or_without_partly_used_pages(make):
    assert pairs(evacuate(make, LIVE, fixed=tuple(LIVE))) == []
    assert pairs(evacuate(make, [])) == []
    assert pairs(evacuate(make, list(range(1, 24)))) == []
    assert pairs(evacuate(make, [8, 9, 10, 11])) == []


@both
def test_a_pool_of_a_few_slots_has_nothing_to_empty(make):
    assert pairs(evacuate(make, [1], size=1)) == []
    assert pairs(evacuate(make, [1], size=3)) == []
    # The page of the sink and a partial last page can never become whole.
    assert pairs(evacuate(make, [1, 4], size=5)) == []


@both
def test_the_rows_of_a_page_move_together_or_not_at_all(make):
    # Page 1 holds two rows and page 2 has one hole; the others are full.
    live = [1, 2, 3, 4, 5, 8, 9, 10, *range(12, 24)]

    assert pairs(evacuate(make, live)) == []


@both
def test_pages_as_sparse_as_each_other_go_by_their_number(make):
    # Pages 1 to 4 hold one row each, page 5 three: two of the five may be emptied.
    live = [1, 2, 3, 7, 9, 14, 16, 20, 21, 23]

    assert pairs(evacuate(make, live)) == [(7, 22), (9, 19)]
    assert pairs(evacuate(make, live, max_pages=1)) == [(7, 22)]


@both
def test_a_victim_is_no_refuge_and_whole_pages_are_left_alone(make):
    live = [4, 5, 8, 9, 12, 13]

    # Page 0 has three holes, but page 3 is denser.
    plan = evacuate(make, live)
    assert pairs(plan) == [(4, 15), (5, 14), (8, 3), (9, 2)]


@both
def test_case_53_the_worst_case_is_bounded_by_the_plan(make):
    live = list(range(2, 32_768, 2))
    free = free_of(make, live, 32_767)
    plan = plan_evacuation(torch.tensor(live), free, page=PAGE, max_pages=100, max_live=2)

    assert plan.capacity == 200
    assert len(pairs(plan)) == 200


def test_kept_values_are_brought_to_the_front():
    values, keep = torch.tensor([5, 6, 7, 8]), torch.tensor([True, False, True, True])

    assert compact(values, keep, 5).tolist() == [5, 7, 8, 0, 0]
    assert compact(values, keep, 2).tolist() == [5, 7]
    assert compact(values, keep, 0).tolist() == []
    assert compact(values, keep & False, 3).tolist() == [0, 0, 0]
    assert compact(values[:0], keep[:0], 2).tolist() == [0, 0]


@pytest.mark.parametrize("make", [host, device])
@given(
    live=st.sets(st.integers(1, 70)),
    fixed=st.sets(st.integers(1, 70), max_size=6),
    size=st.integers(1, 70),
    max_pages=st.integers(1, 5),
    max_live=st.integers(1, 4),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=80)
def test_every_page_is_emptied_whole_and_the_order_of_the_rows_does_not_matter(
    make, live: set[int], fixed: set[int], size: int, max_pages: int, max_live: int, rng
):
    live = {s for s in live if s <= size}
    free = free_of(make, sorted(live), size)
    movable = sorted(live - fixed)
    plans = []
    for _ in range(2):
        slots = torch.tensor(movable, dtype=torch.int64)
        plans.append(
            plan_evacuation(slots, free, page=PAGE, max_pages=max_pages, max_live=max_live)
        )
        random.Random(rng.random()).shuffle(movable)
    assert torch.equal(plans[0].src, plans[1].src)
    assert torch.equal(plans[0].dst, plans[1].dst)

    moved = pairs(plans[0])
    is_free = torch.zeros(size + 1, dtype=torch.bool)
    is_free[free.slots()] = True
    assert not bool(violation(plans[0], is_free, size))
    assert {src for src, _ in moved} <= live - fixed
    victims = {src // PAGE for src, _ in moved}
    after = (live - {src for src, _ in moved}) | {dst for _, dst in moved}
    assert len(victims) <= max_pages
    for page in victims:
        members = set(range(page * PAGE, (page + 1) * PAGE))
        assert 1 <= len(members & live) <= max_live
        assert not members & after
        assert max(members) <= size
    # No whole page was broken.
    for _, dst in moved:
        assert set(range(dst // PAGE * PAGE, (dst // PAGE + 1) * PAGE)) & (live | {0}) or (
            dst // PAGE == (size + 1) // PAGE
        )
