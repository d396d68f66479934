"""Gives slots that rows hold in reserve back to the free list."""

from __future__ import annotations

from kvdefrag.core.demand import Demand
from kvdefrag.core.free_list import FreeList
from kvdefrag.core.ledger import Ledger
from kvdefrag.core.reservation import Reservations
from kvdefrag.core.slot_checks import SlotChecks


class Giving:
    """Takes from rows what they hold beyond their need.

    Args:
        book: What each row holds.
        free_list: Where the slots go.
        checks: Admits them.
        ledger: Knows of them in between.
    """

    def __init__(
        self, book: Reservations, free_list: FreeList, checks: SlotChecks, ledger: Ledger
    ) -> None:
        self._book, self._free_list = book, free_list
        self._checks, self._ledger = checks, ledger

    def make_room(self, count: int, demand: Demand | None = None) -> bool:
        """Give back until `count` slots are free, and no more; say whether they are.

        Rows of `demand` keep what it asks for.
        """
        book = self._book
        keep = book.allocated.copy()
        if demand is not None:
            keep[demand.rows] = demand.starts + demand.counts
        for row in book.givers(keep):
            if count <= self._free_list.available():
                break
            self._give_back(int(row), int(keep[row]))
        return count <= self._free_list.available()

    def part_with_estranged(self, demand: Demand) -> None:
        """Take everything in reserve from rows whose length the engine has changed by itself."""
        for row in self._book.estranged(demand):
            self._give_back(int(row), int(self._book.allocated[row]))
            self._book.forget(int(row))

    def _give_back(self, row: int, length: int) -> None:
        slots = self._book.give_back(row, length)
        self._ledger.leave(slots)
        self._free_list.put(self._checks.admit(slots))
        self._ledger.arrive()
