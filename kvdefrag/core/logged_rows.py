"""What a log's events say of the table's rows: writers tell only what differs from it."""

from __future__ import annotations

import numpy as np

from kvdefrag.core.demand import IntArray, Kind
from kvdefrag.core.events import Allocated, Step
from kvdefrag.core.view import EngineView


class LoggedRows:
    """Lengths of the rows as a reader of the log knows them.

    An allocation makes its positions allocated, and committed too unless it is speculative; a
    `Step` corrects that and says which rows are live.

    Attributes:
        generation, protected_len, committed_len, allocated_len: int64 [rows], as in `EngineView`.
        live: bool [rows], whether a request has the row.
    """

    def __init__(self, rows: int) -> None:
        self.generation = np.full(rows, -1, dtype=np.int64)
        self.protected_len = np.zeros(rows, dtype=np.int64)
        self.committed_len = np.zeros(rows, dtype=np.int64)
        self.allocated_len = np.zeros(rows, dtype=np.int64)
        self.live = np.zeros(rows, dtype=np.bool_)

    def live_rows(self) -> IntArray:
        """Return the rows that requests have, ascending, int64 [n]."""
        return np.flatnonzero(self.live)

    def forget(self) -> None:
        """Note that the pool was cleared: SGLang 0.5.17 counts generations from 0 again."""
        self.generation[:] = -1

    def allocated(self, event: Allocated) -> None:
        """Learn from an allocation."""
        ends = event.starts + event.counts
        self.allocated_len[event.rows] = ends
        if event.kind is not Kind.SPECULATIVE:
            self.committed_len[event.rows] = ends

    def stepped(self, event: Step) -> None:
        """Learn from a step."""
        rows = event.rows
        self.live[event.left] = False
        self.live[rows] = True
        self.generation[rows] = event.generations
        self.protected_len[rows] = event.protected
        self.committed_len[rows] = event.committed
        self.allocated_len[rows] = event.allocated

    def news(self, view: EngineView) -> IntArray:
        """Return which of the view's rows, bool [n], a log must tell of."""
        rows = view.rows
        known = (
            self.live[rows]
            & (self.generation[rows] == view.generations)
            & (self.protected_len[rows] == view.protected)
            & (self.committed_len[rows] == view.committed)
            & (self.allocated_len[rows] == view.allocated)
        )
        told: IntArray = ~known
        return told

    def gone(self, view: EngineView) -> IntArray:
        """Return the live rows that the view has no more, int64 [n]."""
        live = self.live.copy()
        live[view.rows] = False
        return np.flatnonzero(live)
