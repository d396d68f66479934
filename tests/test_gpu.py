"""`kvdefrag.gpu` chooses kernels on a GPU and their references elsewhere; the results agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdefrag.core.holders import Holder
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.mover import Mover
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.programs import Programs
from kvdefrag.core.readback import Readback
from kvdefrag.core.two_ended import TwoEndedFreeList
from kvdefrag.core.view import EngineView
from kvdefrag.errors import PlanError
from kvdefrag.gpu import (
    DeviceMover,
    DevicePageView,
    DevicePrograms,
    DeviceStats,
    DeviceTableRows,
    DeviceValues,
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def test_the_mover_moves_every_buffer_and_counts_its_row_bytes(device: torch.device) -> None:
    buffers = [torch.arange(60, device=device).view(10, 6).half(), torch.rand(10, device=device)]
    old = [b.clone() for b in buffers]
    mover: Mover = DeviceMover(buffers)
    assert mover.row_bytes == 16
    src, dst = torch.tensor([7, 0, 8], device=device), torch.tensor([3, 0, 2], device=device)
    mover.copy(MovePlan(src, dst))
    for buffer, before in zip(buffers, old, strict=True):
        assert torch.equal(buffer[[3, 2]], before[[7, 8]])
    swap = torch.tensor([3, 2], device=device)
    mover.copy(MovePlan(swap, swap.flip(0), disjoint=False))
    assert torch.equal(buffers[0][[2, 3]], old[0][[7, 8]])


def test_a_broken_plan_moves_nothing(device: torch.device) -> None:
    buffer = torch.rand(10, 4, device=device)
    old = buffer.clone()
    mover = DeviceMover([buffer])
    plan = MovePlan(torch.tensor([1, 2], device=device), torch.tensor([5, 5], device=device))
    if device.type == "cpu":
        with pytest.raises(PlanError, match="duplicate destinations"):
            mover.copy(plan)
    else:
        mover.copy(plan)
        flag = mover.flag()
        assert flag is not None
        assert int(flag) == 4
    assert torch.equal(buffer, old)


def test_statistics_agree_with_the_core(device: torch.device) -> None:
    random = torch.Generator().manual_seed(1)
    table = torch.randint(1, 500, (4, 300), generator=random, dtype=torch.int32)
    table[1, 10:200] = torch.arange(120, 310)
    table = table.to(device)
    rows = torch.tensor([1, 3], device=device)
    lengths = torch.tensor([290, 33], device=device)
    stats = DeviceStats(4, 300, page=64, device=device).measure(table, rows, lengths)
    if device.type == "cuda":
        torch.cuda.synchronize()
    expected = layout_stats(table, rows, lengths, page_sizes=[64])
    assert stats.runs.tolist() == expected.runs.tolist()
    assert stats.longest_run.tolist() == expected.longest_run.tolist()
    assert stats.covered.tolist() == expected.covered[64].tolist()
    assert stats.left_over.tolist() == expected.left_over(64).tolist()


def test_the_view_splits_pages_and_left_overs(device: torch.device) -> None:
    table = torch.arange(60, 200, dtype=torch.int32, device=device).view(1, -1)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    view = DevicePageView(1, 140, most_left=50, page=64, device=device)
    facts = view.fill(table, row, row + 140).facts
    assert facts.tolist() == [[2, 12, 0, 140]]


def test_holders_follow_a_move(device: torch.device) -> None:
    lut = torch.tensor([0, 4, 2, 3, 1], device=device)
    table = torch.tensor([[1, 2, 1, 1]], dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    values = [torch.tensor([4, 3], device=device), torch.tensor([1], device=device)]
    holders: list[Holder] = [
        DeviceTableRows(table, one - 1, one, one + 2, longest=2),
        DeviceValues(values),
    ]
    for holder in holders:
        holder.remap(lut)
    assert table.tolist() == [[1, 2, 4, 1]]
    assert [v.tolist() for v in values] == [[1, 3], [4]]


def test_a_tenure_step_moves_rows_names_and_list_together(device: torch.device) -> None:
    pool = torch.rand(41, 5, device=device)
    slots = [3, 30, 5, 7, 9, 2, 1, 38]
    table = torch.zeros(2, 12, dtype=torch.int32, device=device)
    table[1, :8] = torch.tensor(slots)
    free = TwoEndedFreeList(40, page=8, device=device, readback=Readback(1))
    free.take_front(40)
    free.put(torch.tensor([s for s in range(40, 0, -1) if s not in slots], device=device))
    content = pool[slots].clone()
    zero, eight = np.zeros(1, dtype=np.int64), np.full(1, 8, dtype=np.int64)
    view = EngineView(1, table, zero + 1, zero, zero, eight, eight)
    programs: Programs = DevicePrograms(DeviceMover([pool]), page=8)
    tenured = programs.tenure(
        view, zero, free, max_groups=2, dry_run=False, refused=lambda plan: None
    )
    assert tenured is not None
    assert tenured.reached.tolist() == [8]
    assert int(tenured.moves.moved_rows()) == 8
    assert table[1, :8].tolist() == [*range(16, 24)]
    assert torch.equal(pool[16:24], content)
    free.reorder()
    assert sorted(free.slots().tolist()) == [s for s in range(1, 41) if not 16 <= s < 24]
