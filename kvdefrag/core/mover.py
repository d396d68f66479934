"""Movers copy rows of every buffer; the reference does it in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvdefrag.core.plan import MovePlan


class Mover(Protocol):
    """Copies the rows of a plan in every buffer that shares the slot numbers."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot over all buffers."""
        ...

    def copy(self, plan: MovePlan) -> Tensor | None:
        """Copy `src` rows to `dst` rows; destinations are free, so no live byte changes.

        An exception leaves every live row as it was: the caller drops the plan.

        Returns:
            None, or a bool scalar on the device: whether the mover refused the plan and copied
            nothing, which the host must not wait for.
        """
        ...


class TorchMover:
    """The reference mover: one gather and one scatter a buffer.

    Args:
        buffers: Tensors whose first dimension is the slot, any dtype and row shape.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = list(buffers)
        self._row_bytes = row_bytes(buffers)

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    def copy(self, plan: MovePlan) -> Tensor | None:
        for buffer in self._buffers:
            buffer[plan.dst] = buffer[plan.src]
        return None


def row_bytes(buffers: Sequence[Tensor]) -> int:
    """Return the bytes of one slot over all buffers, whose first dimension is the slot."""
    return sum(b[:1].numel() * b.element_size() for b in buffers)


class CountingMover:
    """Moves nothing: for models of an engine whose rows have no content.

    Args:
        row_bytes: Bytes of one slot over all buffers.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    def copy(self, plan: MovePlan) -> Tensor | None:
        return None
