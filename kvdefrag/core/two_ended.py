"""The two-ended free list on any device: prompts take whole pages, decode partly used ones.

Canonical order, front to back: pages by free slots, most first; then by page number; then by
slot. So whole free pages lie at the front, ascending, and the densest partly used pages at the
back. Taking is a slice from either end. Freed slots wait aside until `reorder()`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdefrag.core.readback import Readback

_MOST_NEWS = 64


class TwoEndedFreeList:
    """Free slots in canonical order, kept by one sort per `reorder()` and no host wait.

    Args:
        size: Slots 1..size.
        page: Slots to an aligned page, a power of two.
        device: Where the list lives.
        readback: Brings the number of whole pages back to the host, some steps late.

    Attributes:
        violated: Whether a slot was freed twice or out of range, as far as the host has heard.
    """

    def __init__(self, size: int, *, page: int, device: torch.device, readback: Readback) -> None:
        self._page = page
        self._device = device
        self._readback = readback
        self._epoch = 0
        self.clear(size)

    def clear(self, size: int) -> None:
        self._size = size
        self._pages = size // self._page + 1
        self.violation = torch.zeros((), dtype=torch.bool, device=self._device)
        self.violated = False
        self._order = torch.arange(1, size + 1, dtype=torch.int64, device=self._device)
        self._low, self._high = 0, size
        self._pending: list[Tensor] = []
        self._pending_count = 0
        self._substituted = True
        self._front_aligned = False
        self._epoch += 1
        # By order whose number of whole pages is still under way: what has become of later ones.
        self._since: dict[int, list[tuple[int, int]]] = {}
        # Page 0 holds the sink; the last page is whole only if its last slot is.
        self._whole_bound = max(0, (size + 1) // self._page - 1)
        self.reorder()

    @property
    def size(self) -> int:
        """Slots 1..size are the pool's."""
        return self._size

    @property
    def dirty(self) -> bool:
        """Whether a `reorder()` would help: slots came back, or the front is amid a page."""
        return self._pending_count > 0 or self._substituted or not self._front_aligned

    @property
    def substituted(self) -> bool:
        """Whether the order must be renewed before anything is taken."""
        return self._substituted

    def available(self) -> int:
        return self._high - self._low + self._pending_count

    def whole_pages(self) -> int:
        """Return how many whole free pages surely lie at the front: a lower bound."""
        return self._whole_bound if self._front_aligned and not self._substituted else 0

    def take_front(self, count: int) -> Tensor:
        self._ready(count)
        taken = self._order[self._low : self._low + count]
        self._low += count
        self._whole_bound = max(0, self._whole_bound - -(-count // self._page))
        self._front_aligned = self._front_aligned and count % self._page == 0
        return taken

    def take_back(self, count: int) -> Tensor:
        self._ready(count)
        taken = self._order[self._high - count : self._high]
        self._high -= count
        self._whole_bound = min(self._whole_bound, self._pages_left())
        return taken

    def put(self, slots: Tensor) -> None:
        self._pending.append(slots.clone())
        self._pending_count += slots.shape[0]

    def slots(self) -> Tensor:
        return torch.cat([self._order[self._low : self._high], *self._pending])

    def reorder(self) -> None:
        """Sort the list into canonical order; enqueues one sort and waits for nothing."""
        self._end_order()
        slots = self.slots()
        # A slot out of range would be a fault on the device: the sink stands in for it.
        slots = torch.where((slots < 1) | (slots > self._size), 0, slots)
        page_of = slots // self._page
        free = self.free_per_page(slots)
        span = self._pages * self._page
        key = (self._page - free[page_of]) * span + slots
        order = key.sort().values % span
        self.violation |= _broken(order)
        self._order, self._low, self._high = order, 0, order.shape[0]
        self._pending, self._pending_count = [], 0
        # Sorting freed slots in can only add whole pages, so the bound of before still holds.
        self._substituted, self._front_aligned = False, True
        self._epoch += 1
        epoch = self._epoch
        self._since[epoch] = []
        while len(self._since) > _MOST_NEWS:
            # News that whoever cleared the read-back will never hear.
            del self._since[next(iter(self._since))]
        self._readback.submit((free == self._page).sum(), lambda v: self._learn(epoch, v))
        self._readback.submit(self.violation, self._hear)

    def free_per_page(self, slots: Tensor | None = None) -> Tensor:
        """Return int64 [pages]: free slots in each page, page 0 and the last page included."""
        slots = self.slots() if slots is None else slots
        free = torch.zeros(self._pages, dtype=torch.int64, device=self._device)
        return free.scatter_add_(0, slots // self._page, torch.ones_like(slots))

    def front_pages(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first `count` candidate pages and which of them are whole.

        Returns:
            int64 [count, page] slots and bool [count]; what is not whole holds arbitrary slots.
        """
        have = min(count, (self._high - self._low) // self._page)
        shape = (count, self._page)
        pages = torch.zeros(shape, dtype=torch.int64, device=self._device)
        taken = self._order[self._low : self._low + have * self._page]
        pages[:have] = taken.view(have, self._page)
        steps = torch.arange(self._page, device=self._device)
        whole = (pages == pages[:, :1] + steps).all(1) & (pages[:, 0] % self._page == 0)
        return pages, whole & (pages[:, 0] > 0)

    def substitute_front(self, moved: Tensor, slots: Tensor) -> None:
        """Give `slots` back in place of those candidate pages that were used.

        Args:
            moved: bool [count], which pages of `front_pages(count)` are no longer free.
            slots: int64 [count, page], what became free instead.
        """
        self._end_order()
        have = min(moved.shape[0], (self._high - self._low) // self._page)
        span = slice(self._low, self._low + have * self._page)
        old = self._order[span].view(have, self._page)
        fresh = self._order.clone()
        fresh[span] = torch.where(moved[:have, None], slots[:have], old).flatten()
        self._order = fresh
        self._substituted = True
        self._whole_bound = max(0, self._whole_bound - have)
        self._note_loss(have, self._pages_left())

    def substitute(self, taken: Tensor, given: Tensor) -> None:
        """Give `given` back in place of `taken`, pairwise; equal pairs change nothing.

        Args:
            taken: int64 [n], free slots that are no longer free.
            given: int64 [n], slots that became free instead.
        """
        lut = torch.arange(self._pages * self._page, device=self._device)
        lut[taken] = given
        # Each slot taken may have broken another whole page; the next reorder says how many.
        self.replace(lut[self.slots()], pages=taken.shape[0])

    def replace(self, slots: Tensor, *, pages: int) -> None:
        """Hold these slots instead, as many as before; the order is renewed before any is taken.

        Args:
            slots: int64 [available()], kept as it is.
            pages: How many whole pages of before are broken now, at most.
        """
        self._end_order()
        self._order, self._low, self._high = slots, 0, slots.shape[0]
        self._pending, self._pending_count = [], 0
        self._substituted = True
        most = self._high // self._page
        self._whole_bound = max(0, self._whole_bound - min(pages, most))
        self._note_loss(min(pages, most), most)

    def _ready(self, count: int) -> None:
        if self._substituted or count > self._high - self._low:
            self.reorder()

    def _hear(self, violation: int) -> None:
        self.violated = self.violated or bool(violation)

    def _learn(self, epoch: int, whole: int) -> None:
        # The news are of an order that may be over: every later one has taken from the front or
        # broken some, and could not have more whole pages than were left in it. What was sorted
        # in meanwhile only adds to them.
        since = self._since.pop(epoch, None)
        if since is None:
            return
        for taken, left in since:
            whole = min(whole - taken, left)
        if not self._substituted:
            whole = min(whole - -(-self._low // self._page), self._pages_left())
        self._whole_bound = max(self._whole_bound, whole)

    def _end_order(self) -> None:
        if not self._substituted:
            self._note_loss(-(-self._low // self._page), self._pages_left())

    def _note_loss(self, pages: int, left: int) -> None:
        for since in self._since.values():
            since.append((pages, left))

    def _pages_left(self) -> int:
        # A page broken from the front is whole no more.
        broken = -self._low % self._page
        return max(0, self._high - self._low - broken) // self._page


def _broken(order: Tensor) -> Tensor:
    # Sorted by page and slot, so a slot that was freed twice has its twin beside it.
    twice = (order[1:] == order[:-1]).any()
    return twice | (order < 1).any()
