"""Page occupancy and order of the free list, on the list's own device, without synchronising.

Plain torch: at 4 million slots these take well under a millisecond on a GPU (bench/README.md).
"""

from __future__ import annotations

import torch


def page_free_counts(free: torch.Tensor, size: int, *, page: int = 64) -> torch.Tensor:
    """Count the free slots of each page: int32 [size // page + 1] for slots 1..size."""
    counts = torch.zeros(size // page + 1, dtype=torch.int32, device=free.device)
    index = free.div(page, rounding_mode="floor").long()
    return counts.scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))


def order_free_list(free: torch.Tensor, size: int, *, page: int = 64) -> torch.Tensor:
    """Return the list with slots of partly used pages first, then whole free pages, each ascending.

    `free` int32 or int64 [n], distinct slots of 1..size with 2 * size under 2^31; the result is a
    new tensor of the same dtype. Page 0, which holds the sink, and a partial last page are never
    whole.
    """
    counts = page_free_counts(free, size, page=page)
    whole = (counts == page)[free.div(page, rounding_mode="floor").long()]
    # 32-bit keys halve the sort; the offset keeps whole pages behind all others.
    keys = free.int() + whole.int() * (size + 1)
    ordered = keys.sort().values
    return torch.where(ordered > size, ordered - (size + 1), ordered).to(free.dtype)


def substitute(free: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
    """Put `slots` into the list at `positions`, in place; the list keeps its length."""
    free.index_copy_(0, positions.long(), slots.to(free.dtype))
