"""On demand: gather one request into neighbouring pages, or pack the pool downward."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.plan_evacuate import compact


def plan_gather(
    slots: Tensor, previous: Tensor | None, free_list: TwoEnded, *, page: int
) -> MovePlan:
    """Plan to lay one stretch of a request into neighbouring whole free pages.

    Goes on behind `previous` where those pages are free; else takes the first window of
    neighbouring whole pages that is long enough, else the lowest whole pages, else moves nothing.
    A stretch that already is one run behind `previous` stays.

    Args:
        slots: int64 [n], slots of the stretch in token order; all movable.
        previous: int64 scalar, slot of the token before the stretch, or None at the front.
        free_list: The free slots.
        page: Slots to a page.

    Returns:
        A plan of n pairs.
    """
    count, device = slots.shape[0], slots.device
    if count == 0:
        return MovePlan(src=slots, dst=slots)
    need = -(-count // page)
    whole = free_list.free_per_page() == page
    steps = torch.arange(need, device=device)
    pages = _window(whole, need, steps, previous, page)
    dst = (pages[:, None] * page + torch.arange(page, device=device)).flatten()[:count]
    in_place = (slots[1:] == slots[:-1] + 1).all()
    if previous is not None:
        in_place &= slots[0] == previous + 1
    moves = (pages > 0).all() & ~in_place
    return MovePlan(src=torch.where(moves, slots, 0), dst=torch.where(moves, dst, 0))


def plan_lower(movable: Tensor, free: Tensor, *, rows: int) -> MovePlan:
    """Plan to move the highest movable rows into the lowest free slots; downward only.

    Args:
        movable: int64 [n], slots whose holders are all known, each named once.
        free: int64 [m], the free slots.
        rows: Pairs in the plan.
    """
    high = _padded(movable.sort(descending=True).values, rows)
    low = _padded(free.sort().values, rows)
    real = (low > 0) & (low < high)
    return MovePlan(src=torch.where(real, high, 0), dst=torch.where(real, low, 0))


def any_missing(wanted: Tensor, slots: Tensor, size: int) -> Tensor:
    """Return a bool scalar on the device: whether any of `wanted` is not among `slots`."""
    among = torch.zeros(size + 1, dtype=torch.bool, device=slots.device)
    among.index_fill_(0, slots, True)
    return ~among[wanted].all()


def _window(whole: Tensor, need: int, steps: Tensor, previous: Tensor | None, page: int) -> Tensor:
    pages = whole.shape[0]
    lowest = compact(torch.arange(pages, device=whole.device), whole, need)
    if need > pages:
        return torch.zeros_like(steps)
    sums = torch.cat([whole.new_zeros(1, dtype=torch.int64), whole.cumsum(0)])
    long_enough = sums[need:] - sums[:-need] == need
    first = long_enough.long().argmax()
    chosen = torch.where(long_enough.any(), first + steps, lowest)
    if previous is None:
        return chosen
    behind = ((previous + 1) // page).clamp(max=pages - need)
    # Not `long_enough[behind]`: an index without dimensions is read by the host.
    goes_on = ((previous + 1) % page == 0) & long_enough.index_select(0, behind.view(1))[0]
    goes_on &= behind * page == previous + 1
    return torch.where(goes_on, behind + steps, chosen)


def _padded(slots: Tensor, length: int) -> Tensor:
    out = torch.zeros(length, dtype=torch.int64, device=slots.device)
    have = min(length, slots.shape[0])
    out[:have] = slots[:have]
    return out
