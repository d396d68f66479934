"""Runs all arms of a run over the same arrivals, on as many processes as are asked for."""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.queues import Queue
from queue import Empty
from typing import TypeAlias

import numpy as np
import torch

from kvdefrag import __version__
from kvdefrag.errors import ConfigError
from kvdefrag.sim.arm_run import ArmRun
from kvdefrag.sim.arms import Arm
from kvdefrag.sim.options import RunOptions
from kvdefrag.sim.report import verdict_of, warnings_of
from kvdefrag.sim.results import ArmResult, RunResult

Progress = Callable[[int, int], None]
# A string: the queue class of 3.11 cannot be subscripted when the module is run.
Reports: TypeAlias = "Queue[tuple[int, int]]"

_POLL_S = 0.1


def simulate(
    arms: Sequence[Arm],
    options: RunOptions,
    *,
    processes: int = 1,
    progress: Progress | None = None,
) -> RunResult:
    """Run every arm and say what each adds.

    The result does not depend on `processes`.

    Args:
        arms: Policies, cheapest first.
        options: The run's.
        processes: Arms run side by side.
        progress: Called with an arm's position and the requests it is done with.

    Raises:
        ConfigError, TraceError: An option or a row of the trace is refused.
    """
    if options.record is not None and len(arms) != 1:
        raise ConfigError(f"--record: {len(arms)} arms are chosen; name one of them in --arms")
    source = options.trace.open()
    trace: dict[str, str | int] = {
        "name": source.name,
        "sha256": source.sha256,
        "format": source.format,
        "requests": source.rows,
        "unsorted": source.unsorted,
        "duplicates": source.duplicates,
        "zero_outputs": source.zero_outputs,
    }
    if processes > 1 and len(arms) > 1:
        results = _side_by_side(arms, options, min(processes, len(arms)), progress)
    else:
        results = [_one(arm, options, _report_as(progress, i)) for i, arm in enumerate(arms)]
    return RunResult(
        trace=trace,
        options=options.as_dict(),
        versions=versions(),
        arms=tuple(results),
        verdict=verdict_of(results),
        warnings=warnings_of(results),
    )


def versions() -> dict[str, str]:
    """Return what a result was made with."""
    return {
        "kvdefrag": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def request_count(options: RunOptions) -> int:
    """Return how many requests the run serves."""
    return sum(1 for _ in options.trace.selection.apply(options.trace.open()))


def _one(arm: Arm, options: RunOptions, report: Callable[[int], None] | None) -> ArmResult:
    result = ArmRun(arm, options).run(report)
    return result if options.slices else replace(result, slices=())


def _report_as(progress: Progress | None, position: int) -> Callable[[int], None] | None:
    return None if progress is None else lambda done: progress(position, done)


def _side_by_side(
    arms: Sequence[Arm], options: RunOptions, processes: int, progress: Progress | None
) -> list[ArmResult]:
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    reports: Reports = context.Queue()
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start_worker, initargs=(reports,)
    ) as pool:
        futures = [pool.submit(_work, i, arm, options) for i, arm in enumerate(arms)]
        for position, done in _until_all_done(futures, reports):
            if progress is not None:
                progress(position, done)
        return [future.result() for future in futures]


def _until_all_done(
    futures: Sequence[Future[ArmResult]], reports: Reports
) -> Iterator[tuple[int, int]]:
    while not all(future.done() for future in futures):
        try:
            yield reports.get(timeout=_POLL_S)
        except Empty:
            continue
        if any(future.done() and future.exception() for future in futures):
            return
    with suppress(Empty):
        while True:
            yield reports.get(timeout=_POLL_S)


_worker_reports: list[Reports] = []


def _start_worker(reports: Reports) -> None:
    # A queue reaches a spawned worker only while it starts, so it is kept for its tasks here.
    torch.set_num_threads(1)
    _worker_reports.append(reports)


def _work(position: int, arm: Arm, options: RunOptions) -> ArmResult:
    return _one(arm, options, lambda done: _worker_reports[0].put((position, done)))
