"""Slots that rows hold beyond their allocated length, taken a page at a time ahead of need.

Who owns what in a table row of a running request:

    [0, protected)          the prefix tree (shared)
    [protected, allocated)  the request
    [allocated, held)       reserved: the request's next tokens, given back first when slots run out
    [held, width)           stale numbers that nothing reads
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvdefrag.core.demand import Demand, IntArray
from kvdefrag.core.view import to_device


class Reservations:
    """Knows how far each row holds slots, and hands a row's own slots back to it.

    Args:
        table: int32 [rows, width], the engine's `req_to_token`.
        page: Slots to an aligned page.
    """

    def __init__(self, table: Tensor, page: int) -> None:
        self.table = table
        self._page = page
        self._width = table.shape[1]
        self.held: IntArray = np.zeros(table.shape[0], dtype=np.int64)
        self.allocated: IntArray = np.zeros(table.shape[0], dtype=np.int64)

    def size(self) -> int:
        """Return how many slots are reserved."""
        return int((self.held - self.allocated).sum())

    def lacking(self, demand: Demand) -> IntArray:
        """Return int64 [n]: slots each request wants beyond those its row already holds."""
        have = np.maximum(self.held[demand.rows] - demand.starts, 0)
        lack: IntArray = np.maximum(demand.counts - have, 0)
        return lack

    def pages_for(self, demand: Demand, lacking: IntArray) -> IntArray:
        """Return int64 [n]: whole pages that cover `lacking`, as far as the row is wide."""
        pages = -(-lacking // self._page)
        first = demand.starts + demand.counts - lacking
        fits = first + pages * self._page <= self._width
        whole: IntArray = np.where(fits, pages, 0)
        return whole

    def write(self, row: int, start: int, slots: Tensor) -> None:
        """Put `slots` into `table[row, start:]`: the row now holds as far as that."""
        end = start + slots.shape[0]
        self.table[row, start:end] = slots
        self.held[row] = end

    def commit(self, demand: Demand) -> None:
        """Note that positions up to `starts + counts` are allocated now."""
        ends = demand.starts + demand.counts
        self.allocated[demand.rows] = ends
        self.held[demand.rows] = np.maximum(self.held[demand.rows], ends)

    def read(self, demand: Demand) -> Tensor:
        """Return int64 [sum(counts)]: the slots of the wanted positions, in request order."""
        if (demand.counts == 1).all():
            rows, columns = demand.rows, demand.starts
        else:
            rows = np.repeat(demand.rows, demand.counts)
            ends = np.cumsum(demand.counts)
            columns = np.arange(ends[-1]) + np.repeat(
                demand.starts - ends + demand.counts, demand.counts
            )
        at = to_device(rows * self._width + columns, self.table.device)
        return self.table.view(-1)[at].long()

    def give_back(self, row: int, length: int) -> Tensor:
        """Return a copy of the slots that the row holds from `length` on; it holds them no more."""
        end = int(self.held[row])
        slots = self.table[row, min(length, end) : end].long()
        self.held[row] = min(length, end)
        return slots

    def forget(self, row: int) -> None:
        """Note that the row is free."""
        self.held[row] = self.allocated[row] = 0

    def clear(self) -> None:
        """Note that every row is free."""
        self.held[:] = 0
        self.allocated[:] = 0
