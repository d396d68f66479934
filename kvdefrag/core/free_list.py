"""Free lists: which slots are free, and in which order they are handed out."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor


class FreeList(Protocol):
    """Free slots in a definite order, taken from either end.

    `take_front` serves prompts, `take_back` decode and speculation; disciplines with one end
    serve both from it. Returned tensors are int64 and stay valid: nothing is ever written into
    storage that a returned tensor still names.
    """

    def available(self) -> int:
        """Return the number of free slots; a host integer, never read from the device."""
        ...

    def take_front(self, count: int) -> Tensor:
        """Remove and return `count <= available()` slots from the front."""
        ...

    def take_back(self, count: int) -> Tensor:
        """Remove and return `count <= available()` slots from the back, in list order."""
        ...

    def put(self, slots: Tensor) -> None:
        """Add slots; keeps no reference to the argument's storage."""
        ...

    def slots(self) -> Tensor:
        """Return a copy of all free slots in list order."""
        ...

    def clear(self, size: int) -> None:
        """Hold 1..size again."""
        ...


class FifoFreeList:
    """SGLang's default order: taken from the front, freed slots appended at the back.

    Kept as a queue of chunks, so that neither taking nor freeing touches the rest of the list.
    """

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._device = device
        self.clear(size)

    def clear(self, size: int) -> None:
        first = torch.arange(1, size + 1, dtype=torch.int64, device=self._device)
        self._chunks: deque[Tensor] = deque([first])
        self._count = size

    def available(self) -> int:
        return self._count

    def take_front(self, count: int) -> Tensor:
        self._count -= count
        return _pop_front(self._chunks, count, self._device)

    take_back = take_front

    def put(self, slots: Tensor) -> None:
        self._chunks.append(slots.clone())
        self._count += slots.shape[0]

    def slots(self) -> Tensor:
        return _cat(list(self._chunks), self._device).clone()


class SortedFreeList:
    """SGLang's `need_sort` order: freed slots wait aside and are sorted in on a shortage."""

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._device = device
        self.clear(size)

    def clear(self, size: int) -> None:
        self._ready = torch.arange(1, size + 1, dtype=torch.int64, device=self._device)
        self._released: list[Tensor] = []
        self._released_count = 0

    def available(self) -> int:
        return self._ready.shape[0] + self._released_count

    def take_front(self, count: int) -> Tensor:
        if count > self._ready.shape[0]:
            self._merge()
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    take_back = take_front

    def put(self, slots: Tensor) -> None:
        self._released.append(slots.clone())
        self._released_count += slots.shape[0]

    def slots(self) -> Tensor:
        return _cat([self._ready, *self._released], self._device).clone()

    def _merge(self) -> None:
        self._ready = _cat([self._ready, *self._released], self._device).sort().values
        self._released, self._released_count = [], 0


def _pop_front(chunks: deque[Tensor], count: int, device: torch.device) -> Tensor:
    parts: list[Tensor] = []
    while count > 0:
        head = chunks[0]
        if head.shape[0] <= count:
            parts.append(chunks.popleft())
            count -= head.shape[0]
        else:
            parts.append(head[:count])
            chunks[0] = head[count:]
            count = 0
    return _cat(parts, device)


def _cat(parts: list[Tensor], device: torch.device) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
