"""Statistics and page views of requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kvdefrag_kernels as kernels
from kvdefrag.gpu.where import launches


@dataclass(frozen=True)
class RowStats:
    """Layout of requests, as `kvdefrag.core.layout` defines it.

    Attributes:
        values: int32 [n, 4]: runs, longest run, tokens in aligned pages, tokens left over.
    """

    values: Tensor

    @property
    def runs(self) -> Tensor:
        """Runs of each request."""
        return self.values[:, 0]

    @property
    def longest_run(self) -> Tensor:
        """Tokens of each request's longest run."""
        return self.values[:, 1]

    @property
    def covered(self) -> Tensor:
        """Tokens of each request in aligned pages."""
        return self.values[:, 2]

    @property
    def left_over(self) -> Tensor:
        """Tokens of each request outside aligned pages."""
        return self.values[:, 3]


class DeviceStats:
    """Measures the layout of up to `rows` requests; on a GPU in one launch, without waiting.

    Args:
        rows: Requests at most.
        longest: Tokens of a request at most.
        page: Tokens to a page.
        device: Where the table is.
    """

    def __init__(self, rows: int, longest: int, *, page: int, device: torch.device) -> None:
        self._page, self._longest = page, longest
        self._space = None
        if launches(device):
            self._space = kernels.stats_space(rows, longest, page=page, device=device)

    def measure(self, table: Tensor, rows: Tensor, lengths: Tensor) -> RowStats:
        """Return the statistics; on a GPU in pinned host memory, valid once the stream is past."""
        if self._space is None:
            values = kernels.layout_stats_torch(table, rows, lengths, page=self._page)
            return RowStats(values)
        # Fresh each time: a reused buffer could be overwritten before it was read.
        host = torch.empty(rows.numel(), 4, dtype=torch.int32, pin_memory=True)
        kernels.layout_stats(
            table,
            rows,
            lengths,
            page=self._page,
            longest=self._longest,
            space=self._space,
            out=host,
        )
        return RowStats(host)


class DevicePageView:
    """Views requests as aligned pages plus left-over slots, in fixed buffers.

    Args:
        rows: Requests at most.
        longest: Tokens of a request at most.
        most_left: Left-over slots of a request at most; more set its overflow flag.
        page: Tokens to a page.
        device: Where the table is.
    """

    def __init__(
        self, rows: int, longest: int, *, most_left: int, page: int, device: torch.device
    ) -> None:
        self._page = page
        self.view = kernels.page_view_buffers(
            rows, longest, most_left=most_left, page=page, device=device
        )

    def fill(self, table: Tensor, rows: Tensor, lengths: Tensor) -> kernels.PageView:
        """Fill and return the view; capture-safe on a GPU."""
        fill = kernels.page_view if launches(table.device) else kernels.page_view_torch
        return fill(table, rows, lengths, self.view, page=self._page)
