"""Plan and commit a tenure step on the device: groups of tokens move into whole free pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._launch import Variants
from ._load import ceil_div, interpreted, need_device, need_indices, programs

MARK_BLOCK, PAGES_BLOCK, LANES, PLAN_WARPS, COMMIT_BLOCK = 1024, 4096, 32, 16, 256


class TenureSpace(NamedTuple):
    """Fixed device memory of a tenure step for one pool; make it once with `tenure_space`.

    The plan: `src`, `dst` int64 [lanes * page], the pair (0, 0) where nothing moves; `reached`
    int64 [lanes], the position up to which each row needs no tenure any more; `moved` int64 [],
    rows that move. For the commit: `first` int64 [lanes], where in the table's memory each group
    begins; `position` int32 [lanes * page], where in the free list each destination stands. The
    rest is scratch.
    """

    src: torch.Tensor
    dst: torch.Tensor
    reached: torch.Tensor
    moved: torch.Tensor
    first: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    chosen: torch.Tensor
    variants: Variants

    @property
    def lanes(self) -> int:
        """Rows a step."""
        return self.reached.numel()

    @property
    def size(self) -> int:
        """Slots 1..size."""
        return self.place.numel() - 1

    def narrow(self, lanes: int) -> TenureSpace:
        """Return the same memory for fewer lanes."""
        pairs = lanes * (self.src.numel() // self.lanes)
        return self._replace(
            src=self.src[:pairs],
            dst=self.dst[:pairs],
            position=self.position[:pairs],
            reached=self.reached[:lanes],
            first=self.first[:lanes],
            chosen=self.chosen[:lanes],
        )


def tenure_space(
    size: int, lanes: int, *, page: int = 64, device: torch.device | str
) -> TenureSpace:
    """Allocate for a pool of slots 1..size and `lanes` rows a step."""
    if lanes < 1 or size < 1:
        raise ValueError(f"need a lane and a slot, got {lanes} lanes, {size} slots")

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return TenureSpace(
        src=zeros(lanes * page, dtype=torch.int64),
        dst=zeros(lanes * page, dtype=torch.int64),
        reached=zeros(lanes, dtype=torch.int64),
        moved=zeros(dtype=torch.int64),
        first=zeros(lanes, dtype=torch.int64),
        position=zeros(lanes * page),
        place=zeros(size + 1),
        counts=zeros(size // page + 1),
        chosen=zeros(lanes),
        variants=Variants(),
    )


def plan_tenure(
    table: torch.Tensor,
    walks: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    *,
    page: int = 64,
) -> None:
    """Plan to move at most one group of `page` tokens of each row into a whole free page.

    `table` int32 or int64 [requests, context]; `walks` int64 [3, lanes], exactly as many lanes as
    the space has: row, position up to which it needs no tenure, tokens that count (0 for no row);
    `free` int32 or int64 [n], the free slots in any order.

    From its position each row goes on behind an aligned page that it has begun before and fills
    in order. Then, within a page of tokens: an aligned page that begins there stays; one that
    begins further on leaves the few tokens before it left over; else the group moves. Positions
    past the row's tokens count as whatever is hoped for. The lowest whole free pages go to the
    lanes in order; where none is left a group waits. Changes neither table nor list and does not
    synchronise.
    """
    _check(table, free, space, page)
    if walks.dtype != torch.int64 or walks.shape != (3, space.lanes) or not walks.is_contiguous():
        raise ValueError(f"walks must be int64 [3, {space.lanes}], got {tuple(walks.shape)}")
    need_device(table.device, "plan_tenure_torch")
    kernels, launch = programs("_tenure"), space.variants.launch
    count = free.numel()
    if count:
        launch(
            ("mark", free.dtype), kernels.mark_free, (ceil_div(count, MARK_BLOCK), 1, 1),
            free, count, space.size,  # inputs
            space.place, space.counts,  # outputs
            PAGE=page, BLOCK=MARK_BLOCK, num_warps=4,  # constants
        )  # fmt: skip
    small = interpreted()
    launch(
        ("plan", table.dtype, free.dtype), kernels.plan_tenure, (1, 1, 1),
        table, table.stride(0), table.shape[1], walks, space.lanes, free, count,
        space.counts.numel(),  # inputs
        space.place, space.counts, space.chosen,  # scratch
        space.src, space.dst, space.position, space.first, space.reached, space.moved,  # outputs
        PAGE=page, BLOCK=256 if small else PAGES_BLOCK, LANES=4 if small else LANES,
        num_warps=PLAN_WARPS,  # constants
    )  # fmt: skip


def commit_tenure(
    table: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    state: torch.Tensor,
    *,
    page: int = 64,
) -> None:
    """After the copy: name the new slots in the table, put the old ones in the list's place of them

    `state` is that of the `BufferTable` whose rows moved: if its verdict voided the copy, nothing
    changes here either and the space is left with a plan that moves nothing and reaches nothing.
    The list keeps its length.
    """
    _check(table, free, space, page)
    need_device(table.device, "commit_tenure_torch")
    total = space.src.numel()
    space.variants.launch(
        ("commit", table.dtype, free.dtype), programs("_tenure").commit_tenure,
        (ceil_div(total, COMMIT_BLOCK), 1, 1),
        space.first, space.position, total, state,  # inputs
        table, free, space.src, space.dst, space.reached, space.moved,  # in place
        PAGE=page, BLOCK=COMMIT_BLOCK, num_warps=4,  # constants
    )  # fmt: skip


def void_tenure(space: TenureSpace, refused: torch.Tensor) -> None:
    """Leave a plan that moves nothing where `refused`, a bool scalar on the device, is set."""
    for part in (space.src, space.dst, space.reached, space.moved):
        part.masked_fill_(refused, 0)


def plan_tenure_torch(
    table: torch.Tensor,
    walks: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    *,
    page: int = 64,
) -> None:
    """Reference of `plan_tenure` in plain Python, a token at a time."""
    _check(table, free, space, page)
    listed = {s: i for i, s in enumerate(free.tolist())}
    inside = range(page, space.size + 2 - page, page)
    whole = [p for p in inside if all(s in listed for s in range(p, p + page))]
    for part in (space.src, space.dst, space.position, space.first):
        part.zero_()
    for g, (row, base, limit) in enumerate(walks.T.tolist()):
        slots = table[row, :limit].tolist()
        start = _behind_begun_page(slots, base, page)
        skip = _next_page(slots, start, page)
        fits = start + page <= limit
        moves = fits and skip == page and bool(whole)
        if moves:
            lanes, target = slice(g * page, (g + 1) * page), whole.pop(0)
            space.src[lanes] = table[row, start : start + page].long()
            space.dst[lanes] = torch.arange(target, target + page)
            where = [listed[s] for s in range(target, target + page)]
            space.position[lanes] = torch.tensor(where, dtype=torch.int32)
        space.first[g] = row * table.stride(0) + start if fits else 0
        passed = page if moves or (fits and skip == 0) else skip if skip < page else 0
        space.reached[g] = start + passed
    space.moved.copy_((space.src != space.dst).sum())


def commit_tenure_torch(
    table: torch.Tensor,
    free: torch.Tensor,
    space: TenureSpace,
    state: torch.Tensor,
    *,
    page: int = 64,
) -> None:
    """Reference of `commit_tenure` in plain torch."""
    _check(table, free, space, page)
    if int(state[3]):
        void_tenure(space, torch.ones((), dtype=torch.bool, device=table.device))
        return
    moving = space.src != space.dst
    each = torch.arange(space.src.numel(), device=table.device)[moving]
    at = space.first[each // page] + each % page
    row, column = at // table.stride(0), at % table.stride(0)
    table[row, column] = space.dst[moving].to(table.dtype)
    free[space.position[moving].long()] = space.src[moving].to(free.dtype)


def _behind_begun_page(slots: list[int], base: int, page: int) -> int:
    offset = slots[base] % page if base < len(slots) else 0
    if not 0 < offset <= base or slots[base] < page:
        return base
    page_of = range(slots[base] - offset, slots[base] - offset + page)
    begun = slots[base - offset : base - offset + page]
    return base - offset + page if begun == [*page_of[: len(begun)]] else base


def _next_page(slots: list[int], start: int, page: int) -> int:
    for skip, head in enumerate(slots[start : start + page]):
        run = slots[start + skip : start + skip + page]
        if head >= page and head % page == 0 and run == [*range(head, head + len(run))]:
            return skip
    return page


def _check(table: torch.Tensor, free: torch.Tensor, space: TenureSpace, page: int) -> None:
    if table.ndim != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"table must be 2-D with contiguous rows, got strides {table.stride()}")
    need_indices("free", free, table.device)
    if space.src.numel() != space.lanes * page:
        made = space.src.numel() // space.lanes
        raise ValueError(f"the space was made for pages of {made}, not {page}")
