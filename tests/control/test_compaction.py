"""A compaction that was asked for: it ends, loses no row, and is what was predicted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvdefrag.control.compaction import Compaction, Parts
from kvdefrag.control.preview import Snapshot, effect_of, preview
from kvdefrag.core.programs import TorchPrograms
from tests.machine.engine import Engine, Shape, settings_for

HOWS = pytest.mark.parametrize("how", ["tenure", "evacuate", "lower", "gather"])


def engine_of(**shape: Any) -> Engine:
    """An engine whose requests lie scattered, some of them alone in their page."""
    defaults: dict[str, Any] = {"size": 250, "page": 4, "rows": 7, "width": 64}
    engine = Engine(Shape(**(defaults | shape)))
    engine.admit([engine.fresh_tokens(1) for _ in range(3)])
    for _ in range(21):
        engine.decode([1, 2, 3])
    engine.admit([engine.fresh_tokens(n) for n in (1, 2, 1)])
    return engine


def config_of(engine: Engine, rows: int) -> Any:
    made = settings_for(
        "tenure", bytes_per_step=rows * engine.mover.row_bytes, dry_run=False, max_live=3
    )
    return engine.paged(made)


def job_of(engine: Engine, how: Any, *, slice_rows: int = 8, rows: int | None = None) -> Compaction:
    parts = Parts(
        config_of(engine, slice_rows),
        engine.allocator,
        engine.mover,
        engine.readback,
        engine.defragmenter.tracker,
        TorchPrograms(engine.mover, page=engine.shape.page),
    )
    return Compaction(parts, how, rows=rows, target=(1, int(engine.generation[1])))


def run(engine: Engine, job: Compaction) -> None:
    for _ in range(300):
        engine.readback.advance()
        job.advance(engine.view())
        if job.done:
            return
    raise AssertionError("it does not end")


def snapshot(engine: Engine) -> Snapshot:
    view = engine.view()
    engine.defragmenter.tracker.observe(view)
    return Snapshot(
        size=engine.shape.size,
        page=engine.shape.page,
        row_bytes=engine.mover.row_bytes,
        table=engine.table[torch.from_numpy(view.rows)].clone(),
        generations=view.generations,
        protected=view.protected,
        committed=view.committed,
        allocated=view.allocated,
        tenured=engine.defragmenter.tracker.tenured(view),
        shared=torch.cat([torch.zeros(0, dtype=torch.int64), *view.shared_values()]).clone(),
        free=engine.allocator.free_slots(),
    )


@HOWS
@pytest.mark.parametrize("delay", [0, 2])
def test_it_ends_and_loses_no_row(how: str, delay: int) -> None:
    engine = engine_of(device_form=delay > 0, delay=delay)
    job = job_of(engine, how)
    run(engine, job)

    assert job.moved == sum(int(plan.moved_rows()) for plan in engine.mover.plans) > 0
    engine.check()


@HOWS
def test_a_preview_is_what_happens_then_and_changes_nothing(how: str) -> None:
    engine = engine_of()
    before = snapshot(engine)
    kept = copy.deepcopy(before)

    rows, effect = preview(before, config_of(engine, 8), how, rows=None, at=0)  # type: ignore[arg-type]
    assert engine.mover.plans == []
    for name, value in vars(kept).items():
        same = getattr(before, name)
        assert bool((same == value).all()) if hasattr(value, "shape") else same == value

    job = job_of(engine, how)
    run(engine, job)
    assert (job.moved, effect_of(snapshot(engine))) == (rows, effect)
    assert effect != effect_of(before)


@HOWS
def test_no_more_rows_move_than_were_asked_for(how: str) -> None:
    engine = engine_of()
    job = job_of(engine, how, rows=4)
    run(engine, job)

    assert 0 < job.moved <= 4


def test_tenure_brings_the_coverage_up() -> None:
    engine = engine_of()
    before = effect_of(snapshot(engine))
    run(engine, job_of(engine, "tenure"))
    after = effect_of(snapshot(engine))

    assert before.tokens == after.tokens
    assert (before.coverage or 0) < 0.5 < (after.coverage or 0)
    assert after.runs < before.runs


def test_a_gathering_of_a_request_that_has_left_ends_at_once() -> None:
    engine = engine_of()
    job = job_of(engine, "gather")
    job._target = (1, 99)
    run(engine, job)

    assert job.moved == 0


def test_a_pool_that_is_cleared_meanwhile_does_not_keep_it_waiting() -> None:
    engine = engine_of(device_form=True, delay=2)
    job = job_of(engine, "lower", rows=4)
    engine.readback.advance()
    job.advance(engine.view())
    engine.readback.clear()
    run(engine, job)

    assert job.done


def test_an_engine_without_requests_has_an_effect_too() -> None:
    engine = Engine(Shape(size=63))
    found = effect_of(snapshot(engine))

    assert (found.tokens, found.runs, found.coverage) == (0, 0, None)
    assert preview(snapshot(engine), config_of(engine, 8), "tenure", rows=None)[0] == 0
