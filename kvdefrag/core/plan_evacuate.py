"""Evacuation: move the few live rows of the sparsest pages into holes of denser ones.

After Linux' compaction (mm/compaction.c): one scanner finds rows to migrate, one finds free
slots, page by page. Here both are one sort each, and the pages are chosen by how little is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.plan import MovePlan


def plan_evacuation(
    movable: Tensor, free_list: TwoEnded, *, page: int, max_pages: int, max_live: int
) -> MovePlan:
    """Plan to empty up to `max_pages` pages.

    A page is a victim only if every live row in it is movable and at most `max_live` are; of the
    partly used pages the sparser half at most. Its rows move together or not at all.

    Args:
        movable: int64 [n], slots whose holders are all known, each named once.
        free_list: The free slots, in canonical order.
        page: Slots to a page.
        max_pages: Pages at most.
        max_live: Live rows at most in a victim.

    Returns:
        A plan of `max_pages * max_live` pairs, those that move first.
    """
    device, rows = movable.device, max_pages * max_live
    slots = free_list.slots()
    free = free_list.free_per_page()
    victims, chosen = _victims(movable, free, page, max_pages, max_live)
    is_free = _mask(slots, free.shape[0] * page)
    holes = _holes(slots, free, victims, chosen, page, rows)
    members = victims[:, None] * page + torch.arange(page, device=device)
    live = chosen[:, None] & ~is_free[members]
    fits = live.sum(1).cumsum(0) <= holes.shape[0] - (holes == 0).sum()
    src = compact(members.flatten(), (live & fits[:, None]).flatten(), rows)
    real = (src > 0) & (holes > 0)
    return MovePlan(src=torch.where(real, src, 0), dst=torch.where(real, holes, 0))


def compact(values: Tensor, keep: Tensor, length: int) -> Tensor:
    """Return the kept values at the front of int64 [length], zeros behind; no host wait.

    Args:
        values: int64 [n].
        keep: bool [n]; what is kept beyond `length` is dropped.
        length: Length of the result.
    """
    place = keep.cumsum(0) - 1
    place = torch.where(keep & (place < length), place, length)
    out = torch.zeros(length + 1, dtype=torch.int64, device=values.device)
    out[place] = torch.where(place < length, values, 0)
    return out[:length]


def _victims(
    movable: Tensor, free: Tensor, page: int, max_pages: int, max_live: int
) -> tuple[Tensor, Tensor]:
    pages = free.shape[0]
    number = torch.arange(pages, device=free.device)
    ours = torch.zeros_like(free).scatter_add_(0, movable // page, torch.ones_like(movable))
    live = page - free
    # A page without a hole is what evacuation is for: it stays, however much may be moved.
    eligible = (live > 0) & (free > 0) & (live == ours) & (live <= max_live)
    # Unique keys: fewest live rows first, then page number, so that no order is left to chance.
    key = torch.where(eligible, live, page + 1) * pages + number
    best = key.sort().values[:max_pages]
    partly = ((free > 0) & (free < page)).sum()
    rank = torch.arange(best.shape[0], device=free.device)
    return best % pages, (best < (page + 1) * pages) & (rank < partly // 2)


def _holes(
    slots: Tensor, free: Tensor, victims: Tensor, chosen: Tensor, page: int, rows: int
) -> Tensor:
    # From the back of the canonical order: the densest pages first.
    slots = slots.flip(0)
    of = slots // page
    is_victim = torch.zeros(free.shape[0], dtype=torch.bool, device=free.device)
    is_victim |= torch.zeros_like(free).scatter_add_(0, victims, chosen.long()) > 0
    return compact(slots, ~is_victim[of] & (free[of] < page), rows)


def _mask(slots: Tensor, length: int) -> Tensor:
    mask = torch.zeros(length, dtype=torch.bool, device=slots.device)
    mask.index_fill_(0, slots, True)
    return mask
