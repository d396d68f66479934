"""Which groups of tokens move into whole pages, from hand-built rows with pages of 4."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.plan import violation
from kvdefrag.core.plan_tenure import TenurePlan, plan_tenure
from kvdefrag.core.readback import Readback
from kvdefrag.core.two_ended import TwoEndedFreeList
from kvdefrag.core.view import EngineView

PAGE, SIZE, WIDTH = 4, 39, 20
FreeListOf = HostTwoEndedFreeList | TwoEndedFreeList


def host(size: int, page: int) -> FreeListOf:
    return HostTwoEndedFreeList(size, page=page)


def device(size: int, page: int) -> FreeListOf:
    return TwoEndedFreeList(size, page=page, device=torch.device("cpu"), readback=Readback(0))


both = pytest.mark.parametrize("make", [host, device])


def free_without(make, live: set[int], size: int = SIZE, page: int = PAGE) -> FreeListOf:
    free = make(size, page)
    free.take_front(size)
    free.put(torch.tensor([s for s in range(1, size + 1) if s not in live], dtype=torch.int64))
    free.reorder()
    return free


def view_of(*rows: list[int], committed: list[int] | None = None) -> EngineView:
    table = torch.full((len(rows) + 1, WIDTH), 6, dtype=torch.int32)
    for i, slots in enumerate(rows, start=1):
        table[i, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    lengths = np.array([len(r) for r in rows] if committed is None else committed)
    zeros = np.zeros(len(rows), dtype=np.int64)
    return EngineView(0, table, np.arange(1, len(rows) + 1), zeros, zeros, lengths, lengths)


def plan_of(
    make,
    *rows: list[int],
    starts: list[int] | None = None,
    committed: list[int] | None = None,
    taken: set[int] = frozenset(),
    max_groups: int = 99,
) -> TenurePlan | None:
    view = view_of(*rows, committed=committed)
    before = view.table.clone()
    free = free_without(make, {s for row in rows for s in row} | taken)
    at = np.array(starts or [0] * len(rows))
    plan = plan_tenure(view, at, free, page=PAGE, max_groups=max_groups)
    assert torch.equal(view.table, before)
    return plan


def moves(plan: TenurePlan) -> list[tuple[int, int]]:
    pairs = zip(plan.moves.src.tolist(), plan.moves.dst.tolist(), strict=True)
    return [(src, dst) for src, dst in pairs if src != dst]


@both
def test_a_scattered_group_moves_into_the_lowest_whole_page(make):
    # Slot 5 keeps page 1 from being whole.
    plan = plan_of(make, [1, 3, 5, 2, 17])

    assert moves(plan) == [(1, 8), (3, 9), (5, 10), (2, 11)]
    assert plan.reached.tolist() == [4]
    assert plan.index.tolist() == [[WIDTH, WIDTH + 1, WIDTH + 2, WIDTH + 3]]
    assert plan.before.tolist() == [[1, 3, 5, 2]]
    assert plan.after.tolist() == [[8, 9, 10, 11]]
    assert plan.pages_used.tolist() == [True]
    assert plan.given.tolist() == [[1, 3, 5, 2]]
    assert plan.of.tolist() == [0]


@both
def test_a_run_that_lies_across_a_page_border_moves_too(make):
    plan = plan_of(make, [9, 10, 11, 12, 30])

    assert moves(plan) == [(9, 4), (10, 5), (11, 6), (12, 7)]
    # Unless its end may be a page that is still filling.
    assert plan_of(make, [9, 10, 11, 12]).reached.tolist() == [3]


@both
def test_a_group_that_is_an_aligned_page_stays(make):
    plan = plan_of(make, [8, 9, 10, 11, 1])

    assert moves(plan) == []
    assert plan.reached.tolist() == [4]
    assert plan.pages_used.tolist() == [False]


@both
def test_a_page_begun_by_the_prompt_is_passed_and_the_next_group_moves(make):
    # Tokens 5 to 8 are page 3; the shared prefix ends within it, at token 6.
    row = [20, 8, 9, 10, 11, 12, 13, 14, 15, 3, 1, 5, 2]
    plan = plan_of(make, row, starts=[6])

    assert moves(plan) == [(3, 16), (1, 17), (5, 18), (2, 19)]
    assert plan.reached.tolist() == [13]
    assert plan.index.tolist() == [[WIDTH + 9, WIDTH + 10, WIDTH + 11, WIDTH + 12]]


@both
def test_a_begun_page_that_is_out_of_order_is_a_group_like_any_other(make):
    # Token 7 should be slot 14.
    row = [20, 8, 9, 10, 11, 12, 13, 30, 15, 3]
    plan = plan_of(make, row, starts=[6])

    assert plan.before.tolist() == [[13, 30, 15, 3]]
    assert plan.reached.tolist() == [10]


@both
def test_a_page_cannot_have_begun_before_the_row(make):
    # Slot 14 would be the third of its page, but it is the first token.
    plan = plan_of(make, [14, 15, 1, 3])

    assert [src for src, _ in moves(plan)] == [14, 15, 1, 3]


@both
def test_the_page_of_the_sink_is_none(make):
    plan = plan_of(make, [30, 1, 2, 3, 5], starts=[1])

    assert [src for src, _ in moves(plan)] == [1, 2, 3, 5]


@both
def test_tokens_before_a_later_page_stay_left_over(make):
    row = [1, 3, 8, 9, 10, 11, 5]
    first = plan_of(make, row)
    assert moves(first) == []
    assert first.reached.tolist() == [2]

    second = plan_of(make, row, starts=[2])
    assert moves(second) == []
    assert second.reached.tolist() == [6]


@both
def test_a_page_that_is_still_filling_counts_as_far_as_it_is_committed(make):
    filling = plan_of(make, [1, 3, 8, 9])
    assert (moves(filling), filling.reached.tolist()) == ([], [2])

    broken = plan_of(make, [1, 3, 8, 9, 30])
    assert [src for src, _ in moves(broken)] == [1, 3, 8, 9]
    assert broken.reached.tolist() == [4]


@both
def test_a_page_that_begins_with_the_next_group_does_not_hold_this_one(make):
    plan = plan_of(make, [1, 3, 5, 2, 8, 9, 10, 11])

    assert [src for src, _ in moves(plan)] == [1, 3, 5, 2]


@both
def test_uncommitted_and_stale_entries_are_neither_read_nor_moved(make):
    # Behind the four committed tokens the row goes on, in an order that must not matter.
    row = [8, 9, 10, 11, 3, 30]
    assert moves(plan_of(make, row, committed=[4])) == []
    assert plan_of(make, row, committed=[5]).reached.tolist() == [4]
    assert plan_of(make, row, committed=[7], starts=[4]) is None


@both
def test_without_a_whole_group_there_is_no_plan(make):
    assert plan_of(make, [1, 3, 5]) is None
    assert plan_of(make, [1, 3, 5, 2, 9], starts=[2]) is None
    assert plan_of(make) is None
    assert plan_of(make, [1, 3, 5, 2], max_groups=0) is None


@both
def test_without_a_whole_page_nothing_moves_and_the_group_waits(make):
    one_of_each = set(range(4, SIZE + 1, 4))
    plan = plan_of(make, [1, 3, 5, 2], taken=one_of_each)

    assert moves(plan) == []
    assert plan.reached.tolist() == [0]
    assert plan.pages_used.tolist() == [False]
    assert plan.after.tolist() == plan.before.tolist() == [[1, 3, 5, 2]]


@both
def test_the_last_page_goes_to_the_row_that_comes_first(make):
    all_but_page_eight = set(range(4, SIZE + 1, 4)) - {32}
    rows = [[12, 13, 14, 15], [1, 3, 5, 2], [9, 7, 11, 10]]
    plan = plan_of(make, *rows, taken=all_but_page_eight)

    assert moves(plan) == [(1, 32), (3, 33), (5, 34), (2, 35)]
    assert plan.reached.tolist()[:3] == [4, 4, 0]
    assert plan.given.tolist() == [[1, 3, 5, 2], [0] * 4, [0] * 4, [0] * 4]
    assert plan.pages_used.tolist() == [True, False, False, False]


@both
def test_lanes_are_padded_to_a_power_of_two_that_moves_nothing(make):
    plan = plan_of(make, [1, 3, 5, 2], [9, 7, 11, 10], [20, 13, 17, 14])

    assert plan.of.tolist() == [0, 1, 2]
    assert plan.index.shape == plan.given.shape == (4, 4)
    assert plan.moves.capacity == 16
    assert len(moves(plan)) == 12
    assert plan.index[3].tolist() == [0] * 4
    assert torch.equal(plan.before[3], plan.after[3])
    assert plan.pages_used.tolist() == [True, True, True, False]


@both
def test_rows_beyond_the_limit_wait(make):
    rows = [[21], [1, 3, 5, 2], [9, 7, 11, 10], [20, 13, 17, 14]]
    plan = plan_of(make, *rows, max_groups=2)

    assert plan.of.tolist() == [1, 2]
    assert [src for src, _ in moves(plan)] == [1, 3, 5, 2, 9, 7, 11, 10]


@both
def test_a_refused_plan_changes_nothing(make):
    plan = plan_of(make, [1, 3, 5, 2], [9, 7, 11, 10])

    voided = plan.voided_if(torch.tensor(True))
    assert moves(voided) == []
    assert voided.after.tolist() == voided.before.tolist() == plan.before.tolist()
    assert voided.pages_used.tolist() == [False, False]
    assert voided.reached.tolist() == [0, 0]
    passed = plan.voided_if(torch.tensor(False))
    assert moves(passed) == moves(plan)
    assert passed.after.tolist() == plan.after.tolist()
    assert passed.reached.tolist() == plan.reached.tolist()
    assert plan.voided_if(None) is plan


def carry_out(view: EngineView, plan: TenurePlan, free: FreeListOf) -> None:
    view.table.view(-1)[plan.index] = plan.after.to(torch.int32)
    free.substitute_front(plan.pages_used, plan.given)
    free.reorder()


@pytest.mark.parametrize("make", [host, device])
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=25
    ),
    starts=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    groups=st.integers(1, 3),
)
@settings(max_examples=25)
def test_tenure_never_breaks_a_page_and_ends_with_every_group_seen(make, pieces, starts, groups):
    # Rows are made of stretches of free slots, some of them whole pages.
    unused = set(range(1, 80))
    rows: list[list[int]] = [[], [], []]
    for row, page, length in pieces:
        stretch = [s for s in range(page * 8, page * 8 + length) if s in unused]
        rows[row] += stretch[: WIDTH - len(rows[row])]
        unused -= set(rows[row])
    view = view_of(*rows)
    free = free_without(make, {s for row in rows for s in row}, 79)
    at = np.minimum(starts, view.committed)
    covered = figures(view)
    # Each plan passes a token at least in one row, or the pages have run out.
    for _ in range(3 * WIDTH):
        plan = plan_tenure(view, at, free, page=PAGE, max_groups=groups)
        if plan is None:
            break
        is_free = torch.zeros(80, dtype=torch.bool)
        is_free[free.slots()] = True
        assert not bool(violation(plan.moves, is_free, 79))
        reached = plan.reached.numpy()[: plan.of.shape[0]]
        assert (reached >= at[plan.of]).all()
        assert (reached <= view.committed[plan.of]).all()
        if (reached == at[plan.of]).all():
            break
        carry_out(view, plan, free)
        at[plan.of] = reached
        now = figures(view)
        assert all(a >= b for a, b in zip(now, covered, strict=True))
        covered = now
        named = [
            s for r, n in zip(view.rows, view.committed, strict=True) for s in view.table[r, :n]
        ]
        assert sorted([*map(int, named), *free.slots().tolist()]) == list(range(1, 80))


def figures(view: EngineView) -> list[int]:
    rows, lengths = torch.from_numpy(view.rows), torch.from_numpy(view.committed)
    return layout_stats(view.table, rows, lengths, page_sizes=(PAGE,)).covered[PAGE].tolist()
