"""Rewrite slot numbers through an `old -> new` look-up table, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._load import ceil_div, need_device, need_indices, programs

BLOCK, WARPS = 1024, 4
MAX_GRID = 65_535
_INDICES = (torch.int32, torch.int64)


def remap(
    lut: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    longest: int | None = None,
) -> None:
    """Replace `table[r, t]` by `lut[table[r, t]]` for `starts[i] <= t < ends[i]`, r = `rows[i]`.

    `lut` is int32 or int64 [slots], an identity but for the moved slots; `table` int32 or int64
    [requests, context]; `rows` (distinct), `starts` and `ends` int32 or int64 [n]. Entries outside
    the live range are neither read nor written; numbers outside `lut` stay as they are. `longest`
    bounds `ends - starts` from the host's knowledge and only saves idle programs.
    """
    _check_table(lut, table)
    for name, tensor in (("rows", rows), ("starts", starts), ("ends", ends)):
        need_indices(name, tensor, table.device)
    if not rows.numel() == starts.numel() == ends.numel():
        raise ValueError(f"{rows.numel()} rows, {starts.numel()} starts, {ends.numel()} ends")
    need_device(table.device, "remap_torch")
    columns = int(table.shape[1])
    blocks = ceil_div(columns if longest is None else min(longest, columns), BLOCK)
    if not blocks:
        return
    for first in range(0, rows.numel(), MAX_GRID):
        part = slice(first, first + MAX_GRID)
        programs("_remap").remap_rows[(blocks, rows[part].numel())](
            lut, lut.numel(), rows[part], starts[part], ends[part], columns, table.stride(0),
            table,  # in place
            BLOCK=BLOCK, num_warps=WARPS,  # constants
        )  # fmt: skip


def remap_torch(
    lut: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    longest: int | None = None,
) -> None:
    """Reference of `remap` in plain torch; `longest` is not needed and not used."""
    _check_table(lut, table)
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        live = table[row, max(start, 0) : max(end, 0)]
        live.copy_(_mapped(lut, live))


def remap_values(lut: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Replace every entry v of every tensor in `values` by `lut[v]`, in one launch.

    Values are contiguous int32 or int64 tensors on the device of `lut`, disjoint in memory. Their
    addresses travel in one small asynchronous copy. Numbers outside `lut` stay as they are.
    """
    _check_values(lut, values)
    held = [v for v in values if v.numel()]
    need_device(lut.device, "remap_values_torch")
    for first in range(0, len(held), MAX_GRID):
        part = held[first : first + MAX_GRID]
        facts = [[v.data_ptr(), v.numel(), v.element_size(), 0] for v in part]
        pinned = lut.device.type == "cuda"
        lines = torch.tensor(facts, dtype=torch.int64, pin_memory=pinned)
        programs("_remap").remap_values[(ceil_div(max(v.numel() for v in part), BLOCK), len(part))](
            lut, lut.numel(), lines.to(lut.device, non_blocking=True),  # inputs
            BLOCK=BLOCK, num_warps=WARPS,  # constants
        )  # fmt: skip


def remap_values_torch(lut: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Reference of `remap_values` in plain torch."""
    _check_values(lut, values)
    for value in values:
        value.copy_(_mapped(lut, value))


def _mapped(lut: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    known = (old >= 0) & (old < lut.numel())
    return torch.where(known, lut[torch.where(known, old, 0).long()].to(old.dtype), old)


def _check_table(lut: torch.Tensor, table: torch.Tensor) -> None:
    need_indices("lut", lut, table.device)
    if table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"table must be int32 or int64, got {table.dtype}")
    if table.ndim != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"table must be 2-D with contiguous rows, got strides {table.stride()}")


def _check_values(lut: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    need_indices("lut", lut, lut.device)
    device = lut.device
    for i, value in enumerate(values):
        # Said in one line for the common case: a tree hands over hundreds of values a step.
        if not (value.dtype in _INDICES and value.ndim == 1 and value.is_contiguous()):
            need_indices(f"values[{i}]", value, device)
        if value.device != device:
            raise ValueError(f"values[{i}] is on {value.device}, expected {device}")
