"""Holders: everything that stores slot numbers and must follow a move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvdefrag.core.view import EngineView, IntArray, to_device


class Holder(Protocol):
    """Stores slot numbers."""

    def remap(self, lut: Tensor) -> None:
        """Replace every slot s that is stored by `lut[s]`, in place.

        Args:
            lut: int64 [size + 1]; slots that stay map to themselves.
        """
        ...


class TableRows:
    """The live part of table rows: `table[row, :length]`, nothing beyond it.

    Args:
        table: int32 [rows, width].
        rows, lengths: int64 [n], on the host.
    """

    def __init__(self, table: Tensor, rows: IntArray, lengths: IntArray) -> None:
        self._table = table
        self._at = range_index(table, rows, lengths * 0, lengths)

    def remap(self, lut: Tensor) -> None:
        flat = self._table.view(-1)
        flat[self._at] = lut[flat[self._at].long()].to(flat.dtype)


class ValueTensors:
    """Slot tensors that others keep, such as the values of prefix tree nodes.

    Args:
        values: int64 or int32 tensors, rewritten in place; no two share storage.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self.values = list(values)

    def remap(self, lut: Tensor) -> None:
        for value in self.values:
            value.copy_(lut[value.long()])


def remap_all(holders: Sequence[Holder], lut: Tensor, inverse: Tensor) -> None:
    """Remap every holder or none.

    Destinations are free slots that no holder names, so the inverse undoes a holder that was
    rewritten in part as well as one that was rewritten whole.

    Args:
        holders: All that name a moved slot.
        lut: int64 [size + 1], old to new.
        inverse: int64 [size + 1], new to old.
    """
    begun: list[Holder] = []
    try:
        for holder in holders:
            begun.append(holder)
            holder.remap(lut)
    except BaseException:
        for holder in reversed(begun):
            holder.remap(inverse)
        raise


def live_lengths(view: EngineView, held: IntArray | None = None) -> IntArray:
    """Return int64 [n]: how far each live row holds slots.

    Args:
        view: The running requests.
        held: int64 [rows of the table], reserved slots included; by default what is allocated.
    """
    return view.allocated if held is None else held[view.rows].clip(view.allocated)


def live_rows(view: EngineView, held: IntArray | None = None) -> TableRows:
    """Return the holder of all live rows, as far as they hold slots."""
    return TableRows(view.table, view.rows, live_lengths(view, held))


def range_index(table: Tensor, rows: IntArray, starts: IntArray, ends: IntArray) -> Tensor:
    """Return flat indices of `table[rows, starts:ends]`, concatenated, int64 on the table's device.

    The number of indices is known on the host, so nothing waits for the device.
    """
    counts = (ends - starts).clip(0)
    total = int(counts.sum())
    device = table.device
    base = to_device(rows * table.shape[1] + starts - (counts.cumsum() - counts), device)
    of = torch.arange(rows.shape[0], device=device)
    of = of.repeat_interleave(to_device(counts, device), output_size=total)
    return base[of] + torch.arange(total, device=device)
