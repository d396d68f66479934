"""Refuses frees that would corrupt the pool: twice, slot 0, or out of range."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from kvdefrag.errors import SlotError

Checks = Literal["strict", "lenient", "off"]


class SlotChecks(Protocol):
    """Knows which slots are handed out."""

    violations: int

    def taken(self, slots: Tensor) -> None:
        """Note that `slots` were handed out."""
        ...

    def admit(self, slots: Tensor) -> Tensor:
        """Return those of `slots` that may be freed, noting them as free."""
        ...

    def moved(self, old: Tensor, new: Tensor) -> None:
        """Note that rows moved from `old` to `new`, pairwise; equal pairs change nothing."""
        ...

    def clear(self, size: int) -> None:
        """Forget everything: all slots 1..size are free."""
        ...


class NoChecks:
    """Admits everything."""

    def __init__(self) -> None:
        self.violations = 0

    def taken(self, slots: Tensor) -> None:
        pass

    def admit(self, slots: Tensor) -> Tensor:
        return slots

    def moved(self, old: Tensor, new: Tensor) -> None:
        pass

    def clear(self, size: int) -> None:
        pass


class HostChecks:
    """Checks every free of CPU tensors against a byte per slot.

    Args:
        size: Slots 1..size.
        strict: Raise `SlotError` naming the slots; otherwise count and ignore them.
    """

    def __init__(self, size: int, *, strict: bool) -> None:
        self._strict = strict
        self.violations = 0
        self.clear(size)

    def clear(self, size: int) -> None:
        self._size = size
        self._live = torch.zeros(size + 1, dtype=torch.bool).numpy()

    def taken(self, slots: Tensor) -> None:
        self._live[slots.numpy()] = True

    def moved(self, old: Tensor, new: Tensor) -> None:
        real = old.numpy() != new.numpy()
        self._live[old.numpy()[real]] = False
        self._live[new.numpy()[real]] = True

    def admit(self, slots: Tensor) -> Tensor:
        wanted = slots.numpy()
        inside = wanted.size == 0 or (int(wanted.min()) >= 1 and int(wanted.max()) <= self._size)
        if inside and self._live[wanted].all():
            self._live[wanted] = False
            # A slot named twice in one call: fewer bytes were cleared than slots were named.
            if wanted.size < 2 or torch.unique(slots).shape[0] == wanted.size:
                return slots
            self._live[wanted] = True
        return self._filter(slots)

    def _filter(self, slots: Tensor) -> Tensor:
        good = (slots >= 1) & (slots <= self._size)
        clipped = slots.clamp(0, self._size)
        good &= torch.from_numpy(self._live)[clipped]
        order = torch.sort(slots, stable=True)
        again = torch.zeros_like(good)
        again[order.indices[1:]] = order.values[1:] == order.values[:-1]
        good &= ~again
        bad = tuple(int(s) for s in slots[~good][:8])
        if self._strict:
            raise SlotError(
                f"slots {list(bad)} cannot be freed: each must be a live slot in 1..{self._size}, "
                f"named once",
                bad,
            )
        self.violations += int((~good).sum())
        kept = slots[good]
        self._live[kept.numpy()] = False
        return kept


def make_checks(size: int, mode: Checks, device: torch.device) -> SlotChecks:
    """Return the checks for `mode`; other devices than the CPU are checked at each reorder."""
    if mode == "off" or device.type != "cpu":
        return NoChecks()
    return HostChecks(size, strict=mode == "strict")
