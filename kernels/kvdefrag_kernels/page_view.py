"""View each request as aligned whole pages plus left-over slots."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._load import ceil_div, interpreted, need_device, programs
from .layout_stats import _check

BLOCK, WARPS, MERGE = 1024, 2, 256
INTERPRETED_BLOCK = 256


class PageView(NamedTuple):
    """Fixed buffers that `page_view` fills; make them once with `page_view_buffers`.

    `pages` int32 [n, most_pages]: page numbers (slot // page) in token order. `left` int32
    [n, most_left]: left-over slots in token order. `facts` int32 [n, 4]: pages written, left-overs
    written, overflow (1 if either list was too short: read this request token by token instead),
    tokens viewed. Past the counts the lists keep what they held.
    """

    pages: torch.Tensor
    left: torch.Tensor
    facts: torch.Tensor
    counts: torch.Tensor


def page_view_buffers(
    rows: int,
    longest: int,
    *,
    most_left: int = 2048,
    page: int = 64,
    device: torch.device | str,
) -> PageView:
    """Allocate for `rows` requests of up to `longest` tokens with `most_left` left-overs each."""
    segments = max(1, ceil_div(longest, _block() - 2 * page))

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    return PageView(
        zeros(rows, max(1, longest // page)),
        zeros(rows, most_left),
        zeros(rows, 4),
        zeros(rows, segments, 2),
    )


def page_view(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    view: PageView,
    *,
    page: int = 64,
) -> PageView:
    """Fill `view` for the requests in `rows`, each bounded by its length; returns `view`.

    Two launches, no synchronisation, capture-safe: lengths may live on the device alone. See
    `PageView` for the result and `layout_stats` for what an aligned page is.
    """
    _check(table, rows, lengths, page)
    need_device(table.device, "page_view_torch")
    count, segments = rows.numel(), int(view.counts.shape[1])
    if view.facts.shape[0] < count:
        raise ValueError(f"the view holds {view.facts.shape[0]} requests, got {count}")
    if not count:
        return view
    bound = min(int(table.shape[1]), segments * (_block() - 2 * page))
    kernels = programs("_runs")
    kernels.count_pages[(segments, count)](
        table, table.stride(0), bound, rows, lengths, segments,  # inputs
        view.counts,  # outputs
        PAGE=page, BLOCK=_block(), num_warps=WARPS,  # constants
    )  # fmt: skip
    kernels.write_pages[(segments, count)](
        table, table.stride(0), bound, rows, lengths, segments, view.counts,
        view.pages.shape[1], view.left.shape[1],  # inputs
        view.pages, view.left, view.facts,  # outputs
        PAGE=page, BLOCK=_block(), MERGE=MERGE, num_warps=WARPS,  # constants
    )  # fmt: skip
    return view


def page_view_torch(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    view: PageView,
    *,
    page: int = 64,
) -> PageView:
    """Reference of `page_view` in plain torch."""
    _check(table, rows, lengths, page)
    bound = min(int(table.shape[1]), int(view.counts.shape[1]) * (_block() - 2 * page))
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        slots = table[row, : max(0, min(length, bound))].tolist()
        pages: list[int] = []
        left: list[int] = []
        t = 0
        while t < len(slots):
            s = slots[t]
            whole = s >= page and s % page == 0 and slots[t : t + page] == [*range(s, s + page)]
            (pages if whole else left).append(s // page if whole else s)
            t += page if whole else 1
        for out, found in ((view.pages, pages), (view.left, left)):
            kept = found[: out.shape[1]]
            out[i, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        fits = len(pages) <= view.pages.shape[1] and len(left) <= view.left.shape[1]
        written = min(len(pages), view.pages.shape[1]), min(len(left), view.left.shape[1])
        facts = [*written, int(not fits), len(slots)]
        view.facts[i] = torch.tensor(facts, dtype=torch.int32)
    return view


def _block() -> int:
    return INTERPRETED_BLOCK if interpreted() else BLOCK
