"""Metrics of the free slots: the one place where they are defined.

For free slots F in a pool of 1..size, pages of P slots and a wanted run of W slots:

    free            |F|
    whole pages     aligned pages (page 0 and a partial last page excluded) with all P slots free
    whole share     whole pages x P / free; 1 if nothing is free
    free runs       maximal stretches of neighbouring free slots
    largest run     longest of them
    fragmentation index for W, after Linux mm/vmstat.c `__fragmentation_index`, on the scale 0..1:
                    with r free runs and no run of W slots,
                    1 - (1 + free / W) / r, clamped to 0..1: towards 0 an allocation of W would
                    fail for want of slots, towards 1 because they are scattered; None if a run
                    of W exists (it would not fail); 0 if nothing is free
    unusable share for W, after Linux `unusable_index`: share of the free slots outside
                    runs' whole multiples of W; 0 if nothing is free
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FreeStats:
    """What the free slots are good for.

    Attributes:
        free, whole_pages, whole_share, runs, largest_run: As defined in this module.
        fragmentation_index: For the wanted run; None where such a run exists.
        unusable_share: For the wanted run.
    """

    free: int
    whole_pages: int
    whole_share: float
    runs: int
    largest_run: int
    fragmentation_index: float | None
    unusable_share: float


def free_stats(free: Tensor, size: int, *, page: int, wanted: int | None = None) -> FreeStats:
    """Return the metrics of free slots; waits for the device, so not for the serving path.

    Args:
        free: int64 [n], distinct slots in any order.
        size: Slots 1..size.
        page: Slots to an aligned page.
        wanted: Slots of the run that somebody wants; one page by default.
    """
    wanted = page if wanted is None else wanted
    slots = free.sort().values
    pages = size // page + 1
    per_page = torch.bincount(slots // page, minlength=pages)
    whole = int((per_page == page).sum())
    begins = torch.ones_like(slots, dtype=torch.bool)
    begins[1:] = slots[1:] != slots[:-1] + 1
    lengths = torch.bincount(begins.cumsum(0) - 1) if slots.numel() else slots
    count, runs = slots.shape[0], lengths.shape[0]
    largest = int(lengths.max()) if runs else 0
    usable = int((lengths // wanted * wanted).sum())
    return FreeStats(
        free=count,
        whole_pages=whole,
        whole_share=whole * page / count if count else 1.0,
        runs=runs,
        largest_run=largest,
        fragmentation_index=fragmentation_index(count, runs, largest, wanted),
        unusable_share=(count - usable) / count if count else 0.0,
    )


def fragmentation_index(free: int, runs: int, largest_run: int, wanted: int) -> float | None:
    """Return Linux' fragmentation index for a run of `wanted` slots (see this module)."""
    if largest_run >= wanted:
        return None
    if runs == 0:
        return 0.0
    return min(1.0, max(0.0, 1 - (1 + free / wanted) / runs))
