"""Slots on their way to the host: copied now, waited for by somebody who may wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvdefrag.core.demand import IntArray


def wait_for(device: torch.device) -> None:
    """Wait until everything enqueued on the current stream is done."""
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()


class Late:
    """A host copy of slots as they are at this moment; making it waits for nothing.

    Args:
        slots: int32 or int64 [n], on any device.
    """

    def __init__(self, slots: Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if slots.device.type == "cpu":
            self._host = slots.clone()
            return
        # Fresh each time: a reused buffer could be overwritten before it was read.
        self._host = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True)
        self._host.copy_(slots, non_blocking=True)
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record()

    def wait(self) -> IntArray:
        """Return the slots, int64 [n]; waits for the device."""
        if self._there is not None:
            self._there.synchronize()
        slots: IntArray = self._host.long().numpy()
        return slots


class LateParts:
    """Several of them, one behind the other."""

    def __init__(self, parts: Sequence[Late]) -> None:
        self._parts = tuple(parts)

    def wait(self) -> IntArray:
        """Return the slots, int64 [n]; waits for the device."""
        return np.concatenate([part.wait() for part in self._parts])
