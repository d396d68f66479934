"""Measure how each request's tokens lie in the pool."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._load import ceil_div, interpreted, need_device, need_indices, programs

BLOCK, WARPS, MERGE = 512, 2, 256
# The interpreter walks scans element by element: shorter blocks, same code.
INTERPRETED_BLOCK = 256


class StatsSpace(NamedTuple):
    """Scratch of `layout_stats`, made once: parts int32 [rows, segments, 8], tickets [rows]."""

    parts: torch.Tensor
    tickets: torch.Tensor


def stats_space(
    rows: int, longest: int, *, page: int = 64, device: torch.device | str
) -> StatsSpace:
    """Allocate scratch for up to `rows` requests of up to `longest` tokens."""
    segments = max(1, ceil_div(longest, _block() - page))
    parts = torch.empty(rows, segments, 8, dtype=torch.int32, device=device)
    return StatsSpace(parts, torch.zeros(rows, dtype=torch.int32, device=device))


def layout_stats(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page: int = 64,
    longest: int | None = None,
    space: StatsSpace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return int32 [n, 4]: runs, longest run, tokens in aligned pages, tokens left over.

    `table` is int32 or int64 [requests, context], `rows` and `lengths` int32 or int64 [n]. A run is
    a maximal stretch of tokens whose slots rise by 1; an aligned page is `page` (a power of two)
    tokens of one run that fill slots [k * page, (k + 1) * page), k >= 1. Entries at or past a
    length are not read. `longest` bounds the lengths and saves idle programs. `out` may be pinned
    host memory, which the one launch writes itself: record an event to know when it is there.
    `space` (from `stats_space`) serves one launch at a time.
    """
    _check(table, rows, lengths, page)
    need_device(table.device, "layout_stats_torch")
    columns, count = int(table.shape[1]), rows.numel()
    bound = columns if longest is None else min(longest, columns)
    if space is None:
        space = stats_space(count, bound, page=page, device=table.device)
    segments = max(1, ceil_div(bound, _block() - page))
    if space.parts.shape[0] < count or space.parts.shape[1] < segments:
        raise ValueError(f"space holds {tuple(space.parts.shape)}, needs {(count, segments, 8)}")
    if out is None:
        out = torch.empty(count, 4, dtype=torch.int32, device=table.device)
    if out.shape != (count, 4) or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous int32 {(count, 4)}, got {tuple(out.shape)}")
    if out.device != table.device and not out.is_pinned():
        raise ValueError("out must be on the table's device or in pinned host memory")
    if count:
        programs("_runs").layout_stats[(segments, count)](
            table, table.stride(0), bound, rows, lengths, space.parts.shape[1],  # inputs
            space.parts, space.tickets,  # scratch
            out,  # outputs
            PAGE=page, BLOCK=_block(), MERGE=MERGE, num_warps=WARPS,  # constants
        )  # fmt: skip
    return out


def layout_stats_torch(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page: int = 64,
    longest: int | None = None,
) -> torch.Tensor:
    """Reference of `layout_stats` in plain torch."""
    _check(table, rows, lengths, page)
    bound = int(table.shape[1]) if longest is None else min(longest, int(table.shape[1]))
    out = torch.zeros(rows.numel(), 4, dtype=torch.int32, device=table.device)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        slots = table[row, : max(0, min(length, bound))].long()
        if not slots.numel():
            continue
        opens = torch.ones_like(slots, dtype=torch.bool)
        opens[1:] = slots[1:] != slots[:-1] + 1
        edges = torch.cat([opens.nonzero().flatten(), slots.new_tensor([slots.numel()])])
        sizes = edges.diff()
        first = slots[edges[:-1]]
        head = torch.clamp((first + page - 1) // page, min=1)
        covered = (torch.clamp((first + sizes) // page - head, min=0) * page).sum()
        stats = [sizes.numel(), int(sizes.max()), int(covered), slots.numel() - int(covered)]
        out[i] = torch.tensor(stats, dtype=torch.int32)
    return out


def _block() -> int:
    return INTERPRETED_BLOCK if interpreted() else BLOCK


def _check(table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, page: int) -> None:
    if table.ndim != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"table must be 2-D with contiguous rows, got strides {table.stride()}")
    need_indices("rows", rows, table.device)
    need_indices("lengths", lengths, table.device)
    if rows.numel() != lengths.numel():
        raise ValueError(f"{rows.numel()} rows, {lengths.numel()} lengths")
    if page < 2 or page & (page - 1) or page * 4 > _block():
        raise ValueError(f"page must be a power of two in 2..{_block() // 4}, got {page}")
