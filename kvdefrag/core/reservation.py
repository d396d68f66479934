"""Slots that rows hold beyond their allocated length, taken a page at a time ahead of need.

Who owns what in a table row of a running request:

    [0, protected)          the prefix tree (shared)
    [protected, allocated)  the request
    [allocated, held)       reserved: the request's next tokens, given back first when slots run out
    [held, width)           stale numbers that nothing reads
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvdefrag.core.demand import Demand, IntArray, Kind, ragged
from kvdefrag.core.view import to_device

BoolArray = npt.NDArray[np.bool_]


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
        self._flat = table.view(-1)
        self.held: IntArray = np.zeros(table.shape[0], dtype=np.int64)
        self.allocated: IntArray = np.zeros(table.shape[0], dtype=np.int64)
        # Position at which a row began to take single slots, or -1 while it fills pages.
        self._loose: IntArray = np.full(table.shape[0], -1, dtype=np.int64)

    def size(self) -> int:
        """Return how many slots are reserved."""
        return int((self.held - self.allocated).sum())

    def lacking(self, demand: Demand) -> IntArray:
        """Return int64 [n]: slots each request wants beyond those its row already holds."""
        lack = demand.starts + demand.counts - self.held[demand.rows]
        bounded: IntArray = np.minimum(np.maximum(lack, 0), demand.counts)
        return bounded

    def pages_for(self, starts: IntArray, counts: IntArray) -> IntArray:
        """Return int64 [n]: whole pages that cover `counts`, 0 where the row is too narrow."""
        pages = -(-counts // self._page)
        fits = starts + pages * self._page <= self._width
        whole: IntArray = pages * fits
        return whole

    def write(self, rows: IntArray, starts: IntArray, counts: IntArray, slots: Tensor) -> None:
        """Put `slots`, in order, into positions `[starts, starts + counts)` of `rows`.

        The rows then hold slots as far as that.
        """
        at = to_device(ragged(rows * self._width + starts, counts), slots.device)
        self._flat[at] = slots.to(self._flat.dtype)
        self.held[rows] = starts + counts

    def mid_group(self, rows: IntArray, starts: IntArray) -> BoolArray:
        """Return bool [n]: whether a row is amid a group of a page of single slots."""
        loose = self._loose[rows]
        inside: BoolArray = (loose >= 0) & ((starts - loose) % self._page != 0)
        return inside

    def note_singles(self, rows: IntArray, starts: IntArray, singles: BoolArray) -> None:
        """Note which rows took single slots for positions from `starts`, and which took pages."""
        loose = self._loose[rows]
        self._loose[rows] = np.where(singles, np.where(loose >= 0, loose, starts), -1)

    def to_group_end(self, rows: IntArray, ends: IntArray) -> IntArray:
        """Return int64 [n]: tokens from `ends` to the end of the group a row is amid, if near.

        Speculation takes several slots at once and would step over the end of a group; it is 0
        where that is a quarter of a page or more away, or where the row is too narrow.
        """
        rest = (self._loose[rows] - ends) % self._page
        near = (rest < self._page // 4) & (ends + rest <= self._width)
        wanted: IntArray = np.where(near, rest, 0)
        return wanted

    def estranged(self, demand: Demand) -> IntArray:
        """Return rows that hold reserved slots though the engine's length for them has changed.

        The engine cut or freed tokens of such a row by itself, so its next tokens do not follow
        what is reserved.
        """
        changed = self.allocated[demand.rows] != demand.starts
        rows, starts = demand.rows[changed], demand.starts[changed]
        strange: IntArray = rows[self.held[rows] > np.minimum(self.allocated[rows], starts)]
        return strange

    def givers(self, keep: IntArray) -> IntArray:
        """Return the rows that hold slots beyond `keep`, in the order in which they give them back.

        Those with the most come first, so that few rows lose the page they are filling, and those
        are the pages that hold least. Rows that hold equally many come by number: every rank has
        the same order.

        Args:
            keep: int64 [rows], positions up to which each row keeps what it holds.
        """
        surplus = self.held - keep
        rows = np.flatnonzero(surplus > 0)
        first: IntArray = rows[np.argsort(-surplus[rows], kind="stable")]
        return first

    def commit(self, demand: Demand) -> None:
        """Note that positions up to `starts + counts` are allocated now."""
        ends = demand.starts + demand.counts
        self.allocated[demand.rows] = ends
        self.held[demand.rows] = np.maximum(self.held[demand.rows], ends)

    def withdraw(self, demand: Demand) -> None:
        """Note that `demand` was not met after all: what its rows hold for it is reserved."""
        rows, allocated = demand.rows, self.allocated[demand.rows]
        # A row that is new here has no length yet: what lies before its first own token is not
        # its own, but the tree's.
        met = allocated == demand.starts + demand.counts
        self.allocated[rows] = np.where(met, demand.starts, np.maximum(allocated, demand.starts))

    def reserved(self) -> Tensor:
        """Return the slots of all rows that are reserved, int64, in row order."""
        counts = (self.held - self.allocated).clip(0)
        first = np.arange(counts.shape[0]) * self._width + self.allocated
        at = to_device(ragged(first, counts), self.table.device)
        return self._flat.index_select(0, at).long()

    def read(self, demand: Demand) -> Tensor:
        """Return int64 [sum(counts)]: the slots of the wanted positions, in request order."""
        first = demand.rows * self._width + demand.starts
        at = first if demand.kind is Kind.DECODE else ragged(first, demand.counts)
        return self._flat.index_select(0, to_device(at, self.table.device)).long()

    def give_back(self, row: int, length: int) -> Tensor:
        """Return a copy of the slots that the row holds from `length` on; it holds them no more."""
        end = int(self.held[row])
        slots = self.table[row, min(length, end) : end].long()
        self.held[row] = min(length, end)
        return slots

    def forget(self, row: int) -> None:
        """Note that the row is free."""
        self.held[row] = self.allocated[row] = 0
        self._loose[row] = -1

    def clear(self) -> None:
        """Note that every row is free."""
        self.held[:] = 0
        self.allocated[:] = 0
        self._loose[:] = -1
