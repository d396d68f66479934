"""A plan is carried out for everybody who names a slot, or for nobody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kvdefrag.core.allocator import TwoEnded
from kvdefrag.core.commit import commit_groups, commit_slots
from kvdefrag.core.holders import (
    Holder,
    TableRows,
    ValueTensors,
    live_rows,
    range_index,
    remap_all,
)
from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.core.mover import CountingMover, TorchMover
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.plan_tenure import TenurePlan, plan_tenure
from kvdefrag.core.readback import Readback
from kvdefrag.core.two_ended import TwoEndedFreeList
from kvdefrag.core.view import EngineView

SIZE, PAGE = 31, 4


class Fault(Exception):
    pass


class Breaks:
    """A holder that fails on its n-th rewriting."""

    def __init__(self, inner: Holder, *, on: int = 1, before: bool = True) -> None:
        self._inner, self._on, self._before, self.calls = inner, on, before, 0

    def remap(self, lut: Tensor) -> None:
        self.calls += 1
        if self._before and self.calls == self._on:
            raise Fault
        self._inner.remap(lut)
        if self.calls == self._on:
            raise Fault


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture(params=["host", "device"])
def free_list(request: pytest.FixtureRequest) -> TwoEnded:
    """All of 1..31 but 1, 2, 3, 9 and 10 free."""
    free: TwoEnded = HostTwoEndedFreeList(SIZE, page=PAGE)
    if request.param == "device":
        device = torch.device("cpu")
        free = TwoEndedFreeList(SIZE, page=PAGE, device=device, readback=Readback(0))
    free.take_front(SIZE)
    free.put(torch.cat([torch.arange(4, 9), torch.arange(11, SIZE + 1)]))
    free.reorder()
    return free


@pytest.fixture
def table() -> Tensor:
    """Row 1 holds 9, 10, 1 and row 2 holds 9, 10, 2, 3; the rest is stale."""
    table = torch.full((3, 6), 28, dtype=torch.int32)
    table[1, :3] = torch.tensor([9, 10, 1])
    table[2, :4] = torch.tensor([9, 10, 2, 3])
    return table


@pytest.fixture
def rows(table: Tensor) -> TableRows:
    return TableRows(table, array(1, 2), array(3, 4))


PLAN = MovePlan(src=numbers(9, 0, 3, 10), dst=numbers(4, 0, 20, 6))


def listed(free_list: TwoEnded) -> list[int]:
    return sorted(free_list.slots().tolist())


def commit(plan: MovePlan, holders: Sequence[Holder], free_list: TwoEnded) -> Tensor:
    pool = torch.arange(SIZE + 1) * 10
    commit_slots(plan, TorchMover([pool]), holders, free_list, SIZE)
    return pool


def test_every_holder_follows_and_the_free_list_keeps_its_length(
    free_list: TwoEnded, table: Tensor, rows: TableRows
) -> None:
    node = numbers(9, 10)
    available = free_list.available()
    pool = commit(PLAN, [rows, ValueTensors([node])], free_list)
    assert table[1].tolist() == [4, 6, 1, 28, 28, 28]
    assert table[2].tolist() == [4, 6, 2, 20, 28, 28]
    assert node.tolist() == [4, 6]
    assert pool[[4, 6, 20]].tolist() == [90, 100, 30]
    assert free_list.available() == available
    assert listed(free_list) == sorted([3, 5, 7, 8, 9, 10, *range(11, 20), *range(21, 32)])


def test_a_plan_that_moves_nothing_changes_nothing(
    free_list: TwoEnded, table: Tensor, rows: TableRows
) -> None:
    before, free = table.clone(), listed(free_list)
    commit(MovePlan(src=numbers(0, 0), dst=numbers(0, 0)), [rows], free_list)
    assert torch.equal(table, before)
    assert listed(free_list) == free


def test_a_plan_without_pairs_changes_nothing(free_list: TwoEnded, rows: TableRows) -> None:
    free = listed(free_list)
    commit(MovePlan(src=numbers(), dst=numbers()), [rows], free_list)
    assert listed(free_list) == free


def test_int32_values_stay_int32(free_list: TwoEnded) -> None:
    node = numbers(9, 10).int()
    commit(PLAN, [ValueTensors([node])], free_list)
    assert node.dtype == torch.int32
    assert node.tolist() == [4, 6]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_holder_that_fails_takes_the_others_back(
    free_list: TwoEnded, table: Tensor, rows: TableRows, which: int, before: bool
) -> None:
    nodes = [numbers(9), numbers(10)]
    holders: list[Holder] = [rows, ValueTensors(nodes[:1]), ValueTensors(nodes[1:])]
    holders[which] = Breaks(holders[which], before=before)
    was, free = table.clone(), listed(free_list)
    with pytest.raises(Fault):
        commit(PLAN, holders, free_list)
    assert torch.equal(table, was)
    assert [n.tolist() for n in nodes] == [[9], [10]]
    assert listed(free_list) == free


def test_a_holder_behind_the_one_that_fails_is_never_asked(rows: TableRows) -> None:
    first, second, third = Breaks(rows, on=9), Breaks(rows), Breaks(rows, on=9)
    lut = torch.arange(SIZE + 1)
    with pytest.raises(Fault):
        remap_all([first, second, third], lut, lut)
    assert (first.calls, second.calls, third.calls) == (2, 2, 0)


def test_a_free_list_that_fails_takes_every_holder_back(
    free_list: TwoEnded, table: Tensor, rows: TableRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Fault

    node, was, free = numbers(9, 10), table.clone(), listed(free_list)
    monkeypatch.setattr(free_list, "substitute", fail)
    with pytest.raises(Fault):
        commit(PLAN, [rows, ValueTensors([node])], free_list)
    assert torch.equal(table, was)
    assert node.tolist() == [9, 10]
    assert listed(free_list) == free


def test_a_mover_that_fails_changes_nobody(
    free_list: TwoEnded, table: Tensor, rows: TableRows
) -> None:
    class Broken(CountingMover):
        def copy(self, plan: MovePlan) -> None:
            raise Fault

    was, free = table.clone(), listed(free_list)
    with pytest.raises(Fault):
        commit_slots(PLAN, Broken(8), [rows], free_list, SIZE)
    assert torch.equal(table, was)
    assert listed(free_list) == free


# --- groups, named by a table row alone ----------------------------------------------------------


@pytest.fixture
def scattered() -> Tensor:
    """Row 2 holds 9, 10, 1, 2, 3 and then stale numbers."""
    table = torch.full((3, 8), 28, dtype=torch.int32)
    table[2, :5] = torch.tensor([9, 10, 1, 2, 3])
    return table


def groups(table: Tensor, free_list: TwoEnded) -> tuple[EngineView, TenurePlan]:
    view = EngineView(1, table, array(2), array(1), array(0), array(5), array(5))
    plan = plan_tenure(view, array(0), free_list, page=PAGE, max_groups=4)
    assert plan is not None
    return view, plan


def test_a_group_moves_with_its_row_and_nothing_behind_it(
    free_list: TwoEnded, scattered: Tensor
) -> None:
    view, plan = groups(scattered, free_list)
    pool, available = torch.arange(SIZE + 1) * 10, free_list.available()
    commit_groups(view, plan, TorchMover([pool]), free_list)
    assert scattered[2].tolist() == [4, 5, 6, 7, 3, 28, 28, 28]
    assert (scattered[:2] == 28).all()
    assert pool[4:8].tolist() == [90, 100, 10, 20]
    assert free_list.available() == available
    assert listed(free_list) == sorted([1, 2, 8, 9, 10, *range(11, 32)])


def test_a_group_stays_if_the_free_list_fails(
    free_list: TwoEnded, scattered: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Fault

    view, plan = groups(scattered, free_list)
    was, free = scattered.clone(), listed(free_list)
    monkeypatch.setattr(free_list, "substitute_front", fail)
    with pytest.raises(Fault):
        commit_groups(view, plan, CountingMover(8), free_list)
    assert torch.equal(scattered, was)
    assert listed(free_list) == free


@pytest.mark.parametrize("tail", [2, 3, 4])
def test_a_group_behind_a_begun_page_moves_only_once_it_is_whole(
    free_list: TwoEnded, tail: int
) -> None:
    # The tree owns the first two tokens of the page that the row has gone on to fill.
    row = [12, 13, 14, 15, 9, 1, 10, 2][: 4 + tail]
    table = torch.full((2, 12), 28, dtype=torch.int32)
    table[1, : len(row)] = torch.tensor(row)
    view = EngineView(1, table, array(1), array(1), array(2), array(len(row)), array(len(row)))
    plan = plan_tenure(view, array(2), free_list, page=PAGE, max_groups=4)
    assert plan is not None
    assert int(plan.moves.moved_rows()) == (4 if tail == 4 else 0)
    commit_groups(view, plan, CountingMover(8), free_list)
    assert table[1, :4].tolist() == row[:4]
    assert table[1, 4 : 4 + tail].tolist() == ([4, 5, 6, 7] if tail == 4 else row[4:])
    assert (table[1, 4 + tail :] == 28).all()


def test_a_voided_group_changes_nothing(free_list: TwoEnded, scattered: Tensor) -> None:
    view, plan = groups(scattered, free_list)
    pool, was, free = torch.arange(SIZE + 1), scattered.clone(), listed(free_list)
    commit_groups(view, plan.voided_if(torch.tensor(True)), TorchMover([pool]), free_list)
    assert torch.equal(scattered, was)
    assert listed(free_list) == free
    assert torch.equal(pool, torch.arange(SIZE + 1))
    assert (plan.voided_if(torch.tensor(True)).reached == 0).all()


def test_a_sound_group_is_not_voided(free_list: TwoEnded, scattered: Tensor) -> None:
    view, plan = groups(scattered, free_list)
    commit_groups(view, plan.voided_if(torch.tensor(False)), CountingMover(8), free_list)
    assert scattered[2, :5].tolist() == [4, 5, 6, 7, 3]


# --- who holds what ------------------------------------------------------------------------------


def test_a_row_is_rewritten_as_far_as_it_holds_slots() -> None:
    table = torch.tensor([[0, 0, 0, 0], [5, 6, 7, 7]], dtype=torch.int32)
    view = EngineView(1, table, array(1), array(1), array(0), array(1), array(2))
    lut = torch.arange(10)
    lut[7] = 9
    live_rows(view).remap(lut)
    assert table[1].tolist() == [5, 6, 7, 7]
    live_rows(view, held=array(0, 3)).remap(lut)
    assert table[1].tolist() == [5, 6, 9, 7]


def test_a_row_that_holds_less_than_it_has_allocated_is_rewritten_all_the_same() -> None:
    table = torch.tensor([[0, 0], [5, 7]], dtype=torch.int32)
    view = EngineView(1, table, array(1), array(1), array(0), array(1), array(2))
    lut = torch.arange(10)
    lut[7] = 9
    live_rows(view, held=array(0, 0)).remap(lut)
    assert table[1].tolist() == [5, 9]


def test_ranges_are_laid_out_one_after_the_other() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    found = range_index(table, array(3, 1, 2), array(2, 5, 0), array(4, 5, 3))
    assert found.tolist() == [32, 33, 20, 21, 22]


def test_ranges_that_end_before_they_start_are_empty() -> None:
    table = torch.zeros(2, 10, dtype=torch.int32)
    assert range_index(table, array(0, 1), array(5, 3), array(2, 4)).tolist() == [13]
    assert range_index(table, array(), array(), array()).tolist() == []
