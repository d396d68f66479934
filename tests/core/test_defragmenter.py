"""The pipeline: what a step does, what it leaves alone, and what it tells."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvdefrag.config import Config
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.policy import Gather, Lower
from kvdefrag.core.relocator import _flagged
from kvdefrag.errors import ConfigError, IntegrityError, PlanError
from tests.machine.engine import Engine, Fault, Shape, settings_for

FORMS = pytest.mark.parametrize("device_form", [False, True])
MODES = pytest.mark.parametrize("mode", ["tenure", "evacuation", "gather", "lower"])


def engine_of(**shape: object) -> Engine:
    """An engine whose three requests lie scattered, some of them alone in their page."""
    defaults: dict[str, object] = {"size": 250, "page": 4, "rows": 7, "width": 64}
    engine = Engine(Shape(**(defaults | shape)))
    engine.admit([engine.fresh_tokens(1) for _ in range(3)])
    for _ in range(20):
        engine.decode([1, 2, 3])
    engine.admit([engine.fresh_tokens(n) for n in (1, 2, 1)])
    return engine


def use(engine: Engine, mode: str, *, rows: int = 64, dry_run: bool = False, **rules: object):
    config = settings_for(
        mode, bytes_per_step=rows * engine.mover.row_bytes, dry_run=dry_run, max_live=32
    )
    relocation = config.relocation.model_copy(update=rules)
    engine.defragmenter.configure(
        engine.paged(config.model_copy(update={"relocation": relocation}))
    )
    if mode == "gather":
        engine.defragmenter.request(Gather(1, int(engine.generation[1])))
    elif mode == "lower":
        engine.defragmenter.request(Lower(20))


def moved(engine: Engine) -> int:
    return sum(int(plan.moved_rows()) for plan in engine.mover.plans)


# --- what moves ----------------------------------------------------------------------------------


@FORMS
@MODES
def test_every_mechanism_moves_rows_and_loses_none(mode: str, device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    use(engine, mode)
    report = engine.compact()
    assert report.mechanism == mode
    assert report.moved_rows == moved(engine) > 0
    assert report.available == engine.allocator.available_size()
    engine.check()


@FORMS
def test_tenure_brings_all_but_the_last_tokens_into_pages(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    use(engine, "tenure")
    for _ in range(30):
        engine.compact()
    counts = engine.defragmenter.tracker.measure(engine.view())
    assert counts.covered[:3].tolist() == [20, 20, 20]
    engine.check()


@FORMS
def test_tenure_takes_no_more_pages_than_there_are(device_form: bool) -> None:
    # Five of the six whole pages are taken; three requests wait for the last one.
    engine = Engine(Shape(size=27, page=4, rows=5, width=30, device_form=device_form))
    engine.admit([engine.fresh_tokens(1) for _ in range(3)])
    for _ in range(3):
        engine.decode([3, 1, 2])
    pages = engine.allocator.two_ended
    pages.reorder()
    spare = int((pages.free_per_page() == 4).sum())
    use(engine, "tenure")
    report = engine.compact()
    assert report.moved_rows <= 4 * spare
    engine.check()


@FORMS
def test_reserved_slots_stay_where_they_are(device_form: bool) -> None:
    engine = engine_of(reservation=True, device_form=device_form)
    reserved = engine.allocator.reserved_size()
    assert reserved > 0
    held = engine.allocator.reservations.held
    tails = [engine.table[r, q.allocated : held[r]].tolist() for r, q in engine.requests.items()]
    for mode in ("evacuation", "lower", "gather", "tenure"):
        use(engine, mode)
        for _ in range(4):
            engine.compact()
    after = [engine.table[r, q.allocated : held[r]].tolist() for r, q in engine.requests.items()]
    assert after == tails
    assert engine.allocator.reserved_size() == reserved
    engine.check()


@FORMS
def test_slots_of_rejected_drafts_move_with_their_row(device_form: bool) -> None:
    engine = Engine(Shape(size=250, page=4, rows=7, width=64, device_form=device_form))
    engine.admit([engine.fresh_tokens(20)])
    engine.admit([engine.fresh_tokens(2), engine.fresh_tokens(3)])
    engine.speculate([2, 3], 20, [1, 0])
    engine.finish(1, keep=False)
    use(engine, "lower")
    engine.defragmenter.request(Lower(100))
    for _ in range(4):
        engine.compact()
    live = [engine.table[r, : q.allocated] for r, q in engine.requests.items()]
    assert torch.cat(live).sort().values.tolist() == list(range(1, 46))
    engine.check()


@FORMS
def test_a_full_page_is_never_evacuated_however_many_rows_may_move(device_form: bool) -> None:
    engine = Engine(Shape(size=250, page=4, rows=7, width=64, device_form=device_form))
    engine.admit([engine.fresh_tokens(16)])
    engine.admit([engine.fresh_tokens(1) for _ in range(4)])
    full = engine.table[1, :16].clone()
    use(engine, "evacuation", max_live_per_page=127)
    for _ in range(6):
        engine.compact()
    assert torch.equal(engine.table[1, :16], full)
    engine.check()


@FORMS
def test_with_a_list_of_one_end_nothing_moves(device_form: bool) -> None:
    for discipline in ("fifo", "sorted"):
        engine = engine_of(discipline=discipline, device_form=device_form)
        for mode in ("tenure", "evacuation", "gather", "lower"):
            use(engine, mode)
            report = engine.compact()
            assert report.moved_rows == 0
            assert report.whole_free_pages is None
        engine.check()


# --- what does not move --------------------------------------------------------------------------


@FORMS
@MODES
@pytest.mark.parametrize("why", ["gate", "kill switch", "off", "dry run"])
def test_a_step_that_may_not_move_changes_nothing(mode: str, why: str, device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    use(engine, mode, dry_run=why == "dry run")
    config = engine.defragmenter.config
    if why == "kill switch":
        engine.defragmenter.configure(config.model_copy(update={"kill_switch": True}))
    if why == "off":
        rules = config.relocation.model_copy(update={"mode": "off"})
        engine.defragmenter.configure(config.model_copy(update={"relocation": rules}))
    before, buffers = engine.snapshot(), [b.clone() for b in engine.mover.buffers]
    report = engine.compact(gates=("transfer", "group") if why == "gate" else ())
    assert not report.moves
    assert not engine.mover.plans
    after = engine.snapshot()
    assert torch.equal(after.table, before.table)
    assert after.free == before.free
    assert all(torch.equal(a, b) for a, b in zip(engine.mover.buffers, buffers, strict=True))
    if why == "gate":
        assert (report.reason, report.gates) == ("gate closed", ("transfer", "group"))
    if why == "dry run":
        assert report.dry_run
        assert report.planned_rows > 0
        assert report.mechanism == mode


@FORMS
@MODES
@pytest.mark.parametrize("fault", ["before", "midway"])
def test_after_a_mover_that_fails_nothing_has_moved_and_the_next_step_works(
    mode: str, fault: str, device_form: bool
) -> None:
    engine = engine_of(device_form=device_form)
    use(engine, mode)
    before = engine.snapshot()
    engine.mover.fault = fault
    with pytest.raises(Fault):
        engine.compact()
    after = engine.snapshot()
    assert torch.equal(after.table, before.table)
    assert after.free == before.free
    engine.check()
    engine.mover.fault = None
    use(engine, mode)
    assert engine.compact().moved_rows > 0
    engine.check()


@FORMS
@pytest.mark.parametrize("mode", ["tenure", "gather", "lower"])
def test_a_plan_onto_a_live_slot_is_refused_and_nothing_moves(mode: str, device_form: bool) -> None:
    engine = engine_of(device_form=device_form, checks="off")
    # A double free that nobody looked for: live slots are on offer.
    lowest = int(engine.table[1:4, :21].min())
    highest = int(engine.table[1:4, :21].max())
    page = torch.arange(8, 12)
    engine.allocator.free(torch.cat([page, torch.tensor([lowest, highest])]))
    before = engine.table.clone()
    use(engine, mode)
    with pytest.raises(PlanError):
        engine.compact()
    assert torch.equal(engine.table, before)
    assert not engine.mover.plans


# --- late news -----------------------------------------------------------------------------------


@FORMS
def test_moved_rows_are_unknown_until_they_are_read_back(device_form: bool) -> None:
    engine = engine_of(device_form=device_form, delay=2)
    use(engine, "tenure")
    report = engine.compact()
    assert report.moved_rows is None
    assert report.moves
    tenured = engine.defragmenter.tracker.tenured(engine.view())
    assert tenured.tolist() == [0] * 6
    engine.compact()
    engine.compact()
    assert engine.defragmenter.tracker.tenured(engine.view())[:3].tolist() == [4, 4, 4]


@FORMS
def test_a_row_that_changes_hands_before_the_news_starts_anew(device_form: bool) -> None:
    engine = engine_of(device_form=device_form, delay=2)
    use(engine, "tenure")
    engine.compact()
    engine.finish(1, keep=False)
    (row,) = engine.admit([engine.fresh_tokens(9)])
    assert row == 1
    for _ in range(3):
        engine.compact(gates=("closed",))
    engine.defragmenter.tracker.observe(engine.view())
    assert engine.defragmenter.tracker.tenured(engine.view())[0] == 0
    engine.check()


@FORMS
def test_a_row_seen_in_other_hands_before_the_news_is_not_confirmed(device_form: bool) -> None:
    engine = engine_of(device_form=device_form, delay=2)
    use(engine, "tenure")
    engine.compact()
    engine.finish(1, keep=False)
    engine.admit([engine.fresh_tokens(9)])
    use(engine, "evacuation", whole_free_low=0.0, whole_free_high=0.001)
    engine.compact()
    engine.compact()
    assert engine.defragmenter.tracker.tenured(engine.view())[0] == 0


@FORMS
def test_while_news_is_under_way_no_group_moves_twice(device_form: bool) -> None:
    engine = engine_of(device_form=device_form, delay=2)
    use(engine, "tenure", rows=4096)
    engine.compact()
    first = moved(engine)
    engine.compact()
    assert first == 12
    assert moved(engine) == first
    engine.check()


def test_news_of_before_a_clear_is_forgotten() -> None:
    engine = engine_of(device_form=True, delay=2)
    use(engine, "tenure")
    engine.compact()
    engine.flush()
    assert engine.readback.pending == 0
    engine.admit([engine.fresh_tokens(9)])
    for _ in range(4):
        engine.compact()
    engine.check()


def test_a_plan_that_the_device_refused_is_told_once_and_late() -> None:
    engine = engine_of(device_form=True, delay=2)
    use(engine, "tenure")
    engine.readback.submit(torch.tensor(True), _flagged)
    engine.compact(gates=("closed",))
    with pytest.raises(IntegrityError, match="plan"):
        engine.compact(gates=("closed",))
    engine.compact()
    engine.check()


# --- how much ------------------------------------------------------------------------------------


@FORMS
@MODES
@pytest.mark.parametrize("rows", [4, 8, 20])
def test_a_step_stays_within_its_bytes(mode: str, rows: int, device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    use(engine, mode, rows=rows)
    for _ in range(5):
        assert engine.compact().moved_rows <= rows
    engine.check()


def test_what_one_step_takes_beyond_the_average_is_paid_back() -> None:
    engine = engine_of()
    row = engine.mover.row_bytes
    use(engine, "tenure", rows=12, duty_bytes_per_step=row)
    rows = [engine.compact().moved_rows for _ in range(100)]
    assert max(rows) <= 12
    assert sum(rows) <= 100
    assert sum(1 for r in rows if r) > 2


def test_steps_that_gain_little_back_off_ever_longer() -> None:
    engine = engine_of()
    use(engine, "evacuation", min_gain_rows=1000, backoff_max_shift=3)
    acted = [engine.steps for _ in range(40) if engine.compact().mechanism == "evacuation"]
    gaps = [b - a for a, b in pairwise(acted)]
    assert gaps[:5] == [1, 2, 4, 8, 8]


# --- on demand -----------------------------------------------------------------------------------


@FORMS
def test_demands_are_served_in_order_and_over_steps(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    use(engine, "gather", rows=8)
    engine.defragmenter.request(Lower(16))
    assert engine.defragmenter.demands == 2
    mechanisms = []
    while engine.defragmenter.demands:
        mechanisms.append(engine.compact().mechanism)
        engine.check()
    assert mechanisms == ["gather"] * 3 + ["lower"] * 2


@FORMS
def test_a_demand_for_a_request_that_has_left_is_dropped(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    use(engine, "gather")
    engine.finish(1, keep=False)
    engine.admit([engine.fresh_tokens(9)])
    assert engine.compact().moved_rows == 0
    assert engine.defragmenter.demands == 0
    assert not engine.mover.plans


@FORMS
def test_a_gather_that_finds_no_room_moves_nothing_and_ends(device_form: bool) -> None:
    engine = Engine(Shape(size=30, page=4, rows=3, width=30, device_form=device_form))
    engine.admit([engine.fresh_tokens(1), engine.fresh_tokens(1)])
    for _ in range(13):
        engine.decode([1, 2])
    use(engine, "gather")
    assert engine.compact().moved_rows == 0
    assert engine.defragmenter.demands == 0
    engine.check()


# --- settings ------------------------------------------------------------------------------------


def test_settings_with_another_page_are_refused_and_change_nothing() -> None:
    engine = engine_of()
    use(engine, "gather")
    before = engine.defragmenter.config
    with pytest.raises(ConfigError, match="page: 64"):
        engine.defragmenter.configure(Config())
    assert engine.defragmenter.config is before
    assert engine.defragmenter.demands == 1


def test_demands_outlive_new_settings() -> None:
    engine = engine_of()
    use(engine, "gather")
    engine.defragmenter.configure(engine.paged(Config()))
    assert engine.defragmenter.demands == 1


# --- coverage ------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("delay", [0, 2])
def test_the_policy_learns_the_coverage_that_a_recount_gives(delay: int, device_form: bool) -> None:
    engine = engine_of(device_form=device_form, delay=delay)
    use(engine, "tenure", coverage_high=1.0, coverage_low=0.99)
    assert engine.compact().coverage == (0 if delay == 0 else None)
    for _ in range(24):
        engine.compact()

    view = engine.view()
    lengths = torch.from_numpy(view.committed)
    stats = layout_stats(engine.table, torch.from_numpy(view.rows), lengths, page_sizes=(4,))
    recount = int(stats.covered[4].sum()) / int(lengths.sum())

    assert engine.compact().coverage == recount > 0


@FORMS
def test_tenure_rests_once_coverage_is_high(device_form: bool) -> None:
    engine = engine_of(device_form=device_form, delay=2)
    use(engine, "tenure", coverage_low=0.1, coverage_high=0.2)
    for _ in range(5):
        engine.compact()
    for _ in range(8):
        engine.decode([1, 2, 3])

    report = engine.compact()

    assert report.coverage is not None
    assert report.coverage > 0.2
    assert (report.mechanism, report.reason) == ("none", "no trigger")


def test_without_a_trigger_nothing_is_measured() -> None:
    engine = engine_of()
    use(engine, "gather")
    assert engine.compact().coverage is None


def test_after_a_clear_nobody_has_ended_whose_row_is_given_out_again() -> None:
    engine = engine_of()
    use(engine, "tenure")
    engine.compact()
    engine.defragmenter.clear()
    engine.generation += 1

    engine.compact()

    assert engine.defragmenter._lifetimes.remaining() is None
