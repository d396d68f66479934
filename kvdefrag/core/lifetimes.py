"""How many steps a running request has left, from those that have finished."""

from __future__ import annotations

import numpy as np

from kvdefrag.core.view import EngineView


class Lifetimes:
    """Averages the decode steps of finished requests; counts steps, never a clock.

    Args:
        rows: Rows of the table.
    """

    def __init__(self, rows: int) -> None:
        self._generation = np.full(rows, -1, dtype=np.int64)
        self._first = np.zeros(rows, dtype=np.int64)
        self._last = np.zeros(rows, dtype=np.int64)
        self._finished = 0
        self._steps = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return 3 * self._first.nbytes

    def clear(self) -> None:
        """Forget who runs; what was learnt of those that have ended stays."""
        self._generation[:] = -1

    def observe(self, view: EngineView) -> None:
        """Learn which requests run in this step."""
        fresh = self._generation[view.rows] != view.generations
        rows = view.rows[fresh]
        ended = rows[self._generation[rows] >= 0]
        self._finished += ended.size
        self._steps += int((self._last[ended] - self._first[ended] + 1).sum())
        self._generation[rows] = view.generations[fresh]
        self._first[rows] = view.step
        self._last[view.rows] = view.step

    def remaining(self) -> float | None:
        """Return half the mean lifetime in steps; None before a row was given out again.

        Half: a request seen at a random step of its life has half of it left on the average.
        """
        return self._steps / self._finished / 2 if self._finished else None
