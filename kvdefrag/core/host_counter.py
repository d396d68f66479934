"""Counts runs and aligned pages of running requests as they grow, for CPU tables.

Reads each token once: what was counted before stays counted until the row changes hands, its
shared prefix changes, or the caller says that slots of the row were moved. Definitions are those
of `layout`. CPU only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvdefrag.core.demand import IntArray

_BATCHED = 64


class Counts(NamedTuple):
    """Layout of several requests, int64 [n] each.

    Attributes:
        tokens, runs, covered: As in `layout`.
        private, private_covered: The same tokens and covered tokens past the shared prefix.
    """

    tokens: IntArray
    runs: IntArray
    covered: IntArray
    private: IntArray
    private_covered: IntArray


class HostCounter:
    """Incremental `layout` figures by table row.

    Args:
        rows: Rows of the table.
        page: Slots to an aligned page.
    """

    def __init__(self, rows: int, page: int) -> None:
        self._page = page
        self._generation = np.full(rows, -1, dtype=np.int64)
        self._protected = np.zeros(rows, dtype=np.int64)
        self._counted = np.zeros(rows, dtype=np.int64)
        self._runs = np.zeros(rows, dtype=np.int64)
        self._covered = np.zeros(rows, dtype=np.int64)
        self._private_covered = np.zeros(rows, dtype=np.int64)
        self._prefix_runs = np.zeros(rows, dtype=np.int64)
        self._prefix_covered = np.zeros(rows, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return 8 * self._counted.nbytes

    def invalidate(self, rows: IntArray) -> None:
        """Count these rows anew next time: some of their slots were moved."""
        self._generation[rows] = -1

    def invalidate_private(self, rows: IntArray) -> None:
        """Count these rows anew next time, but for their shared prefix."""
        self._counted[rows] = np.minimum(self._counted[rows], self._protected[rows])
        self._runs[rows] = self._prefix_runs[rows]
        self._covered[rows] = self._prefix_covered[rows]
        self._private_covered[rows] = 0

    def count(
        self,
        table: Tensor,
        rows: IntArray,
        generations: IntArray,
        protected: IntArray,
        committed: IntArray,
    ) -> Counts:
        """Return the layout of `table[rows, :committed]`."""
        stale = (
            (self._generation[rows] != generations)
            | (self._protected[rows] != protected)
            | (self._counted[rows] > committed)
        )
        if stale.any():
            self._reset(rows[stale], generations[stale], protected[stale])
            self._count_to(table, rows[stale], protected[stale])
            self._prefix_runs[rows[stale]] = self._runs[rows[stale]]
            self._prefix_covered[rows[stale]] = self._covered[rows[stale]]
        self._count_to(table, rows, committed)
        return Counts(
            committed,
            self._runs[rows],
            self._covered[rows],
            committed - protected,
            self._private_covered[rows],
        )

    def _count_to(self, table: Tensor, rows: IntArray, ends: IntArray) -> None:
        fresh = ends - self._counted[rows]
        flat, width = table.numpy().ravel(), table.shape[1]
        for low, high in _batches(fresh):
            some = (fresh > low) & (fresh <= high)
            if some.any():
                self._add(flat, width, rows[some], ends[some])

    def _reset(self, rows: IntArray, generations: IntArray, protected: IntArray) -> None:
        self._generation[rows] = generations
        self._protected[rows] = protected
        for counts in (self._counted, self._runs, self._covered, self._private_covered):
            counts[rows] = 0

    def _add(self, flat: IntArray, width: int, rows: IntArray, committed: IntArray) -> None:
        page, counted = self._page, self._counted[rows]
        back = page - 1
        columns = np.arange(back + int((committed - counted).max()))
        at = (counted - back)[:, None] + columns
        slots = flat[(rows * width)[:, None] + np.minimum(np.maximum(at, 0), width - 1)].astype(
            np.int64
        )
        breaks = np.empty(slots.shape, dtype=bool)
        breaks[:, 1:] = slots[:, 1:] != slots[:, :-1] + 1
        breaks[:, 0] = True
        breaks |= at <= 0
        new = (columns >= back) & (at < committed[:, None])
        began = np.maximum.accumulate(np.where(breaks, columns, 0), axis=1)
        closes = new & (slots % page == back) & (columns - began >= back) & (slots >= page)
        # A page that the shared prefix begins counts for the private tokens in it only.
        private = np.minimum(page, at + 1 - self._protected[rows][:, None])
        private = np.maximum(private, 0)
        self._runs[rows] += (breaks & new).sum(1)
        self._covered[rows] += closes.sum(1) * page
        self._private_covered[rows] += np.where(closes, private, 0).sum(1)
        self._counted[rows] = committed


def _batches(fresh: IntArray) -> list[tuple[int, int]]:
    # Rows of like growth are counted together, so that padding stays within a factor of eight.
    bounds = [0, _BATCHED]
    largest = int(fresh.max()) if fresh.size else 0
    while bounds[-1] < largest:
        bounds.append(bounds[-1] * 8)
    return list(pairwise(bounds))
