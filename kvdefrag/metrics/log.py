"""Totals as log lines."""

from __future__ import annotations

import logging

from kvdefrag.metrics.tally import Figures, Tally


class LogSink:
    """Logs what has happened since the last time; nothing if nothing has.

    Args:
        logger: Where the lines go.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._rows = self._gates = 0

    def publish(self, tally: Tally, figures: Figures) -> None:
        rows, gates = tally.moved_rows.total(), tally.gates_closed.total()
        moved, kept = rows - self._rows, gates - self._gates
        self._rows, self._gates = rows, gates
        if not moved and not kept:
            return
        coverage = "unknown" if figures.coverage is None else f"{figures.coverage:.3f}"
        self._logger.info(
            "step %d: %d rows and %d bytes moved since the last summary%s; page coverage %s, "
            "%d slots free, %d reserved",
            figures.step,
            moved,
            moved * tally.row_bytes,
            f", {kept} steps kept by gates" if kept else "",
            coverage,
            figures.available_slots,
            figures.reserved_slots,
        )
