"""Replays a log of allocator events through policies other than the one it was recorded under."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvdefrag.core.events import Event, Header, Moved
from kvdefrag.core.host_event_log import EventLog
from kvdefrag.errors import SlotError, TraceError
from kvdefrag.profiles import profile_or_default
from kvdefrag.sim.arms import Arm
from kvdefrag.sim.lookahead import Lookahead
from kvdefrag.sim.replay_run import ArmReplay
from kvdefrag.sim.report import verdict_of, warnings_of
from kvdefrag.sim.results import ArmResult, RunResult
from kvdefrag.sim.simulate import versions

Progress = Callable[[int], None]

_EVERY = 256


def replay(
    log: EventLog,
    arms: Sequence[Arm],
    *,
    path: Path,
    profile: Path | None = None,
    sample_every: int = 16,
    progress: Progress | None = None,
) -> RunResult:
    """Ask every arm for what the recorded run asked for, and say what each adds.

    The log is read once, as a stream.

    Args:
        log: The recording.
        arms: Policies, cheapest first.
        path: The recording's file, for its name and checksum.
        profile: Device profile that prices steps; None for the shipped one.
        sample_every: Decode steps between samples.
        progress: Called now and then with the bytes of text read.

    Raises:
        ConfigError: The profile is refused.
        TraceError: The log is wrong; names the line and the field.
    """
    prices = profile_or_default(profile)
    ahead = Lookahead(log)
    runs = [ArmReplay(arm, log.header, ahead, prices, sample_every=sample_every) for arm in arms]
    began = time.perf_counter()
    events = _feed(runs, ahead, log, progress)
    wall_s = (time.perf_counter() - began) / max(1, len(runs))
    results = [run.result(wall_s) for run in runs]
    options = {"profile": None if profile is None else str(profile), "sample_every": sample_every}
    return RunResult(
        trace=_trace(path, log.header, events),
        options={**_sizes(log.header, arms), **options},
        versions=versions(),
        arms=tuple(results),
        verdict=verdict_of(results),
        warnings=(*warnings_of(results), *_warnings(log, results)),
    )


def _feed(
    runs: Sequence[ArmReplay], ahead: Lookahead, log: EventLog, progress: Progress | None
) -> int:
    events = 0
    for event in ahead:
        events += 1
        for run in runs:
            # Lines: the header, and one for each event.
            _apply(run, event, events + 1)
        if progress is not None and events % _EVERY == 0:
            progress(log.position)
    if progress is not None:
        progress(log.position)
    return events


def _sizes(header: Header, arms: Sequence[Arm]) -> dict[str, int]:
    return {
        "pool_slots": header.size,
        "max_running": header.rows - 1,
        "context": header.context,
        "spec_window": header.window,
        "page": arms[0].config.page if arms else header.page,
    }


def _trace(path: Path, header: Header, events: int) -> dict[str, str | int]:
    return {
        "name": path.name,
        "sha256": _sha256(path),
        "format": "events",
        "events": events,
        "recorded_policy": header.policy,
        "recorded_version": header.kvdefrag,
    }


def _apply(run: ArmReplay, event: Event, line: int) -> None:
    try:
        run.apply(event)
    except SlotError as error:
        field = "src" if isinstance(event, Moved) else "slots"
        raise TraceError(str(error), row=line, field=field) from error


def _warnings(log: EventLog, results: Sequence[ArmResult]) -> list[str]:
    said = [
        f"Admissions, retractions and times are those of the recorded run ({log.header.policy}); "
        "what other times and other prefix hits would have led to shows only in `kvdefrag "
        "simulate`."
    ]
    if log.cut is not None:
        said.append(f"The recording is not whole: {log.cut}.")
    if results and not len(results[0].series["time_s"]):
        said.append("No decode step was sampled: the recording is too short to say anything.")
    return said


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
