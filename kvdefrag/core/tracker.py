"""What is known of each running request's layout, by table row and generation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvdefrag.core.demand import IntArray
from kvdefrag.core.host_counter import Counts, HostCounter
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.view import EngineView
from kvdefrag.errors import IntegrityError


class Tracker:
    """Follows the live rows of an engine.

    A request is named by its table row and the row's generation, never by its request id. Memory
    follows the number of rows, not the width of the table.

    Args:
        rows: Rows of the table.
        page: Slots to an aligned page.
    """

    def __init__(self, rows: int, *, page: int) -> None:
        self.page = page
        self._generation = np.full(rows, -1, dtype=np.int64)
        self._tenured = np.zeros(rows, dtype=np.int64)
        self._runs = np.zeros(rows, dtype=np.int64)
        self._covered = np.zeros(rows, dtype=np.int64)
        self._measured = np.zeros(rows, dtype=np.int64)
        self._counter = HostCounter(rows, page)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        own = (self._generation, self._tenured, self._runs, self._covered, self._measured)
        return sum(a.nbytes for a in own) + self._counter.nbytes

    def observe(self, view: EngineView) -> None:
        """Learn which requests are live; a row that changed hands starts anew."""
        fresh = self._generation[view.rows] != view.generations
        rows = view.rows[fresh]
        self._generation[rows] = view.generations[fresh]
        self._forget(rows)
        self._tenured[rows] = 0
        self._tenured[view.rows] = self._tenured[view.rows].clip(view.protected, view.committed)

    def tenured(self, view: EngineView) -> IntArray:
        """Return int64 [n]: position up to which each row is known to need no tenure."""
        return self._tenured[view.rows]

    def groups_ready(self, view: EngineView) -> int:
        """Return how many whole groups of a page wait beyond the tenured positions, at most."""
        waiting = (view.committed - self._tenured[view.rows]) // self.page
        return int(waiting.clip(0).sum())

    def confirm(self, rows: IntArray, generations: IntArray, positions: IntArray) -> None:
        """Note that `rows` need no tenure up to `positions`, where still the same request's."""
        same = self._generation[rows] == generations
        self._tenured[rows[same]] = np.maximum(self._tenured[rows[same]], positions[same])

    def measure(self, view: EngineView) -> Counts:
        """Count the layout of the live rows of a CPU table and remember it."""
        counts = self._counter.count(
            view.table, view.rows, view.generations, view.protected, view.committed
        )
        self.learn(view.rows, counts.tokens, counts.runs, counts.covered)
        return counts

    def learn(self, rows: IntArray, tokens: IntArray, runs: IntArray, covered: IntArray) -> None:
        """Remember a measurement made elsewhere, int64 [n] each."""
        self._measured[rows] = tokens
        self._runs[rows] = runs
        self._covered[rows] = covered

    def learn_late(self, view: EngineView, measured: Tensor) -> None:
        """Remember runs and tokens in aligned pages of an earlier view, where it still holds.

        Args:
            view: What was measured.
            measured: int [2, n], on the host.
        """
        runs, covered = measured.long().numpy()
        same = self._generation[view.rows] == view.generations
        self.learn(view.rows[same], view.committed[same], runs[same], covered[same])

    def coverage(self, view: EngineView) -> float | None:
        """Return the token-weighted page coverage last measured; None if nothing was."""
        tokens = int(self._measured[view.rows].sum())
        return int(self._covered[view.rows].sum()) / tokens if tokens else None

    def packed(self, view: EngineView) -> float | None:
        """Return coverage as a share of the best there can be; None if nothing was measured.

        A perfect layout leaves what each request has beyond its last whole page outside, which
        is much where requests are short.
        """
        tokens = self._measured[view.rows]
        most = int((tokens // self.page * self.page).sum())
        if not most:
            return 1.0 if tokens.any() else None
        return int(self._covered[view.rows].sum()) / most

    def moved(self, rows: IntArray) -> None:
        """Note that slots of these rows were moved: they are counted anew."""
        self._counter.invalidate(rows)

    def moved_private(self, rows: IntArray) -> None:
        """Note that slots of these rows past their shared prefix were moved."""
        self._counter.invalidate_private(rows)

    def clear(self) -> None:
        """Forget every request."""
        everyone = np.arange(self._generation.shape[0])
        self._generation[:] = -1
        self._forget(everyone)
        self._counter.invalidate(everyone)

    def check_integrity(self, view: EngineView) -> None:
        """Raise `IntegrityError` unless a recount of the table gives the remembered figures."""
        if view.rows.size == 0:
            return
        counts = self.measure(view)
        rows, lengths = torch.from_numpy(view.rows), torch.from_numpy(view.committed)
        stats = layout_stats(view.table, rows, lengths, page_sizes=(self.page,))
        for name, own, recount in (
            ("runs", counts.runs, stats.runs),
            ("covered", counts.covered, stats.covered[self.page]),
        ):
            wrong = np.flatnonzero(own != recount.numpy())
            if wrong.size:
                i = int(wrong[0])
                raise IntegrityError(
                    f"row {view.rows[i]}: {name} tracked {own[i]}, recounted {int(recount[i])}"
                )

    def _forget(self, rows: IntArray) -> None:
        for figures in (self._measured, self._runs, self._covered):
            figures[rows] = 0
