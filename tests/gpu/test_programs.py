"""The programs of a GPU decide as the reference does: by kernels, and by their references."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvdefrag.core.commit import commit_slots
from kvdefrag.core.holders import Holder
from kvdefrag.core.mover import TorchMover
from kvdefrag.core.plan import MovePlan, violation
from kvdefrag.core.policy import Lower
from kvdefrag.core.programs import Programs, Tenured, TorchPrograms
from kvdefrag.core.readback import Readback
from kvdefrag.core.two_ended import TwoEndedFreeList
from kvdefrag.core.view import EngineView
from kvdefrag.errors import PlanError
from kvdefrag.gpu import DeviceMover, DevicePrograms, holders, mover, programs
from tests.machine.engine import Engine, Shape, settings_for

PAGE, WIDTH, ROWS = 4, 26, 5
FORMS = ["references", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
MANY = settings(
    deadline=None,
    max_examples=60 if torch.cuda.is_available() else 20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=FORMS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels run, as far as `kvdefrag.gpu` knows."""
    if request.param == "interpreter":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("kernels take CPU tensors in the interpreter only (TRITON_INTERPRET=1)")
        for module in (holders, mover, programs):
            monkeypatch.setattr(module, "launches", lambda device: True)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@dataclass
class Side:
    """One of two pools that must stay alike."""

    table: Tensor
    pool: Tensor
    free: TwoEndedFreeList
    programs: Programs

    def view(self, committed: list[int]) -> EngineView:
        lengths = np.array(committed, dtype=np.int64)
        zeros = np.zeros(len(committed), dtype=np.int64)
        rows = np.arange(1, len(committed) + 1)
        return EngineView(0, self.table, rows, zeros, zeros, lengths, lengths)


def sides(rows: list[list[int]], taken: set[int], size: int, device: torch.device) -> list[Side]:
    """The reference and the device's programs over equal pools."""
    made = []
    for on_device in (False, True):
        table = torch.full((len(rows) + 1, WIDTH), 6, dtype=torch.int32)
        for i, slots in enumerate(rows, start=1):
            table[i, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        table = table.to(device)
        pool = torch.arange(3 * size + 3, device=device).view(size + 1, 3)
        free = TwoEndedFreeList(size, page=PAGE, device=device, readback=Readback(1))
        free.take_front(size)
        live = taken.union(*rows)
        slots = [s for s in range(size, 0, -1) if s not in live]
        # A part in order, a part taken from the front, and a part that has just come back.
        free.put(torch.tensor(slots[: len(slots) // 2], dtype=torch.int64, device=device))
        free.reorder()
        free.put(torch.tensor(slots[len(slots) // 2 :], dtype=torch.int64, device=device))
        chosen: Programs = TorchPrograms(TorchMover([pool]), page=PAGE)
        if on_device:
            chosen = DevicePrograms(DeviceMover([pool]), page=PAGE)
        made.append(Side(table, pool, free, chosen))
    return made


def sound(side: Side, size: int):
    """Ask for a plan's soundness, as the relocator does, and expect it."""

    def refused(plan: MovePlan) -> None:
        is_free = torch.zeros(size + 1, dtype=torch.bool, device=side.pool.device)
        is_free[side.free.slots()] = True
        assert not bool(violation(plan, is_free, size))

    return refused


def alike(results: list[Tenured | None]) -> None:
    one, two = results
    if one is None or two is None:
        assert one is two
        return
    assert one.of.tolist() == two.of.tolist()
    assert one.reached.tolist() == two.reached.tolist()
    assert one.moves.src.tolist() == two.moves.src.tolist()
    assert one.moves.dst.tolist() == two.moves.dst.tolist()
    assert int(one.moves.moved_rows()) == int(two.moves.moved_rows())


def same_state(one: Side, two: Side) -> None:
    assert one.table.tolist() == two.table.tolist()
    live = one.table[1:].flatten().long()
    assert one.pool[live].tolist() == two.pool[live].tolist()
    assert one.free.slots().sort().values.tolist() == two.free.slots().sort().values.tolist()
    assert one.free.available() == two.free.available()


@MANY
@given(
    seed=st.integers(0, 1 << 30),
    starts=st.lists(st.integers(0, 7), min_size=ROWS, max_size=ROWS),
    short=st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS),
    spare=st.integers(0, 19),
    groups=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    size=st.integers(60, 80),
)
def test_tenure_decides_as_the_reference(seed, starts, short, spare, groups, size, device):
    # Rows are made of stretches of slots, some of them aligned pages; pages from `spare` on have a
    # slot that somebody else holds.
    unused = set(range(1, size + 1))
    rows: list[list[int]] = [[] for _ in range(ROWS)]
    random = np.random.default_rng(seed)
    for _ in range(random.integers(40)):
        row, first = random.integers(ROWS), random.integers(20) * PAGE
        # Half of the stretches begin with a page.
        first += max(0, random.integers(-4, PAGE))
        stretch = [s for s in range(first, first + random.integers(1, 8)) if s in unused]
        rows[row] += stretch[: WIDTH - len(rows[row])]
        unused -= set(rows[row])
    taken = {s for s in range(spare * PAGE + 1, size + 1, PAGE) if s in unused}
    one, two = sides(rows, taken, size, device)
    # The last tokens of a row are not committed: they neither move nor count.
    committed = [max(0, len(r) - s) for r, s in zip(rows, short, strict=True)]
    at = np.minimum(starts, committed)
    for max_groups in groups:
        results = [
            side.programs.tenure(side.view(committed), at, side.free, max_groups=max_groups,
                                 dry_run=False, refused=sound(side, size))
            for side in (one, two)
        ]  # fmt: skip
        alike(results)
        same_state(one, two)
        if results[0] is not None:
            at[results[0].of] = results[0].reached.tolist()[: results[0].of.shape[0]]
    assert one.free.whole_pages() == two.free.whole_pages()
    for side in (one, two):
        side.free.reorder()
    assert one.free.slots().tolist() == two.free.slots().tolist()
    assert one.free.whole_pages() == two.free.whole_pages()


def test_the_rows_and_the_free_pages_of_the_reference_are_moved(device):
    one, two = sides([[1, 3, 5, 2, 17], [20, 21, 22, 23, 9, 7]], {30}, 39, device)
    results = [
        side.programs.tenure(side.view([5, 6]), np.zeros(2, dtype=np.int64), side.free,
                             max_groups=9, dry_run=False, refused=sound(side, 39))
        for side in (one, two)
    ]  # fmt: skip
    alike(results)
    same_state(one, two)
    assert two.table[1, :5].tolist() == [12, 13, 14, 15, 17]
    assert results[1].reached.tolist() == [4, 4]


@pytest.mark.parametrize("why", ["dry run", "refused", "not refused"])
def test_what_may_not_move_stays(why, device):
    one, two = sides([[1, 3, 5, 2, 17], [9, 7, 13, 11]], set(), 39, device)
    before = two.table.tolist(), two.pool.tolist(), sorted(two.free.slots().tolist())
    refusal = None if why == "dry run" else torch.tensor(why == "refused", device=device)
    results = [
        side.programs.tenure(side.view([5, 4]), np.zeros(2, dtype=np.int64), side.free,
                             max_groups=9, dry_run=why == "dry run",
                             refused=lambda plan: refusal)
        for side in (one, two)
    ]  # fmt: skip
    alike(results)
    same_state(one, two)
    after = two.table.tolist(), two.pool.tolist(), sorted(two.free.slots().tolist())
    assert (after == before) == (why != "not refused")
    # What is handed out next is the same, too.
    assert one.free.take_back(3).tolist() == two.free.take_back(3).tolist()
    assert one.free.take_front(5).tolist() == two.free.take_front(5).tolist()


def test_a_plan_that_the_mover_refuses_changes_nothing(device):
    # The second row names the sink.
    _, two = sides([[1, 3, 5, 2], [0, 7, 13, 11]], set(), 39, device)
    before = two.table.tolist(), two.pool.tolist(), sorted(two.free.slots().tolist())
    zeros = np.zeros(2, dtype=np.int64)

    def run() -> Tenured | None:
        return two.programs.tenure(
            two.view([4, 4]), zeros, two.free, max_groups=9, dry_run=False, refused=lambda _: None
        )

    if device.type == "cuda":
        result = run()
        assert result is not None
        assert not result.reached.any()
        assert int(result.moves.moved_rows()) == 0
        assert not (result.moves.src != result.moves.dst).any()
    else:
        with pytest.raises(PlanError, match="sink"):
            run()
    after = two.table.tolist(), two.pool.tolist(), sorted(two.free.slots().tolist())
    assert after == before


def test_a_pool_that_has_grown_is_planned_for(device):
    _, two = sides([[1, 3, 5, 2]], set(), 7, device)
    tenure = two.programs.tenure
    zeros = np.zeros(1, dtype=np.int64)
    arguments = {"max_groups": 1, "dry_run": False, "refused": lambda _: None}
    first = tenure(two.view([4]), zeros, two.free, **arguments)
    assert first.reached.tolist() == [0]
    grown = DevicePrograms(DeviceMover([torch.zeros(40, 2, device=device)]), page=PAGE)
    for size in (7, 3, 39):
        free = TwoEndedFreeList(size, page=PAGE, device=device, readback=Readback(1))
        free.take_front(min(size, 6))
        free.reorder()
        result = grown.tenure(two.view([4]), zeros, free, **arguments)
        assert result.reached.tolist() == [4 if size == 39 else 0]


def test_holders_follow_as_those_of_the_reference(device):
    one, two = sides([[1, 3, 5, 2, 17], [20, 21, 22]], set(), 39, device)
    values = [torch.tensor([17, 20], device=device), torch.tensor([22], dtype=torch.int32,
                                                                  device=device)]  # fmt: skip
    plan = MovePlan(
        torch.tensor([3, 17, 22, 0], device=device), torch.tensor([30, 31, 8, 0], device=device)
    )
    kept = []
    for side in (one, two):
        own = [v.clone() for v in values]
        held = np.array([0, 7, 3], dtype=np.int64)
        rows = side.programs.rows(side.view([5, 3]), held)
        parts: list[Holder] = [rows, side.programs.values(own), side.programs.values([])]
        commit_slots(plan, TorchMover([side.pool]), parts, side.free, 39)
        kept.append([v.tolist() for v in own])
    same_state(one, two)
    assert kept[0] == kept[1] == [[31, 20], [8]]
    assert two.table[1, :5].tolist() == [1, 30, 5, 2, 31]
    nobody = EngineView(0, two.table, *(np.zeros(0, dtype=np.int64) for _ in range(5)))
    before = two.table.tolist()
    two.programs.rows(nobody, None).remap(torch.arange(40, device=device) * 0)
    assert two.table.tolist() == before


def test_building_ahead_changes_nothing(device):
    _, two = sides([[1, 3, 5, 2, 17]], set(), 39, device)
    before = two.table.tolist()
    two.programs.prewarm(two.table, 39)
    assert two.table.tolist() == before


# --- in the pipeline -----------------------------------------------------------------------------


def engines(**shape: object) -> list[Engine]:
    defaults = {"size": 190, "page": PAGE, "rows": 6, "width": 64, "device_form": True}
    made = [Engine(Shape(**(defaults | shape))) for _ in range(2)]
    device_mover = DeviceMover(made[1].mover.buffers)
    made[1].defragmenter._relocator._programs = DevicePrograms(device_mover, page=PAGE)
    return made


@pytest.mark.parametrize("reservation", [False, True])
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("mode", ["tenure", "evacuation", "lower"])
def test_a_server_under_either_gives_the_same_reports(mode, delay, reservation, device):
    if device.type == "cuda":
        pytest.skip("the engine model lives on the CPU")
    random = np.random.default_rng(5)
    pair = engines(delay=delay, reservation=reservation)
    config = settings_for(mode, bytes_per_step=24 * 96, dry_run=False, max_live=8)
    for engine in pair:
        engine.defragmenter.configure(engine.paged(config))
    moved = 0
    for turn in range(16):
        lengths = random.integers(1, 12, size=2).tolist()
        chosen = random.random(6) < 0.7
        leaves = int(random.integers(0, 6))
        for engine in pair:
            if len(engine.free_rows()) >= 2:
                engine.admit([engine.fresh_tokens(n) for n in lengths])
            engine.decode([r for r in list(engine.requests) if chosen[r - 1]])
            rows = list(engine.requests)
            if turn % 4 == 3 and rows:
                engine.finish(rows[leaves % len(rows)], keep=turn % 8 == 3)
            if mode == "lower":
                engine.defragmenter.request(Lower(20))
        reports = [engine.compact() for engine in pair]
        assert reports[0] == reports[1]
        assert torch.equal(pair[0].table, pair[1].table)
        for engine in pair:
            engine.check()
        moved += reports[0].planned_rows
    # With reservation and news at once tenure may find that nothing is left to do.
    assert moved or (mode, delay, reservation) == ("tenure", 0, True)


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_nothing() -> None:
    device = torch.device("cuda")
    one, two = sides([[1, 3, 5, 2, 17], [20, 21, 22, 23, 9, 7]], {30}, 39, device)
    zeros = np.zeros(2, dtype=np.int64)
    lut = torch.arange(40, device=device)
    for forbidden in (contextlib.nullcontext, no_sync):
        with forbidden():
            for side in (one, two):
                view = side.view([5, 6])
                result = side.programs.tenure(
                    view, zeros, side.free, max_groups=9, dry_run=False, refused=lambda _: None
                )
                readback = Readback(2)
                readback.submit_tensor(result.reached, lambda _: None)
                readback.submit(result.moves.moved_rows(), lambda _: None)
                side.programs.rows(view, None).remap(lut)
                side.free.reorder()
    same_state(one, two)
