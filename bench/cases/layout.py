"""Statistics of the layout, and the view as pages, of many requests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from measure import Entry, Run

from kvdefrag_kernels import (
    layout_stats,
    layout_stats_torch,
    page_view,
    page_view_buffers,
    stats_space,
)


def entries() -> Iterator[Entry]:
    """Rows of runs of 64 to 300 slots, half of them starting at a page border."""
    for rows, length in ((256, 8192), (64, 131_072), (1, 131_072)):
        params = {"rows": rows, "length": length}
        made = Inputs(rows, length)
        read = rows * length * 4
        yield Entry("layout_stats", params, "kvdefrag", read, made.stats, made.check, host=True)
        yield Entry("layout_stats", params, "torch_breaks", read, made.breaks)
        yield Entry("page_view", params, "kvdefrag", 2 * read, made.view, host=True)


class Inputs:
    """A table whose rows are runs of random lengths at random places."""

    def __init__(self, rows: int, length: int) -> None:
        random = torch.Generator().manual_seed(length)
        sizes = torch.randint(64, 300, (rows * length // 64,), generator=random)
        firsts = torch.randint(64, 1 << 21, sizes.shape, generator=random)
        firsts = torch.where(torch.rand(sizes.shape, generator=random) < 0.5, firsts & ~63, firsts)
        ends = sizes.cumsum(0)
        slots = torch.arange(rows * length)
        run = torch.searchsorted(ends, slots, right=True)
        slots = firsts[run] + slots - (ends - sizes)[run]
        self.table = slots.view(rows, length).int().cuda()
        self.rows = torch.arange(rows, device="cuda")
        self.lengths = torch.full((rows,), length, device="cuda")
        self.length = length
        self.out = torch.empty(rows, 4, dtype=torch.int32, pin_memory=True)

    def stats(self) -> Run:
        """One launch, which writes to pinned host memory."""
        space = stats_space(self.rows.numel(), self.length, device="cuda")
        return lambda: layout_stats(self.table, self.rows, self.lengths, space=space, out=self.out)

    def check(self) -> None:
        """Raise unless the statistics are those of the reference."""
        expected = layout_stats_torch(self.table.cpu(), self.rows.cpu(), self.lengths.cpu())
        if not torch.equal(self.out, expected):
            raise AssertionError("wrong statistics")

    def breaks(self) -> Run:
        """Only the run breaks, in plain torch."""
        return lambda: (self.table[:, 1:] != self.table[:, :-1] + 1).sum(1)

    def view(self) -> Run:
        """Two launches into fixed buffers."""
        view = page_view_buffers(
            self.rows.numel(), self.length, most_left=self.length, device="cuda"
        )
        return lambda: page_view(self.table, self.rows, self.lengths, view)
