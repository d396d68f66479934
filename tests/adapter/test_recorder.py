"""A live server's log is read by the replay, and gives the same slots there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.jobs import RECORDED, RECORDED_SPECULATION

from kvdefrag.core import events as ev
from kvdefrag.core.host_event_log import EventLog
from kvdefrag.errors import ConfigError

KINDS = {"Allocated", "Freed", "Released", "Shared", "Step"}


@pytest.mark.children("stock", "recorded")
@pytest.mark.parametrize("case", [*RECORDED, *RECORDED_SPECULATION])
def test_a_replay_of_a_live_recording_has_the_same_slot_statistics_at_every_step(
    children: Any, case: str
) -> None:
    stock = children.served("stock", case)
    found = children.served("recorded", case)

    assert found["outputs"] == stock["outputs"]
    assert len(found["replayed"]) > 25
    assert found["replayed"] == found["live"]
    assert (found["cut"], found["dropped"]) == (None, 0)
    assert found["metrics"]["steps"] == len(found["live"]) - 1


@pytest.mark.children("recorded")
def test_recordings_hold_every_kind_of_event_that_a_replay_knows(children: Any) -> None:
    kinds = [children.served("recorded", case)["kinds"] for case in RECORDED]

    assert set().union(*kinds) >= KINDS


@pytest.mark.children("stock", "recorded")
def test_a_recording_of_a_run_that_moves_rows_can_be_replayed(children: Any) -> None:
    stock = children.served("stock", "llama-retract")
    found = children.served("recorded", "moves")

    assert found["outputs"] == stock["outputs"]
    assert found["kinds"]["Moved"] > 20
    assert found["moved"] > 100
    assert found["cut"] is None


def header(**changes: Any) -> ev.Header:
    fields: dict[str, Any] = {"size": 32, "page": 16, "rows": 4, "context": 64, "window": 0}
    fields |= {"evicts_for_pages": False, "policy": "live", "kvdefrag": "0"}
    return ev.Header(**fields | changes)


def recorder(path: Path, **options: Any) -> Any:
    from kvdefrag.sglang.recorder import LiveRecorder

    defaults: dict[str, Any] = {"max_bytes": 1 << 20, "device": torch.device("cpu")}
    return LiveRecorder(path, header(), **defaults | options)


def freed(count: int = 1) -> ev.Freed:
    from kvdefrag.sglang.late import Late

    return ev.Freed(Late(torch.arange(1, count + 1)))  # type: ignore[arg-type]


def test_what_is_recorded_is_in_the_file_when_it_is_closed(tmp_path: Path) -> None:
    made = recorder(tmp_path / "log.jsonl")
    made.record(freed(3))
    made.close()

    log = EventLog(tmp_path / "log.jsonl")
    assert [e.slots.tolist() for e in log] == [[1, 2, 3]]
    assert log.cut is None


def test_a_file_that_is_full_ends_the_recording_and_the_rest_is_counted(tmp_path: Path) -> None:
    made = recorder(tmp_path / "log.jsonl", max_bytes=700)
    for _ in range(100):
        made.record(freed())
    made.close()
    for _ in range(5):
        made.record(freed())

    log = EventLog(tmp_path / "log.jsonl")
    read = len(list(log))
    assert 1 < read < 30
    assert "found no room" in str(log.cut)
    assert made.dropped > 0
    assert (tmp_path / "log.jsonl").stat().st_size < 1000


def test_a_thread_that_cannot_keep_up_never_holds_the_caller_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvdefrag.sglang.recorder import LiveRecorder

    write = LiveRecorder._write_event

    def slowly(self: Any, event: Any) -> None:
        time.sleep(0.02)
        write(self, event)

    monkeypatch.setattr(LiveRecorder, "_write_event", slowly)
    made = recorder(tmp_path / "log.jsonl", most_waiting=8)
    began = time.perf_counter()
    for _ in range(1000):
        made.record(freed())
    took = time.perf_counter() - began
    made.close()

    log = EventLog(tmp_path / "log.jsonl")
    read = len(list(log))
    assert took < 0.5
    # A log with a gap could not be replayed: what was dropped is the end of it.
    assert 8 <= read < 60
    assert made.dropped == 1000 - read
    assert f"{1000 - read} events found no room" in str(log.cut)


def test_a_fault_of_the_thread_ends_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorder(tmp_path / "log.jsonl")
    monkeypatch.setattr(made._log, "record", lambda event: 1 / 0)
    made.record(freed())
    deadline = time.monotonic() + 5
    while not made.dropped and time.monotonic() < deadline:
        time.sleep(0.01)
    made.record(freed())
    made.close()

    assert made.dropped == 2
    assert list(EventLog(tmp_path / "log.jsonl")) == []


def test_a_file_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")

    with pytest.raises(ConfigError, match="taken"):
        recorder(tmp_path / "taken" / "log.jsonl")


def test_data_parallel_ranks_have_a_file_each() -> None:
    from kvdefrag.sglang.recording import _of_rank

    assert _of_rank(Path("/a/log.jsonl.gz"), 2) == Path("/a/dp2-log.jsonl.gz")
    assert _of_rank(Path("/a/log.jsonl.gz"), None) == Path("/a/log.jsonl.gz")


def test_a_prefix_that_comes_back_after_a_flush_is_recorded_again(tmp_path: Path) -> None:
    from kvdefrag.core.view import EngineView
    from kvdefrag.sglang.recorder import Facts

    def ints(*numbers: int) -> np.ndarray:
        return np.array(numbers, dtype=np.int64)

    def view(step: int, *rows: int) -> EngineView:
        four = np.full(len(rows), 4, dtype=np.int64)
        return EngineView(step, table, ints(*rows), four // 4, four, four, four)

    table = torch.zeros((4, 64), dtype=torch.int32)
    made = recorder(tmp_path / "log.jsonl")
    facts = Facts(time_s=0.0, ran="", tokens=0, cached=0, counts={})
    for number, slots in enumerate(([1, 2, 3, 4], [21, 22, 23, 24])):
        table[2, :4] = torch.tensor(slots)
        made.step(view(2 * number, 2), facts)
        made.step(view(2 * number + 1), facts)
        made.record(ev.Cleared())
    made.close()

    shared = [
        e.slots.tolist() for e in EventLog(tmp_path / "log.jsonl") if isinstance(e, ev.Shared)
    ]
    assert shared == [[1, 2, 3, 4], [21, 22, 23, 24]]
