"""Has the engine evict before an allocation: for the slots first, then for whole pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvdefrag.core.demand import Demand, IntArray, Kind
from kvdefrag.core.reservation import Reservations

if TYPE_CHECKING:
    from kvdefrag.core.allocator import SlotAllocator

_ROUNDS = 4


class Wants(NamedTuple):
    """What a demand would like to find free; with less it is still served if the slots suffice.

    Attributes:
        slots: Free slots, whole pages included.
        pages: Whole free pages among them.
    """

    slots: int
    pages: int


def wants(allocator: SlotAllocator, demand: Demand) -> Wants:
    """Return what `allocator` would like to find free before it serves `demand`."""
    page, book = allocator.page, allocator.reservations
    if book is not None:
        return _reserving(book, demand, page, whole_groups=allocator.whole_groups)
    if allocator.two_ended is not None and demand.kind is Kind.EXTEND:
        pages = int((-(-demand.counts // page)).sum())
        return Wants(pages * page, pages)
    return Wants(demand.total, 0)


def make_room(allocator: SlotAllocator, demand: Demand, evict_until: Callable[[int], None]) -> None:
    """Evict until the slots of `demand` are free, and then on while whole pages are short.

    A pool full of cached text holds its free slots where single requests left them, so that
    room for the tokens is not yet room for a page. With `allocator.evict_for_pages` cached
    prefixes then go a little before their time; it ends as soon as evicting gains no page.

    Args:
        allocator: Is to serve `demand` next.
        demand: Who wants slots.
        evict_until: Evicts until so many slots are free, as far as that goes.
    """
    wanted = wants(allocator, demand)
    if wanted.slots > allocator.available_size():
        evict_until(wanted.slots)
    pages = allocator.two_ended if allocator.evict_for_pages else None
    if pages is None or pages.whole_pages() >= wanted.pages:
        return
    for _ in range(_ROUNDS):
        free, whole = allocator.available_size(), allocator.count_whole_pages()
        if whole < wanted.pages:
            evict_until(free + (wanted.pages - whole) * allocator.page)
        if allocator.available_size() == free or allocator.count_whole_pages() == whole:
            return


def _reserving(book: Reservations, demand: Demand, page: int, *, whole_groups: bool) -> Wants:
    lack = book.lacking(demand)
    if not lack.any():
        return Wants(0, 0)
    pages = pages_wanted(book, demand, lack, whole_groups=whole_groups)
    return Wants(int(np.maximum(pages * page, lack).sum()), int(pages.sum()))


def pages_wanted(
    book: Reservations, demand: Demand, lack: IntArray, *, whole_groups: bool
) -> IntArray:
    """Return int64 [n]: whole pages that cover each request's lack, 0 where none is of use."""
    starts = demand.starts + demand.counts - lack
    pages = book.pages_for(starts, lack)
    if whole_groups and demand.kind is not Kind.EXTEND:
        pages[book.mid_group(demand.rows, starts)] = 0
    return pages
