"""Totals of step reports, kept at next to no cost and told to others now and then."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from kvdefrag.core.report import StepReport


@dataclass(frozen=True)
class Figures:
    """How things stand at one moment.

    Attributes:
        step: Number of the latest step.
        active: Whether kvdefrag works in this process.
        backoff_steps: Steps until a plan may be made again.
        tokens, runs, covered: Tokens of the running requests, their runs, and those of the tokens
            that lie in aligned pages, as last measured; 0 before the first measurement.
        whole_free_pages: Pages with every slot free, as last read back; None before the first.
        reserved_slots: Slots that rows hold beyond their allocated length.
        available_slots: Free slots.
    """

    step: int = 0
    active: bool = False
    backoff_steps: int = 0
    tokens: int = 0
    runs: int = 0
    covered: int = 0
    whole_free_pages: int | None = None
    reserved_slots: int = 0
    available_slots: int = 0

    @property
    def coverage(self) -> float | None:
        """Share of the tokens in aligned pages; None without any."""
        return self.covered / self.tokens if self.tokens else None


class Tally:
    """Totals since the start.

    Args:
        row_bytes: Bytes of one slot over all buffers.

    Attributes:
        steps: Steps by what they planned.
        planned_rows: Rows that plans might move, by mechanism.
        moved_rows: Rows that have moved, by mechanism, as far as the device has said.
        skips: Steps that planned nothing, by reason.
        gates_closed: Steps that a closed gate kept from moving, by gate.
        errors: Faults.
        seconds: Time of the host spent in steps.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.steps: Counter[str] = Counter()
        self.planned_rows: Counter[str] = Counter()
        self.moved_rows: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.gates_closed: Counter[str] = Counter()
        self.errors = 0
        self.seconds = 0.0
        self._latest: StepReport | None = None
        self._times = 0

    def add(self, report: StepReport, seconds: float) -> None:
        """Count one step.

        Almost every step has the very report of the step before: those are counted together.
        """
        self.seconds += seconds
        if report is self._latest:
            self._times += 1
            return
        self.settle()
        self._latest, self._times = report, 1

    def settle(self) -> None:
        """Bring the totals up to date."""
        report, times = self._latest, self._times
        self._times = 0
        if report is None or not times:
            return
        self.steps[report.mechanism] += times
        if report.planned_rows:
            self.planned_rows[report.mechanism] += times * report.planned_rows
        else:
            self.skips[report.reason] += times
        for gate in report.gates:
            self.gates_closed[gate] += times

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that have moved, by mechanism; each counted once though it is read and written."""
        return {name: rows * self.row_bytes for name, rows in self.moved_rows.items()}


class Sink(Protocol):
    """Is told of the totals now and then."""

    def publish(self, tally: Tally, figures: Figures) -> None:
        """Take note; must neither wait for the device nor change anything."""
        ...
