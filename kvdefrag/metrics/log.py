"""Step reports as log lines."""

from __future__ import annotations

import logging

from kvdefrag.core.report import StepReport


class LogObserver:
    """Logs each step that moved rows, each change between moving and refusing, and summaries.

    Args:
        logger: Where the lines go.
        interval: Steps between summary lines.
    """

    def __init__(self, logger: logging.Logger, *, interval: int = 100) -> None:
        self._logger = logger
        self._interval = interval
        self._refused = 0
        self._rows = 0
        self._bytes = 0

    def on_step(self, report: StepReport) -> None:
        if report.error is not None:
            self._logger.error("step %d: failed: %s", report.step, report.error)
        self._note_gates(report)
        if report.planned_rows and (report.moves or report.dry_run):
            self._note_moves(report)
        if report.step % self._interval == 0:
            self._summarise(report)

    def _note_gates(self, report: StepReport) -> None:
        if report.gates:
            if not self._refused:
                gates = ", ".join(report.gates)
                self._logger.info("step %d: refuses to move, closed: %s", report.step, gates)
            self._refused += 1
        elif self._refused:
            steps = "1 refused step" if self._refused == 1 else f"{self._refused} refused steps"
            self._logger.info("step %d: may move again after %s", report.step, steps)
            self._refused = 0

    def _note_moves(self, report: StepReport) -> None:
        if report.dry_run:
            verb, rows = "would move", report.planned_rows
        elif report.moved_rows is None:
            verb, rows = "moves up to", report.planned_rows
        else:
            verb, rows = "moved", report.moved_rows
        self._logger.info(
            "step %d: %s %s %d rows, %d bytes, because %s",
            report.step,
            report.mechanism,
            verb,
            rows,
            report.bytes,
            report.reason,
        )
        if not report.dry_run:
            self._rows += rows
            self._bytes += report.bytes

    def _summarise(self, report: StepReport) -> None:
        coverage = "unknown" if report.coverage is None else f"{report.coverage:.3f}"
        self._logger.info(
            "step %d: %d rows and %d bytes moved since the last summary; page coverage %s, "
            "%d slots free, %d reserved",
            report.step,
            self._rows,
            self._bytes,
            coverage,
            report.available,
            report.reserved_slots,
        )
        self._rows = self._bytes = 0
