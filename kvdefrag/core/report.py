"""What one defragmenter step did, in values the host already knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mechanism = Literal["none", "tenure", "evacuation", "gather", "lower", "idle"]


@dataclass(frozen=True)
class StepReport:
    """One step, as observers are told of it. Building it never waits for the device.

    Attributes:
        step: The defragmenter's own loop counter; the first step of a streak that does nothing.
        mechanism: What was planned; `none` if nothing was.
        reason: Why it was planned, or why not: one of a few fixed words, fit for a label.
        planned_rows: Rows the plan may move, masked ones included.
        moved_rows: Rows the device confirms to have moved; None while not read back.
        bytes: Bytes the plan copies, each byte counted once though it is read and written.
        dry_run: The plan was made and not carried out.
        gates: Names of the gates that were closed, in order; a closed gate means no moves.
        backoff_until: First step that may plan again; at most `step` when not backing off.
        coverage: Page coverage in 0 .. 1, the latest read back; None before the first.
        whole_free_pages: Pages with every slot free, the latest read back; None before the first.
        reserved_slots: Slots that rows hold beyond their allocated length.
        available: Free slots; a compaction leaves it as it was.
        error: What went wrong inside kvdefrag; None when nothing did.
    """

    step: int
    mechanism: Mechanism
    reason: str
    planned_rows: int
    moved_rows: int | None
    bytes: int
    dry_run: bool
    gates: tuple[str, ...]
    backoff_until: int
    coverage: float | None
    whole_free_pages: int | None
    reserved_slots: int
    available: int
    error: str | None

    @property
    def moves(self) -> bool:
        """Whether rows were set moving, as far as the host knows."""
        return self.planned_rows > 0 and not self.dry_run and self.moved_rows != 0
