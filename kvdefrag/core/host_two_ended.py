"""The two-ended free list for CPU tensors: page counts kept as slots come and go, no sort.

Gives slot for slot what `two_ended.TwoEndedFreeList` gives, at a cost that follows the number of
pages instead of the number of free slots. CPU only: it works in NumPy on the tensors' memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
_EMPTY: IntArray = np.empty(0, dtype=np.int64)


class HostTwoEndedFreeList:
    """Free slots in canonical order (see `two_ended`), for CPU tensors.

    Wrong frees are refused before they reach this list (`slot_checks`), so it never sees one.

    The order in force is a snapshot: loose slots at the head, whole pages, loose slots of a page
    broken from behind, partly used pages. Freed slots enter it at the next `reorder()`.

    Args:
        size: Slots 1..size.
        page: Slots to an aligned page, a power of two.
    """

    violated = False

    def __init__(self, size: int, *, page: int) -> None:
        self._page = page
        self._shift = page.bit_length() - 1
        self._steps = np.arange(page, dtype=np.int64)
        self._head = self._whole = self._tail = self._part = _EMPTY
        self._front_aligned = True
        self.clear(size)

    def clear(self, size: int) -> None:
        pages = size // self._page + 1
        self._free = np.zeros(pages * self._page, dtype=np.uint8)
        self._free[1 : size + 1] = 1
        self._count = self._free.reshape(pages, self._page).sum(1, dtype=np.int64)
        self._available = size
        self.reorder()

    @property
    def dirty(self) -> bool:
        """Whether a `reorder()` would help: slots came back, or the front is amid a page."""
        return self._available != self._ordered or self._substituted or not self._front_aligned

    @property
    def substituted(self) -> bool:
        """Whether the order must be renewed before anything is taken."""
        return self._substituted

    def available(self) -> int:
        return self._available

    def whole_pages(self) -> int:
        """Return how many whole free pages lie at the front."""
        aligned = self._front_aligned and not self._substituted
        return self._whole.shape[0] if aligned else 0

    def take_front(self, count: int) -> Tensor:
        self._ready(count)
        self._front_aligned = self._front_aligned and count % self._page == 0
        head, self._head = _cut(self._head, count)
        left = count - head.shape[0]
        pages, self._whole = _cut(self._whole, -(-left // self._page))
        whole = self._expand(pages)
        if whole.shape[0]:
            whole, self._head = _cut(whole, left)
        left -= whole.shape[0]
        tail, self._tail = _cut(self._tail, left)
        part, self._part = _cut(self._part, left - tail.shape[0])
        return self._remove([head, whole, tail, part], count)

    def take_back(self, count: int) -> Tensor:
        self._ready(count)
        self._part, part = _cut_back(self._part, count)
        left = count - part.shape[0]
        self._tail, tail = _cut_back(self._tail, left)
        left -= tail.shape[0]
        self._whole, pages = _cut_back(self._whole, -(-left // self._page))
        whole = self._expand(pages)
        if whole.shape[0]:
            self._tail, whole = _cut_back(whole, left)
        self._head, head = _cut_back(self._head, left - whole.shape[0])
        return self._remove([head, whole, tail, part], count)

    def put(self, slots: Tensor) -> None:
        freed = slots.numpy()
        self._free[freed] = 1
        np.add.at(self._count, freed >> self._shift, 1)
        self._available += freed.shape[0]

    def slots(self) -> Tensor:
        if self._substituted:
            return torch.from_numpy(np.flatnonzero(self._free))
        order = np.concatenate(
            [self._head, self._expand(self._whole), self._tail, self._part, self._waiting()]
        )
        return torch.from_numpy(order)

    def reorder(self) -> None:
        """Bring freed slots into canonical order."""
        used = np.flatnonzero(self._count)
        count = self._count[used]
        self._whole = used[count == self._page]
        part = used[count < self._page]
        # The narrowest type that holds a page's slots: NumPy sorts small integers by radix.
        taken = (self._page - self._count[part]).astype(np.min_scalar_type(self._page - 1))
        emptiest_first = np.argsort(taken, kind="stable")
        self._part = self._free_in(part[emptiest_first])
        self._head = self._tail = _EMPTY
        self._ordered = self._available
        self._substituted, self._front_aligned = False, True

    def free_per_page(self) -> Tensor:
        """Return int64 [pages]: free slots in each page, page 0 and the last page included."""
        return torch.from_numpy(self._count.copy())

    def front_pages(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first `count` candidate pages and which of them are whole.

        Returns:
            int64 [count, page] slots and bool [count]; what is not whole holds arbitrary slots.
        """
        have = min(count, self.whole_pages())
        pages = np.zeros((count, self._page), dtype=np.int64)
        pages[:have] = self._expand(self._whole[:have]).reshape(have, self._page)
        whole = np.arange(count) < have
        return torch.from_numpy(pages), torch.from_numpy(whole)

    def substitute_front(self, moved: Tensor, slots: Tensor) -> None:
        """Give `slots` back in place of those candidate pages that were used.

        Args:
            moved: bool [count], which pages of `front_pages(count)` are no longer free.
            slots: int64 [count, page], what became free instead.
        """
        used = moved.numpy()
        have = used.shape[0]
        taken = self._expand(self._whole[:have][used[: self._whole.shape[0]]])
        self.substitute(torch.from_numpy(taken), slots[moved].flatten())

    def substitute(self, taken: Tensor, given: Tensor) -> None:
        """Give `given` back in place of `taken`, pairwise; equal pairs change nothing.

        Args:
            taken: int64 [n], free slots that are no longer free.
            given: int64 [n], slots that became free instead.
        """
        real = taken.numpy() != given.numpy()
        old, new = taken.numpy()[real], given.numpy()[real]
        self._free[old] = 0
        np.subtract.at(self._count, old >> self._shift, 1)
        self._free[new] = 1
        np.add.at(self._count, new >> self._shift, 1)
        self._substituted = True

    def _ready(self, count: int) -> None:
        if self._substituted or count > self._ordered:
            self.reorder()

    def _remove(self, parts: list[IntArray], count: int) -> Tensor:
        filled = [part for part in parts if part.shape[0]]
        taken = filled[0] if len(filled) == 1 else np.concatenate([_EMPTY, *filled])
        self._free[taken] = 0
        np.subtract.at(self._count, taken >> self._shift, 1)
        self._available -= count
        self._ordered -= count
        return torch.from_numpy(taken)

    def _expand(self, pages: IntArray) -> IntArray:
        slots: IntArray = (pages[:, None] * self._page + self._steps).ravel()
        return slots

    def _free_in(self, pages: IntArray) -> IntArray:
        found = np.flatnonzero(self._free.reshape(-1, self._page)[pages])
        slots: IntArray = pages[found >> self._shift] * self._page + (found & (self._page - 1))
        return slots

    def _waiting(self) -> IntArray:
        # Free but not in the snapshot: in ascending order, which the next reorder changes anyway.
        waiting = self._free.copy()
        for held in (self._head, self._expand(self._whole), self._tail, self._part):
            waiting[held] = 0
        return np.flatnonzero(waiting)


def _cut(slots: IntArray, count: int) -> tuple[IntArray, IntArray]:
    return slots[:count], slots[count:]


def _cut_back(slots: IntArray, count: int) -> tuple[IntArray, IntArray]:
    at = max(0, slots.shape[0] - count)
    return slots[:at], slots[at:]
