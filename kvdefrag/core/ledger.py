"""Keeps account of slots between two owners, so that a fault there loses none."""

from __future__ import annotations

from torch import Tensor

from kvdefrag.core.demand import Demand


class Ledger:
    """Slots that have left the free list or a row, and are not with their next owner yet.

    Attributes:
        demand: Who asked for the latest allocation, None if nobody is known.
    """

    def __init__(self) -> None:
        self.demand: Demand | None = None
        self._latest: list[Tensor] = []
        self._adrift: list[Tensor] = []

    def begin(self, demand: Demand | None = None) -> None:
        """Note that an allocation begins: whatever was handed out before has its owner."""
        self.demand = demand
        self._latest.clear()

    def take(self, slots: Tensor) -> Tensor:
        """Note that the allocation under way took `slots` from the free list, and return them."""
        self._latest.append(slots)
        return slots

    def withdraw(self) -> None:
        """Note that the latest allocation never reached who asked for it."""
        self._adrift += self._latest
        self.begin()

    def leave(self, slots: Tensor) -> None:
        """Note that a row gave `slots` up; call `arrive` once the free list has them."""
        self._adrift.append(slots)

    def arrive(self) -> None:
        """Note that what was given up last is free."""
        self._adrift.pop()

    def adrift(self) -> list[Tensor]:
        """Return what a fault kept from its next owner; the free list may have it all the same."""
        return list(self._adrift)

    def clear(self) -> None:
        """Forget everything: all slots are free."""
        self._adrift.clear()
        self.begin()
