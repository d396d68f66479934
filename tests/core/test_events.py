"""Events survive their way through a log, and a wrong log is refused by line and field."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdefrag.core import events as ev
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.events import Event, Header
from kvdefrag.core.host_event_codec import read_event, write_event
from kvdefrag.core.host_event_forms import from_run_lengths, run_lengths
from kvdefrag.core.host_event_log import EventLog, EventWriter
from kvdefrag.core.host_recording import RecordingAllocator, StepRecorder
from kvdefrag.core.logged_rows import LoggedRows
from kvdefrag.core.view import EngineView
from kvdefrag.errors import ConfigError, TraceError

HEADER = Header(size=64, page=4, rows=5, context=32, window=0, evicts_for_pages=True,
                policy="stock", kvdefrag="0.1.0")  # fmt: skip


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


EVERY_EVENT: list[Event] = [
    ev.Opened(ints(5, 6, 7, 1)),
    ev.Allocated(Kind.EXTEND, ints(1, 2), ints(0, 3), ints(2, 1), ints(9, 10, 4)),
    ev.Allocated(Kind.PLAIN, ints(), ints(), ints(), ints(20, 21)),
    ev.Refused(Kind.DECODE, ints(3), ints(7), ints(1)),
    ev.Freed(ints(9, 4)),
    ev.Shared(2, 1, ints(4, 5, 6)),
    ev.Moved(ints(3, 4), ints(8, 2)),
    ev.Released(2, 4),
    ev.Step(
        step=7,
        time_s=1.5,
        ran="decode",
        tokens=11,
        cached=3,
        rows=ints(1),
        generations=ints(2),
        protected=ints(3),
        committed=ints(4),
        allocated=ints(5),
        left=ints(4),
        counts={"finished": 2},
    ),
    ev.Step(step=0, time_s=0.0),
    ev.Cleared(),
    ev.Resized(32),
]


def plain(event: object) -> dict[str, object]:
    found = {f.name: getattr(event, f.name) for f in fields(event)}  # type: ignore[arg-type]
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()} | {
        "type": type(event)
    }


def write(path: Path, events: list[Event], **options: int) -> EventWriter:
    with EventWriter(path, HEADER, **options) as log:
        for event in events:
            log.record(event)
    return log


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_every_event_survives_the_way_through_a_log(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, EVERY_EVENT)

    log = EventLog(tmp_path / name)

    assert log.header == HEADER
    assert [plain(e) for e in log] == [plain(e) for e in EVERY_EVENT]
    assert log.cut is None


def test_every_kind_of_event_is_among_those_tested() -> None:
    assert {type(e) for e in EVERY_EVENT} | {ev.Ended} == set(Event.__args__)  # type: ignore[attr-defined]


def test_a_log_can_be_read_twice(tmp_path: Path) -> None:
    write(tmp_path / "log", EVERY_EVENT)
    log = EventLog(tmp_path / "log")

    assert [type(e) for e in log] == [type(e) for e in log]


def test_an_event_is_one_line_of_json_with_slots_as_runs(tmp_path: Path) -> None:
    event = ev.Allocated(Kind.DECODE, ints(3, 1), ints(40, 9), ints(1, 1), ints(811, 96))

    line = write_event(event)

    assert line.endswith("\n")
    assert json.loads(line) == {
        "event": "allocated",
        "kind": "decode",
        "rows": [3, 1],
        "starts": [40, 9],
        "counts": [1, 1],
        "slots": [[811, 1], [96, 1]],
    }


def test_the_header_says_version_and_sizes(tmp_path: Path) -> None:
    write(tmp_path / "log", [])

    first, last = (tmp_path / "log").read_text(encoding="ascii").splitlines()

    assert json.loads(first) == {
        "event": "header",
        "version": 1,
        "size": 64,
        "page": 4,
        "rows": 5,
        "context": 32,
        "window": 0,
        "evicts_for_pages": True,
        "policy": "stock",
        "kvdefrag": "0.1.0",
    }
    assert json.loads(last) == {"event": "end", "dropped": 0}


@given(st.lists(st.integers(1, 60), max_size=40))
def test_runs_name_the_same_slots_in_the_same_order(slots: list[int]) -> None:
    runs = run_lengths(np.array(slots, dtype=np.int64))

    written = np.array(runs, dtype=np.int64).reshape(len(runs), 2)
    assert from_run_lengths(written).tolist() == slots
    assert len(runs) == sum(b != a + 1 for a, b in zip([-1, *slots], slots, strict=False))


def test_a_log_stops_at_its_bound_and_says_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    events: list[Event] = [ev.Freed(ints(n + 1)) for n in range(50)]
    longest = len(write_event(events[-1]))

    log = write(path, events, max_bytes=600)

    kept = EventLog(path)
    assert [e.slots[0] for e in kept] == list(range(1, 50 - log.dropped + 1))
    assert 0 < log.dropped < 50
    assert kept.cut == f"{log.dropped} events found no room"
    ending = len(write_event(ev.Ended(log.dropped)))
    assert 600 - longest <= path.stat().st_size - ending <= 600


def test_once_an_event_found_no_room_none_is_kept_any_more(tmp_path: Path) -> None:
    large = ev.Freed(np.arange(1, 64, 2))
    room = len(write_event(ev.Freed(ints(1)))) * 4

    write(
        tmp_path / "log",
        [ev.Freed(ints(1)), large, ev.Freed(ints(2))],
        max_bytes=room + 120,
    )

    assert [e.slots.tolist() for e in EventLog(tmp_path / "log")] == [[1]]


def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, EVERY_EVENT)
    text = path.read_bytes()
    path.write_bytes(text[: text.rindex(b'"cleared"')])

    log = EventLog(path)

    assert len(list(log)) == len(EVERY_EVENT) - 2
    assert log.cut == f"the log breaks off in line {len(EVERY_EVENT)}"


def test_a_compressed_log_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    write(path, [ev.Freed(ints(n % 64 + 1)) for n in range(3000)])
    path.write_bytes(path.read_bytes()[:-12])

    log = EventLog(path)

    assert len(list(log)) <= 3000
    assert log.cut is not None
    assert "breaks off" in log.cut


def test_a_log_that_only_claims_to_be_compressed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(b'{"event":"header"}')

    with pytest.raises(TraceError, match="cannot read"):
        EventLog(path)


def test_a_log_without_its_closing_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, EVERY_EVENT)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))

    log = EventLog(path)

    assert len(list(log)) == len(EVERY_EVENT)
    assert log.cut == "the log has no closing line"


ALLOCATED = {
    "event": "allocated",
    "kind": "extend",
    "rows": [1],
    "starts": [0],
    "counts": [2],
    "slots": [[3, 2]],
}


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        ("nonsense", None, "not JSON"),
        ("[]", None, "not a JSON object"),
        ('{"event":"freed","slots":NaN}', None, "NaN is not a number"),
        ({"event": "moved_on"}, "event", "'moved_on' is not one of opened, allocated"),
        ({}, "event", "None is not one of"),
        ({"event": "freed"}, "slots", "missing"),
        ({"event": "freed", "slots": 7}, "slots", "7 is not a list of runs"),
        ({"event": "freed", "slots": [[0, 1]]}, "slots", "not a list of runs"),
        ({"event": "freed", "slots": [[4]]}, "slots", "not a list of runs"),
        ({"event": "freed", "slots": [[4, 1.5]]}, "slots", "not a list of runs"),
        ({"event": "freed", "slots": [[4, 1], [5]]}, "slots", "not a list of runs"),
        ({"event": "freed", "slots": [[60, 6]]}, "slots", "[60, 6] names slots outside 1..64"),
        ({"event": "freed", "slots": [[1, 10**15]]}, "slots", "outside 1..64"),
        ({"event": "freed", "slots": [[1, 64]] * 2}, "slots", "more slots than 1..64 has"),
        ({"event": "freed", "slots": [[1, 10**30]]}, "slots", "not a list of runs"),
        ({**ALLOCATED, "kind": "prefill"}, "kind", '"prefill" is not one of plain, extend'),
        ({**ALLOCATED, "rows": [-1]}, "rows", "[-1] is not a list of whole numbers"),
        ({**ALLOCATED, "rows": [5]}, "rows", "row 5 is not in 0..4"),
        ({**ALLOCATED, "starts": []}, "starts", "0 entries, but rows has 1"),
        ({**ALLOCATED, "counts": [3]}, "slots", "2 slots where 3 were asked"),
        ({**ALLOCATED, "starts": [31]}, "counts", "position 33 is beyond the context of 32"),
        ({"event": "step", "step": 0}, "time_s", "missing; a number is expected"),
        (
            {"event": "step", "step": -1, "time_s": 0, "ran": "", "tokens": 0, "cached": 0},
            "step",
            "-1 is not a whole number",
        ),
        (
            {"event": "step", "step": 1, "time_s": 0, "ran": "idle", "tokens": 0, "cached": 0},
            "ran",
            "prefill, decode or empty",
        ),
        (
            {
                "event": "step", "step": 1, "time_s": 0, "ran": "", "tokens": 0, "cached": 0,
                "rows": [1, 2], "generations": [1, 1], "protected": [0, 0], "committed": [1],
                "allocated": [1, 1],
            },
            "committed",
            "1 entries, but rows has 2",
        ),
        ({"event": "released", "row": True, "length": 1}, "row", "true is not a whole number"),
        ({"event": "released", "row": 1, "length": 33}, "length", "beyond the context"),
        ({"event": "moved", "src": [[1, 2]], "dst": [[4, 1]]}, "dst", "src has 2"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused_by_its_number_and_field(
    tmp_path: Path, line: object, field: str | None, message: str
) -> None:
    path = tmp_path / "log"
    write(path, [ev.Freed(ints(1)), ev.Freed(ints(2))])
    lines = path.read_text(encoding="ascii").splitlines()
    lines[2] = line if isinstance(line, str) else json.dumps(line)
    path.write_text("\n".join(lines) + "\n", encoding="ascii")

    with pytest.raises(TraceError) as caught:
        list(EventLog(path))

    assert (caught.value.row, caught.value.field) == (3, field)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("first", "field", "message"),
    [
        ("", None, "not JSON"),
        ('{"event":"freed","slots":[]}', "event", "begins with its header"),
        ('{"event":"header","version":2}', "version", "2 is not a version that is read here; 1"),
        ('{"event":"header","version":1}', "size", "missing"),
    ],
)
def test_what_does_not_begin_as_a_log_is_refused(
    tmp_path: Path, first: str, field: str | None, message: str
) -> None:
    (tmp_path / "log").write_text(first + "\n", encoding="ascii")

    with pytest.raises(TraceError) as caught:
        EventLog(tmp_path / "log")

    assert (caught.value.row, caught.value.field) == (1, field)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*missing"):
        EventLog(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be written"):
        EventWriter(tmp_path, HEADER)


def test_equal_events_give_equal_bytes_compressed_or_not(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write(tmp_path / name, EVERY_EVENT)

    first, second = ((tmp_path / n).read_bytes() for n in ("a.gz", "b.gz"))
    assert gzip.decompress(first) == gzip.decompress(second)


def test_a_line_that_was_written_is_read_back_by_itself() -> None:
    for event in EVERY_EVENT:
        assert plain(read_event(write_event(event).encode(), 1, 64)) == plain(event)


class Kept(list):
    def record(self, event: Event) -> None:
        self.append(event)


def told(log: Kept) -> list[tuple[object, ...]]:
    return [
        (type(e).__name__, *(v for k, v in plain(e).items() if k not in ("type", "kind")))
        for e in log
    ]


def test_an_allocator_tells_what_it_was_asked_and_what_it_gave() -> None:
    log = Kept()
    allocator = RecordingAllocator(8, recorder=log, page=4, discipline="fifo")

    allocator.alloc_for(Demand(Kind.EXTEND, ints(1, 2), ints(0, 0), ints(2, 3)))
    allocator.alloc(2)
    allocator.alloc_for(Demand(Kind.DECODE, ints(1, 2), ints(2, 3), ints(1, 1)))
    allocator.free(torch.tensor([4, 1]))
    allocator.alloc(0)
    allocator.free(torch.tensor([], dtype=torch.int64))
    allocator.resize(4)
    allocator.clear()

    assert told(log) == [
        ("Allocated", [1, 2], [0, 0], [2, 3], [1, 2, 3, 4, 5]),
        ("Allocated", [], [], [], [6, 7]),
        ("Refused", [1, 2], [2, 3], [1, 1]),
        ("Freed", [4, 1]),
        ("Resized", 4),
        ("Cleared",),
    ]


def test_frees_that_are_held_back_are_told_once_when_they_happen() -> None:
    log = Kept()
    table = torch.zeros((3, 32), dtype=torch.int32)
    allocator = RecordingAllocator(32, recorder=log, page=4, table=table, reservation=True)
    taken = allocator.alloc_for(Demand(Kind.EXTEND, ints(1), ints(0), ints(6)))
    assert taken is not None
    assert allocator.reserved_size() == 2
    del log[:]

    allocator.free_group_begin()
    allocator.free(taken[:2])
    allocator.free(taken[2:])
    allocator.release(1, 6)
    before = list(map(type, log))
    allocator.free_group_end()

    # What was reserved is in no event: a log knows it as free all the time.
    assert before == [ev.Released]
    assert told(log)[1:] == [("Freed", taken.tolist())]
    assert allocator.available_size() == 32


def test_moves_are_told_without_those_that_move_nothing() -> None:
    log = Kept()
    allocator = RecordingAllocator(8, recorder=log, page=4)
    allocator.alloc(3)

    allocator.commit_moves(torch.tensor([0, 2, 3]), torch.tensor([0, 7, 3]))
    allocator.commit_moves(torch.tensor([0]), torch.tensor([0]))

    assert told(log)[1:] == [("Moved", [2], [7])]


def view(table: torch.Tensor, *rows: tuple[int, int, int, int, int], step: int = 0) -> EngineView:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return EngineView(step, table, *columns)


def step(recorder: StepRecorder, view: EngineView, **counts: int) -> None:
    recorder.step(view, time_s=0.0, ran="", tokens=0, cached=0, counts=counts)


def test_a_step_tells_only_what_the_events_before_do_not() -> None:
    log, table = Kept(), torch.zeros((4, 16), dtype=torch.int32)
    recorder = StepRecorder(log, 4)
    table[1, :6] = torch.tensor([1, 2, 3, 4, 5, 6])
    recorder.record(ev.Allocated(Kind.EXTEND, ints(1), ints(0), ints(4), ints(1, 2, 3, 4)))
    step(recorder, view(table, (1, 1, 4, 4, 4)), finished=0)
    recorder.record(ev.Allocated(Kind.DECODE, ints(1), ints(4), ints(1), ints(5)))
    step(recorder, view(table, (1, 1, 4, 5, 5)), finished=0)
    step(recorder, view(table, (1, 1, 4, 5, 6)), finished=0)
    step(recorder, view(table), finished=1)

    steps = [e for e in log if isinstance(e, ev.Step)]
    assert [e.rows.tolist() for e in steps] == [[1], [], [1], []]
    assert [e.left.tolist() for e in steps] == [[], [], [], [1]]
    assert [dict(e.counts) for e in steps] == [{}, {}, {}, {"finished": 1}]
    assert not [e for e in log if isinstance(e, ev.Shared)]


def test_slots_that_a_row_was_not_given_are_told_as_shared() -> None:
    log, table = Kept(), torch.zeros((4, 16), dtype=torch.int32)
    recorder = StepRecorder(log, 4)
    # Positions 0 and 1 come from the tree; of its own 2..5 the tree had 3 and 4 already.
    recorder.record(ev.Allocated(Kind.EXTEND, ints(1), ints(2), ints(4), ints(3, 4, 5, 6)))
    table[1, :6] = torch.tensor([20, 21, 3, 30, 31, 6])

    step(recorder, view(table, (1, 1, 6, 6, 6)))

    assert told(log)[1:3] == [("Shared", 1, 0, [20, 21]), ("Shared", 1, 3, [30, 31])]
    assert isinstance(log[-1], ev.Step)


def test_a_chunk_that_the_tree_takes_over_later_is_still_known() -> None:
    log, table = Kept(), torch.zeros((4, 16), dtype=torch.int32)
    recorder = StepRecorder(log, 4)
    table[1, :8] = torch.arange(1, 9)
    recorder.record(ev.Allocated(Kind.EXTEND, ints(1), ints(0), ints(4), ints(1, 2, 3, 4)))
    step(recorder, view(table, (1, 1, 0, 4, 4)))
    recorder.record(ev.Allocated(Kind.EXTEND, ints(1), ints(4), ints(4), ints(5, 6, 7, 8)))
    step(recorder, view(table, (1, 1, 4, 8, 8)))
    step(recorder, view(table, (1, 1, 8, 8, 8)))

    assert not [e for e in log if isinstance(e, ev.Shared)]


def test_a_row_that_changed_hands_between_two_steps_is_told_anew() -> None:
    log, table = Kept(), torch.zeros((4, 16), dtype=torch.int32)
    recorder = StepRecorder(log, 4)
    table[1, :2] = torch.tensor([1, 2])
    recorder.record(ev.Allocated(Kind.EXTEND, ints(1), ints(0), ints(2), ints(1, 2)))
    step(recorder, view(table, (1, 1, 0, 2, 2)))
    # The next request finds 1 and 2 in the tree: its row must be told so, though no number differs.
    recorder.record(ev.Released(1, 2))
    step(recorder, view(table, (1, 2, 2, 2, 2)))

    assert ("Shared", 1, 0, [1, 2]) in told(log)


def test_rows_follow_allocations_and_steps() -> None:
    rows = LoggedRows(4)

    rows.allocated(ev.Allocated(Kind.EXTEND, ints(1, 2), ints(0, 4), ints(3, 2), ints(*range(5))))
    rows.allocated(ev.Allocated(Kind.SPECULATIVE, ints(2), ints(6), ints(4), ints(*range(4))))
    rows.stepped(
        ev.Step(0, 0.0, rows=ints(1), generations=ints(1), protected=ints(3), committed=ints(3),
                allocated=ints(3), left=ints(2))
    )  # fmt: skip

    assert rows.committed_len.tolist() == [0, 3, 6, 0]
    assert rows.allocated_len.tolist() == [0, 3, 10, 0]
    assert rows.live_rows().tolist() == [1]


@pytest.mark.parametrize("after", [ev.Cleared(), ev.Resized(60)])
def test_after_a_clear_a_row_of_the_same_generation_is_another_request(after: Event) -> None:
    # SGLang 0.5.17 counts generations from 0 again when its cache is flushed.
    log, table = Kept(), torch.zeros((4, 16), dtype=torch.int32)
    recorder = StepRecorder(log, 4)
    table[2, :6] = torch.arange(1, 7)
    recorder.record(ev.Allocated(Kind.EXTEND, ints(2), ints(0), ints(6), ints(1, 2, 3, 4, 5, 6)))
    step(recorder, view(table, (2, 1, 6, 6, 6)))
    step(recorder, view(table))
    recorder.record(after)
    table[2, :6] = torch.tensor([21, 22, 23, 24, 31, 32])
    recorder.record(ev.Allocated(Kind.EXTEND, ints(2), ints(4), ints(2), ints(31, 32)))

    step(recorder, view(table, (2, 1, 4, 6, 6)))

    assert told(log)[-2] == ("Shared", 2, 0, [21, 22, 23, 24])
