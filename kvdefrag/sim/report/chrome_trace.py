"""The steps of every arm as a trace for chrome://tracing and Perfetto (Trace Event Format)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from kvdefrag.sim.results import ArmResult, RunResult

Event = dict[str, Any]

_LAYOUT = ("coverage", "whole_free_share")
_POOL = ("live_share", "cached_share", "reserved_share")


def write_chrome_trace(result: RunResult, path: Path) -> None:
    """Write one process per arm: steps as complete events, layout and pool use as counters.

    Times are microseconds of simulated time. Events are written one a line and never held in
    memory together, since a long trace has a million of them.
    """
    about = {**result.trace, **{f"version.{k}": v for k, v in result.versions.items()}}
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(_line({key: str(text) for key, text in about.items()}))
        file.write(',"traceEvents":[')
        events = chain.from_iterable(
            arm_events(arm, process) for process, arm in enumerate(result.arms, start=1)
        )
        for index, event in enumerate(events):
            file.write((",\n" if index else "\n") + _line(event))
        file.write("\n]}\n")


def arm_events(arm: ArmResult, process: int) -> Iterator[Event]:
    """Yield the events of one arm: names first, then its steps, then its counters."""
    base: Event = {"pid": process, "tid": 1}
    yield {**base, "ph": "M", "name": "process_name", "args": {"name": arm.name}}
    yield {**base, "ph": "M", "name": "process_sort_index", "args": {"sort_index": process}}
    yield {**base, "ph": "M", "name": "thread_name", "args": {"name": "scheduler"}}
    for step in arm.slices:
        yield {
            **base,
            "ph": "X",
            "cat": "step",
            "name": step.name,
            "ts": step.start_us,
            "dur": step.duration_us,
            "args": _finite(step.args),
        }
    yield from _counters(arm, base, "layout", _LAYOUT)
    yield from _counters(arm, base, "pool", _POOL)
    yield from _counters(arm, base, "moved rows", ("moved_rows",))


def _counters(arm: ArmResult, base: Event, name: str, keys: Iterable[str]) -> Iterator[Event]:
    columns = {key: arm.series[key].tolist() for key in keys if key in arm.series}
    for index, seconds in enumerate(arm.series["time_s"].tolist()):
        values = _finite({key: column[index] for key, column in columns.items()})
        if values:
            yield {**base, "ph": "C", "name": name, "ts": seconds * 1e6, "args": values}


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {key: number for key, number in values.items() if math.isfinite(number)}


def _line(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)
