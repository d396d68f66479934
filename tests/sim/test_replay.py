"""A recorded run, replayed: the same slots under the same policy, others under others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvdefrag.core import events as ev
from kvdefrag.core.demand import Kind
from kvdefrag.core.events import Event, Header
from kvdefrag.core.host_event_log import EventLog, EventWriter
from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.profiles import default_profile
from kvdefrag.sim.arm_run import ArmRun
from kvdefrag.sim.arms import NAMES, built_in
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.lookahead import Lookahead
from kvdefrag.sim.metrics import repeatable, undocumented
from kvdefrag.sim.options import RunOptions, TraceOptions
from kvdefrag.sim.pool_map import owners
from kvdefrag.sim.replay import replay
from kvdefrag.sim.replay_run import ArmReplay
from kvdefrag.sim.results import ArmResult
from kvdefrag.sim.simulate import simulate

BLOCK, PAGE = 16, 16


def write_trace(path: Path, requests: int = 50) -> Path:
    """Write conversations whose turns share prefixes, close enough to crowd a small pool."""
    rng, rows = random.Random(5), []
    talks = [[n * 1000 + i for i in range(40)] for n in range(8)]
    for number in range(requests):
        length = rng.randint(8, 190)
        blocks = -(-length // BLOCK)
        shared = rng.choice(talks)[: rng.randint(0, blocks)]
        own = [10**6 + number * 100 + i for i in range(blocks - len(shared))]
        row = {
            "timestamp": number * 40,
            "input_length": length,
            "output_length": rng.choice([1, 5, 40, 70]),
            "hash_ids": [*shared, *own],
        }
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n", encoding="ascii")
    return path


def run_options(
    tmp_path: Path, *, pool: int = 1500, spec_window: int = 0, record: Path | None = None
) -> RunOptions:
    return RunOptions(
        trace=TraceOptions(path=write_trace(tmp_path / "trace.jsonl"), block=BLOCK),
        engine=EngineOptions(
            pool_slots=pool,
            max_running=8,
            context=512,
            chunked_prefill=96,
            spec_window=spec_window,
            page=PAGE,
        ),
        sample_every=4,
        record=record,
    )


def record(tmp_path: Path, name: str, **options: int) -> tuple[ArmResult, ArmRun, Path]:
    path = tmp_path / f"{name}.jsonl"
    run = ArmRun(built_in(name, page=PAGE), run_options(tmp_path, record=path, **options))
    return run.run(), run, path


def replayed(path: Path, name: str, **options: int) -> ArmResult:
    log = EventLog(path)
    result = replay(log, [built_in(name, page=PAGE)], path=path, sample_every=4, **options)
    return result.arms[0]


def follow(path: Path, name: str, check: Callable[[ArmReplay, Event], None]) -> ArmReplay:
    log = EventLog(path)
    ahead = Lookahead(log)
    run = ArmReplay(built_in(name, page=PAGE), log.header, ahead, default_profile(), sample_every=4)
    for event in ahead:
        run.apply(event)
        check(run, event)
    return run


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recordings of two policies, of which the second moves rows."""
    folder = tmp_path_factory.mktemp("logs")
    return {name: record(folder, name)[2] for name in ("stock", "placement+tenure")}


@pytest.mark.parametrize(
    ("name", "spec_window"),
    [*((name, 0) for name in NAMES if name != "packed"), ("stock", 4), ("placement+tenure", 4)],
)
def test_a_replay_under_the_same_policy_gives_the_same_slots(
    tmp_path: Path, name: str, spec_window: int
) -> None:
    direct, run, path = record(tmp_path, name, spec_window=spec_window)
    given = 0

    def same(again: ArmReplay, event: Event) -> None:
        nonlocal given
        if isinstance(event, ev.Allocated):
            given += 1
            assert again.slot_map.look(event.slots).tolist() == event.slots.tolist()

    again = follow(path, name, same)

    assert given > 100
    assert again.allocator.free_slots().tolist() == run.allocator.free_slots().tolist()
    assert repeatable(again.result(0.0).metrics) == repeatable(direct.metrics)


def test_the_replays_of_every_series_and_map_are_those_of_the_recorded_run(tmp_path: Path) -> None:
    direct, _, path = record(tmp_path, "placement+tenure")

    again = replayed(path, "placement+tenure")

    assert direct.metrics["moved_rows_per_decoded_token"] > 0
    for name, values in direct.series.items():
        assert again.series[name].tolist() == values.tolist(), name
    assert again.run_histogram.tolist() == direct.run_histogram.tolist()
    assert [m.owners.tolist() for m in again.maps] == [m.owners.tolist() for m in direct.maps]


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        *(("stock", name) for name in NAMES),
        ("placement+tenure", "stock"),
        ("placement+tenure", "placement+tenure"),
    ],
)
def test_rows_hold_what_the_log_says_under_any_policy(
    logs: dict[str, Path], recorded: str, name: str
) -> None:
    steps = 0

    def sound(run: ArmReplay, event: Event) -> None:
        nonlocal steps
        if not isinstance(event, ev.Step):
            return
        steps += 1
        if steps % 20:
            return
        run.check_integrity()
        rows = run.engine.rows
        private = [rows.table[r, rows.protected_len[r] : rows.allocated_len[r]]
                   for r in rows.live_rows()]  # fmt: skip
        slots = np.concatenate([*private, np.empty(0, dtype=np.int32)])
        assert np.unique(slots).shape == slots.shape
        owner = owners(run.engine, run.allocator)
        used = run.allocator.size - run.allocator.available_size()
        assert np.count_nonzero(owner) == used
        assert np.count_nonzero(owner == 1) == run.engine.tree.evictable_size

    follow(logs[recorded], name, sound)

    assert steps > 200


@pytest.mark.parametrize(
    ("pool", "difference"),
    # Where nothing is evicted, all arms do the same work. In a pool of 94 pages, evictions at
    # other moments show; on the embedded slice the difference is about 0.001.
    [(20_000, 1e-6), (1500, 0.04)],
)
def test_a_replay_under_reservation_comes_near_a_simulation_of_it(
    tmp_path: Path, pool: int, difference: float
) -> None:
    _, _, path = record(tmp_path, "stock", pool=pool)
    direct, _, _ = record(tmp_path, "placement+reservation", pool=pool)

    again = replayed(path, "placement+reservation").metrics

    assert again["page_coverage_mean"] == pytest.approx(
        direct.metrics["page_coverage_mean"], abs=difference
    )


def test_a_replay_documents_its_metrics_and_says_what_it_cannot_know(
    logs: dict[str, Path],
) -> None:
    path = logs["stock"]
    arms = [built_in(name, page=PAGE) for name in ("stock", "placement")]

    result = replay(EventLog(path), arms, path=path, sample_every=4)

    assert [arm.name for arm in result.arms] == ["stock", "placement"]
    assert undocumented(result.arms[0].metrics) == []
    assert result.trace["format"] == "events"
    assert result.trace["recorded_policy"] == "stock"
    assert len(str(result.trace["sha256"])) == 64
    assert "those of the recorded run (stock)" in result.warnings[-1]


def test_a_recording_changes_nothing(tmp_path: Path) -> None:
    recorded, _, _ = record(tmp_path, "placement+tenure")
    quiet = ArmRun(built_in("placement+tenure", page=PAGE), run_options(tmp_path)).run()

    assert repeatable(recorded.metrics) == repeatable(quiet.metrics)


def test_equal_runs_are_recorded_in_equal_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()

    first, second = (record(tmp_path / f, "stock")[2].read_bytes() for f in ("a", "b"))

    assert first == second


def test_only_one_arm_can_be_recorded(tmp_path: Path) -> None:
    arms = [built_in(name, page=PAGE) for name in ("stock", "sorted")]

    with pytest.raises(ConfigError, match="--record: 2 arms are chosen"):
        simulate(arms, run_options(tmp_path, record=tmp_path / "log"))


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


HEADER = Header(size=64, page=16, rows=5, context=64, window=0, evicts_for_pages=False,
                policy="live", kvdefrag="0.1.0")  # fmt: skip


def by_hand(tmp_path: Path, *events: Event) -> EventLog:
    with EventWriter(tmp_path / "log", HEADER) as log:
        for event in events:
            log.record(event)
    return EventLog(tmp_path / "log")


def replay_by_hand(tmp_path: Path, name: str, *events: Event) -> ArmReplay:
    ahead = Lookahead(by_hand(tmp_path, *events))
    run = ArmReplay(built_in(name, page=16), HEADER, ahead, default_profile(), sample_every=1)
    for event in ahead:
        run.apply(event)
    return run


def test_reading_ahead_changes_nothing_about_the_order() -> None:
    events: list[Event] = [ev.Freed(ints(n)) for n in range(1, 9)]
    ahead, order = Lookahead(events, most=3), []

    for event in ahead:
        assert len(list(ahead.frees(np.zeros(9, dtype=np.bool_)))) <= 3
        order.append(event)

    assert order == events


def test_slots_that_are_used_before_they_are_freed_are_not_freed_early() -> None:
    events: list[Event] = [
        ev.Freed(ints(1, 2)),
        ev.Shared(1, 0, ints(3)),
        ev.Freed(ints(3, 8)),
        ev.Freed(ints(4)),
        ev.Allocated(Kind.DECODE, ints(1), ints(0), ints(1), ints(4)),
        ev.Freed(ints(4)),
        ev.Freed(ints(5)),
        ev.Freed(ints(6)),
        ev.Cleared(),
        ev.Freed(ints(7)),
    ]
    used = np.zeros(9, dtype=np.bool_)
    used[5] = True

    found = [slots.tolist() for slots in Lookahead(events).frees(used)]

    assert found == [[1, 2], [8], [4], [6]]


def test_an_arm_that_takes_whole_pages_evicts_what_is_evicted_next(tmp_path: Path) -> None:
    # The first prompt is cached once its row is left; one slot is free.
    events = [
        ev.Allocated(Kind.EXTEND, ints(1), ints(0), ints(47), ints(*range(1, 48))),
        ev.Step(1, 1.0, rows=ints(1), generations=ints(1), protected=ints(47),
                committed=ints(47), allocated=ints(47)),
        ev.Released(1, 47),
        ev.Step(2, 2.0, left=ints(1), cached=47),
        ev.Allocated(Kind.EXTEND, ints(2), ints(0), ints(17), ints(*range(48, 65))),
        ev.Step(3, 3.0, rows=ints(2), generations=ints(1), protected=ints(0),
                committed=ints(17), allocated=ints(17), cached=47),
        ev.Freed(ints(*range(1, 48))),
        ev.Step(4, 4.0, cached=0),
    ]  # fmt: skip

    run = replay_by_hand(tmp_path, "placement+reservation", *events[:-2])
    assert run.allocator.available_size() + run.allocator.reserved_size() == 0
    run = replay_by_hand(tmp_path, "placement+reservation", *events)

    # 17 tokens want 2 pages, more than the 17 free slots: the prompt goes before its time.
    assert run.allocator.reserved_size() == 15
    assert run.allocator.available_size() == 32
    assert run.engine.tree.evictable_size == 0


def test_a_log_that_opens_on_a_pool_in_use_goes_on_from_its_free_list(tmp_path: Path) -> None:
    free = [9, 3, *range(20, 65)]
    opened = [
        ev.Opened(ints(*free)),
        ev.Shared(2, 0, ints(1, 2, 4)),
        ev.Step(
            100,
            5.0,
            cached=3,
            rows=ints(2),
            generations=ints(7),
            protected=ints(0),
            committed=ints(3),
            allocated=ints(3),
        ),
    ]
    wanted = ev.Allocated(Kind.EXTEND, ints(3), ints(0), ints(2), ints(9, 3))

    stock = replay_by_hand(tmp_path, "stock", *opened, wanted)
    moving = replay_by_hand(tmp_path, "placement+reservation", *opened, wanted)

    # Stock goes on where the recorded list went on; reservation takes the first whole page.
    assert stock.allocator.free_slots().tolist() == free[2:]
    assert stock.engine.rows.table[2, :3].tolist() == [1, 2, 4]
    assert stock.engine.rows.table[3, :2].tolist() == [9, 3]
    assert moving.engine.rows.table[3, :2].tolist() == [32, 33]
    assert moving.allocator.reserved_size() == 14


def test_cleared_and_resized_pools_begin_anew(tmp_path: Path) -> None:
    first = ev.Allocated(Kind.EXTEND, ints(1), ints(0), ints(4), ints(1, 2, 3, 4))

    run = replay_by_hand(tmp_path, "stock", first, ev.Cleared(), first, ev.Resized(32), first)

    assert run.allocator.size == 32
    assert run.allocator.free_slots().tolist() == list(range(5, 33))


FIRST = ev.Allocated(Kind.EXTEND, ints(1), ints(0), ints(3), ints(1, 2, 3))


@pytest.mark.parametrize(
    ("events", "line", "field", "message"),
    [
        ([FIRST, FIRST], 3, "slots", r"\[1, 2, 3\] are handed out twice"),
        ([FIRST, ev.Freed(ints(3, 4))], 3, "slots", r"\[4\] are not live"),
        ([FIRST, ev.Freed(ints(3, 2, 3))], 3, "slots", r"\[3\] are named twice"),
        ([ev.Shared(1, 0, ints(7))], 2, "slots", r"\[7\] are not live"),
        ([FIRST, ev.Moved(ints(1), ints(2))], 3, "src", r"\[2\] are live"),
        ([FIRST, ev.Moved(ints(9), ints(10))], 3, "src", r"\[9\] are not live"),
        ([FIRST, ev.Opened(ints(9))], 3, "slots", "only at its beginning"),
        ([ev.Refused(Kind.EXTEND, ints(1), ints(0), ints(5))], 2, "slots", "5 slots were refused"),
    ],
)
def test_a_log_that_contradicts_itself_is_refused_by_line(
    tmp_path: Path, events: list[Event], line: int, field: str, message: str
) -> None:
    log = by_hand(tmp_path, *events)

    with pytest.raises(TraceError, match=message) as caught:
        replay(log, [built_in("stock", page=16)], path=tmp_path / "log")

    assert (caught.value.row, caught.value.field) == (line, field)


def test_a_slot_handed_out_twice_in_one_event_is_found(tmp_path: Path) -> None:
    twice = ev.Allocated(Kind.EXTEND, ints(1), ints(0), ints(2), ints(5, 5))

    with pytest.raises(TraceError, match=r"\[5\] are handed out twice"):
        replay(by_hand(tmp_path, twice), [built_in("stock", page=16)], path=tmp_path / "log")


def test_an_empty_log_gives_a_result_and_says_that_it_shows_nothing(tmp_path: Path) -> None:
    result = replay(by_hand(tmp_path), [built_in("default", page=16)], path=tmp_path / "log")

    assert all(np.isfinite(v) for v in result.arms[0].metrics.values())
    assert any("too short" in warning for warning in result.warnings)


def test_a_log_that_is_not_whole_is_replayed_with_a_warning(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    lines = logs["stock"].read_bytes().splitlines(keepends=True)
    path = tmp_path / "half.jsonl"
    path.write_bytes(b"".join(lines[: len(lines) // 2]))

    result = replay(EventLog(path), [built_in("placement", page=PAGE)], path=path, sample_every=4)

    assert result.arms[0].metrics["page_coverage_mean"] > 0
    assert "not whole: the log has no closing line" in result.warnings[-1]


def test_progress_counts_bytes_up_to_the_whole_log(logs: dict[str, Path]) -> None:
    path = logs["stock"]
    seen: list[int] = []

    replay(EventLog(path), [built_in("stock", page=PAGE)], path=path, progress=seen.append)

    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size
