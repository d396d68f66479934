"""Makes the parts of an allocator from its settings."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvdefrag.core.free_list import FifoFreeList, FreeList, SortedFreeList
from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.core.readback import Readback
from kvdefrag.core.reservation import Reservations
from kvdefrag.core.two_ended import TwoEndedFreeList
from kvdefrag.errors import ConfigError

Discipline = Literal["fifo", "sorted", "two_ended"]
TwoEnded = TwoEndedFreeList | HostTwoEndedFreeList


def check_page(page: int) -> None:
    """Raise `ConfigError` unless `page` is a power of two, 2 or more."""
    if page < 2 or page & (page - 1):
        raise ConfigError(f"page: {page} is not allowed; it must be a power of two, 2 or more")


def make_free_list(
    size: int, discipline: Discipline, page: int, device: torch.device, readback: Readback | None
) -> FreeList:
    """Return the free list of a discipline, holding 1..size; incremental on the CPU."""
    if discipline == "fifo":
        return FifoFreeList(size, device=device)
    if discipline == "sorted":
        return SortedFreeList(size, device=device)
    if device.type == "cpu" and readback is None:
        return HostTwoEndedFreeList(size, page=page)
    return TwoEndedFreeList(size, page=page, device=device, readback=readback or Readback(0))


def make_reservations(
    table: Tensor | None, page: int, reservation: bool, discipline: Discipline
) -> Reservations | None:
    """Return the book of reserved slots, or None without reservation.

    Raises:
        ConfigError: Reservation lacks a table, or a list with two ends.
    """
    if not reservation:
        return None
    if table is None or discipline != "two_ended":
        raise ConfigError(
            f"placement.reservation: true needs the engine's table and placement.free_list "
            f"two_ended, not {discipline}"
        )
    return Reservations(table, page)


def two_ended_only(free_list: FreeList) -> TwoEnded | None:
    """Return the list if it has two ends, else None."""
    if isinstance(free_list, TwoEndedFreeList | HostTwoEndedFreeList):
        return free_list
    return None
