"""Layout metrics of slot sequences: the one place where they are defined.

For a request with slots `s[0..n)` in token order and pages of P slots:

    run             maximal stretch with s[i + 1] == s[i] + 1; descending slots are runs of one
    runs            number of runs; 0 for an empty request
    mean run        n / runs, 0 for an empty request
    longest run     length of the longest run
    aligned page    P consecutive tokens with slots kP, kP + 1, ..., kP + P - 1, k >= 1
    page coverage   share of the tokens that lie in aligned pages; 1 for an empty request
    left-over       tokens outside aligned pages
    regions         distinct 2 MiB stretches of one layer's buffer that hold a row of the request
    descriptors     runs x buffers: what a transfer engine that merges neighbours would post
    contiguous      runs <= 1

Page k = 0 holds the sink and is never an aligned page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_SIZES = (16, 32, 64, 128)
REGION_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class LayoutStats:
    """Layout of several requests.

    Attributes:
        tokens, runs, longest_run: int64 [n].
        covered: Tokens in aligned pages, int64 [n] by page size.
    """

    tokens: Tensor
    runs: Tensor
    longest_run: Tensor
    covered: dict[int, Tensor]

    @property
    def mean_run(self) -> Tensor:
        """Tokens per run, float64 [n]; 0 for an empty request."""
        return self.tokens.double() / self.runs.clamp(min=1)

    @property
    def contiguous(self) -> Tensor:
        """Whether each request is one run, bool [n]."""
        return self.runs <= 1

    def coverage(self, page: int) -> Tensor:
        """Return the share of tokens in aligned pages, float64 [n]; 1 for an empty request."""
        share = self.covered[page].double() / self.tokens.clamp(min=1)
        return torch.where(self.tokens > 0, share, torch.ones_like(share))

    def left_over(self, page: int) -> Tensor:
        """Return the tokens outside aligned pages, int64 [n]."""
        return self.tokens - self.covered[page]

    def descriptors(self, buffers: int) -> Tensor:
        """Return transfer descriptors of each request over `buffers` buffers, int64 [n]."""
        return self.runs * buffers


def layout_stats(
    table: Tensor, rows: Tensor, lengths: Tensor, *, page_sizes: Sequence[int] = PAGE_SIZES
) -> LayoutStats:
    """Return the layout of the requests in `table[rows, :lengths]`.

    Args:
        table: int32 or int64 [rows, width] of slots.
        rows: int64 [n].
        lengths: int64 [n], tokens of each request; entries beyond are not read into any figure.
        page_sizes: Powers of two.
    """
    width = int(lengths.max()) if lengths.numel() else 0
    slots = table[rows, :width].long()
    return slot_stats(slots, lengths, page_sizes=page_sizes)


def slot_stats(
    slots: Tensor, lengths: Tensor, *, page_sizes: Sequence[int] = PAGE_SIZES
) -> LayoutStats:
    """Return the layout of slot sequences padded to one width.

    Args:
        slots: int64 [n, width].
        lengths: int64 [n], each at most `width`.
        page_sizes: Powers of two.
    """
    width = slots.shape[1]
    at = torch.arange(width, device=slots.device)
    live = at < lengths[:, None]
    starts = live.clone()
    starts[:, 1:] &= slots[:, 1:] != slots[:, :-1] + 1
    # Where the run of each token began: the largest start at or before it.
    began = torch.where(starts, at, 0).cummax(1).values if width else slots
    length = torch.where(live, at - began + 1, 0)
    longest = length.max(1).values if width else torch.zeros_like(lengths)
    covered = {p: _covered(slots, length, live, p) for p in page_sizes}
    return LayoutStats(lengths.clone(), starts.sum(1), longest, covered)


def regions(slots: Tensor, row_bytes: int, *, region_bytes: int = REGION_BYTES) -> int:
    """Return how many distinct stretches of `region_bytes` of a layer's buffer `slots` touch.

    Args:
        slots: int64 [n].
        row_bytes: Bytes of one slot in the buffer.
    """
    first = slots * row_bytes // region_bytes
    last = (slots * row_bytes + row_bytes - 1) // region_bytes
    return int(torch.unique(torch.cat([first, last])).shape[0])


def _covered(slots: Tensor, run_length: Tensor, live: Tensor, page: int) -> Tensor:
    # A token closes an aligned page if its slot is the page's last and its run reaches back
    # over the whole page.
    closes = live & (slots % page == page - 1) & (run_length >= page) & (slots >= page)
    return closes.sum(1) * page
