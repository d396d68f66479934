"""Holders whose slots are rewritten in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import kvdefrag_kernels as kernels
from kvdefrag.gpu.where import launches


class DeviceTableRows:
    """A holder: table rows within their live ranges, rewritten in place.

    Args:
        table: int32 or int64 [requests, width].
        rows: Distinct rows, int64 [n] on the table's device.
        starts, ends: Live range of each, int64 [n] on the table's device.
        longest: Tokens of a range at most, if the host knows.
    """

    def __init__(
        self, table: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, *, longest: int | None
    ) -> None:
        self._table, self._longest = table, longest
        self._ranges = rows, starts, ends

    def remap(self, lut: Tensor) -> None:
        """Replace every live slot s by `lut[s]`."""
        remap = kernels.remap if launches(self._table.device) else kernels.remap_torch
        remap(lut, self._table, *self._ranges, longest=self._longest)


class DeviceValues:
    """A holder: slot tensors that others keep, rewritten in place in one launch.

    Args:
        values: Contiguous int32 or int64 tensors; no two share storage.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = tuple(values)

    def remap(self, lut: Tensor) -> None:
        """Replace every slot s by `lut[s]`."""
        remap = kernels.remap_values if launches(lut.device) else kernels.remap_values_torch
        remap(lut, self._values)
