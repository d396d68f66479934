"""Writes what an arm's allocator and rows do into a log of events."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kvdefrag import __version__
from kvdefrag.core.events import Header
from kvdefrag.core.host_event_log import EventWriter
from kvdefrag.core.host_recording import StepRecorder
from kvdefrag.core.view import EngineView
from kvdefrag.sim.arms import Arm
from kvdefrag.sim.engine_types import EngineOptions, StepInfo, StepKind
from kvdefrag.sim.measured import Measured


class Recording:
    """The log of one arm.

    Args:
        path: Where it is written.
        arm: The policy that is recorded.
        options: The engine's sizes.

    Attributes:
        steps: What the allocator tells of its work.
    """

    def __init__(self, path: Path, arm: Arm, options: EngineOptions) -> None:
        rows, context = options.table_shape
        header = Header(
            size=options.pool_slots,
            page=arm.config.page,
            rows=rows,
            context=context,
            window=options.spec_window,
            evicts_for_pages=arm.config.placement.evicts_for_pages,
            policy=arm.name,
            kvdefrag=__version__,
        )
        self._writer = EventWriter(path, header)
        self.steps = StepRecorder(self._writer, rows)

    def step(self, view: EngineView, engine: Measured, last: StepInfo | None) -> None:
        """Record how the rows stand after the step `last`, None if it is recorded already."""
        ran, tokens = "", 0
        if last is not None and last.kind is StepKind.PREFILL:
            ran, tokens = "prefill", int(last.counts.sum())
        elif last is not None and last.kind is StepKind.DECODE:
            ran, tokens = "decode", int(last.starts.sum() + last.counts.sum())
        self.steps.step(
            view,
            time_s=engine.now,
            ran=ran,
            tokens=tokens,
            cached=engine.tree.evictable_size,
            counts=asdict(engine.totals),
        )

    def close(self) -> None:
        """End the log."""
        self._writer.close()
