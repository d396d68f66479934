"""Plan and commit a tenure step on the device: groups of tokens move into whole free pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._load import ceil_div, interpreted, need_device, need_indices, programs

MARK_BLOCK, PAGES_BLOCK, GROUPS, PLAN_WARPS, COMMIT_BLOCK = 1024, 4096, 64, 16, 256


class TenureSpace(NamedTuple):
    """Fixed device memory of a tenure step for one pool; make it once with `tenure_space`.

    `src`, `dst` int64 and `position` int32 [groups * page]: the plan. `moved` int32 [groups]: 1
    where the group moves. `found` int32 [1]: whole free pages there were. The rest is scratch.
    """

    src: torch.Tensor
    dst: torch.Tensor
    position: torch.Tensor
    moved: torch.Tensor
    found: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    chosen: torch.Tensor


def tenure_space(
    size: int, groups: int, *, page: int = 64, device: torch.device | str
) -> TenureSpace:
    """Allocate for a pool of slots 1..size and up to `groups` groups a step."""
    if groups < 1 or size < page:
        raise ValueError(f"need a group and a page of slots, got {groups} groups, {size} slots")

    def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    plan = groups * page
    return TenureSpace(
        zeros(plan, torch.int64),
        zeros(plan, torch.int64),
        zeros(plan),
        zeros(groups),
        zeros(1),
        zeros(size + 1),
        zeros(size // page + 1),
        zeros(groups),
    )


def plan_tenure(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    *,
    page: int = 64,
) -> TenureSpace:
    """Plan to move tokens `[starts[g], starts[g] + page)` of `rows[g]` into whole free pages.

    `table` int32 or int64 [requests, context]; `rows` and `starts` [groups], exactly as many as the
    space was made for, a row below 0 being no group; `free` int32 or int64 [n], the free slots in
    any order. The lowest whole free pages go to the groups in order. A group that is an aligned
    page in order already, names a slot outside 1..size, or finds no page left stays: dst == src.
    Changes neither the table nor the list, and does not synchronise.
    """
    _check(table, rows, starts, free, space, page)
    need_device(table.device, "plan_tenure_torch")
    kernels = programs("_tenure")
    size = space.place.numel() - 1
    groups = space.moved.numel()
    if free.numel():
        kernels.mark_free[(ceil_div(free.numel(), MARK_BLOCK),)](
            free, free.numel(), size,  # inputs
            space.place, space.counts,  # outputs
            PAGE=page, BLOCK=MARK_BLOCK, num_warps=4,  # constants
        )  # fmt: skip
    small = interpreted()
    kernels.plan_tenure[(1,)](
        table, table.stride(0), table.shape[1], rows, starts, groups, free, size,
        space.counts.numel(),  # inputs
        space.place, space.counts, space.chosen,  # scratch
        space.src, space.dst, space.position, space.moved, space.found,  # outputs
        PAGE=page, BLOCK=256 if small else PAGES_BLOCK, GROUPS=4 if small else GROUPS,
        num_warps=PLAN_WARPS,  # constants
    )  # fmt: skip
    return space


def commit_tenure(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    state: torch.Tensor,
    *,
    page: int = 64,
) -> None:
    """After the copy: name the new slots in the table, put the old ones in the list's place of them

    `state` is that of the `BufferTable` whose rows moved: if its verdict voided the copy, nothing
    changes here either and `space.moved` is cleared. The list keeps its length.
    """
    _check(table, rows, starts, free, space, page)
    need_device(table.device, "commit_tenure_torch")
    total = space.src.numel()
    programs("_tenure").commit_tenure[(ceil_div(total, COMMIT_BLOCK),)](
        space.src, space.dst, space.position, rows, starts, table.stride(0), total, state,  # inputs
        table, free, space.moved,  # in place
        PAGE=page, BLOCK=COMMIT_BLOCK, num_warps=4,  # constants
    )  # fmt: skip


def plan_tenure_torch(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    *,
    page: int = 64,
) -> TenureSpace:
    """Reference of `plan_tenure` in plain torch."""
    _check(table, rows, starts, free, space, page)
    size = space.place.numel() - 1
    listed = {int(s): i for i, s in enumerate(free.tolist())}
    whole = [
        k
        for k in range(1, (size + 1) // page)
        if all(s in listed for s in range(k * page, (k + 1) * page))
    ]
    space.found.fill_(len(whole))
    for g, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        part = slice(g * page, (g + 1) * page)
        real = row >= 0 and start >= 0 and start + page <= table.shape[1]
        slots = table[row, start : start + page].tolist() if real else [0] * page
        aligned = slots == [*range(slots[0], slots[0] + page)] and slots[0] % page == 0
        moves = all(1 <= s <= size for s in slots) and not aligned and bool(whole)
        target = [*range(whole[0] * page, whole.pop(0) * page + page)] if moves else slots
        space.src[part] = torch.tensor(slots)
        space.dst[part] = torch.tensor(target)
        space.position[part] = torch.tensor([listed[s] if moves else 0 for s in target]).int()
        space.moved[g] = int(moves)
    return space


def commit_tenure_torch(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    state: torch.Tensor,
    *,
    page: int = 64,
) -> None:
    """Reference of `commit_tenure` in plain torch."""
    _check(table, rows, starts, free, space, page)
    if int(state[3]):
        space.moved.zero_()
        return
    moving = space.src != space.dst
    each = torch.arange(space.src.numel(), device=table.device)[moving]
    row, at = rows[each // page].long(), starts[each // page].long() + each % page
    table[row, at] = space.dst[moving].to(table.dtype)
    free[space.position[moving].long()] = space.src[moving].to(free.dtype)


def _check(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    page: int,
) -> None:
    if table.ndim != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"table must be 2-D with contiguous rows, got strides {table.stride()}")
    for name, tensor in (("rows", rows), ("starts", starts), ("free", free)):
        need_indices(name, tensor, table.device)
    groups = space.moved.numel()
    if not rows.numel() == starts.numel() == groups:
        raise ValueError(f"{rows.numel()} rows, {starts.numel()} starts, space for {groups}")
    if space.src.numel() != groups * page:
        raise ValueError(f"the space was made for pages of {space.src.numel() // groups}")
