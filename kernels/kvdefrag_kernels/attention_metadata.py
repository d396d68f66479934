"""Share the tokens of a batch out over a fixed number of programs, on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ._load import ceil_div, need_device, need_indices, programs
from .attention_geometry import SEES, Geometry, Tile, Visible, check_geometry, default_tile
from .page_view import PageView

FIELDS = 16
INTERPRETED_LANES = 2


@dataclass(frozen=True)
class AttentionSpace:
    """Fixed buffers of `plan_attention` and `tree_attention`; made by `attention_space`.

    One space serves one plan at a time, and any number of layers after each other.
    """

    geometry: Geometry
    requests: int
    queries: int
    visible: Visible
    page: int | None
    tile: Tile
    tiles: int
    workers: int
    work: torch.Tensor
    spans: torch.Tensor
    total: torch.Tensor
    part: torch.Tensor
    part_lse: torch.Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """A space whose buffers say who reads what; keeps alive the tensors that they point to."""

    space: AttentionSpace
    requests: int
    tokens: int | None
    wide_slots: bool
    wide_tree: bool
    kept: tuple[torch.Tensor, ...] = field(repr=False)


def attention_space(
    geometry: Geometry,
    *,
    requests: int,
    queries: int,
    kv_dtype: torch.dtype,
    visible: Visible = Visible.ALL,
    page: int | None = None,
    device: torch.device | str,
    tile: Tile | None = None,
    workers: int | None = None,
) -> AttentionSpace:
    """Allocate for up to `requests` requests of up to `queries` queries each.

    `page`: read whole aligned pages of that many slots as blocks, from a `PageView`; None: every
    slot by itself. The grid follows from the arguments and the device alone, lengths never change
    it. `tile` and `workers` override what was tuned on an H200.
    """
    check_geometry(geometry, requests, queries, kv_dtype, visible, page)
    device = torch.device(device)
    tile = tile or default_tile(geometry, queries, kv_dtype)
    if page is not None and tile.tokens > page:
        tile = tile._replace(tokens=page)
    tiles = ceil_div(queries * geometry.group, tile.rows)
    across = tiles * geometry.kv_heads
    workers = workers or _workers(_lanes(device) * tile.resident, across)
    parts = 2 * workers * across * tile.rows if workers > 1 else 1

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    return AttentionSpace(
        geometry, requests, queries, visible, page, tile, tiles, workers,
        empty(requests, FIELDS, dtype=torch.int64),
        empty(workers, 2, dtype=torch.int32),
        empty(1, dtype=torch.int32),
        empty(parts, geometry.value),
        empty(parts),
    )  # fmt: skip


def plan_attention(
    space: AttentionSpace,
    lengths: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
    tree_slots: torch.Tensor | None = None,
    query_starts: torch.Tensor | None = None,
    mask_starts: torch.Tensor | None = None,
    view: PageView | None = None,
    lengths_hold_tree: bool = True,
) -> AttentionPlan:
    """Share out the tokens of the requests: one launch, no synchronisation, capture-safe.

    Slots come as `table` int32 or int64 [requests, context] and `rows` [n], or as `indices` and
    `indptr` [n + 1] (SGLang's kv_indices and kv_indptr). `lengths` int32 or int64 [n] count the
    tree's tokens with `lengths_hold_tree`, else the prefix alone; either way they are attended to
    once. The tree's slots follow the prefix's in its list, or are `tree_slots`, one a query.
    Each request has `queries` queries, or those between `query_starts` [n + 1]. `mask_starts`
    [n or n + 1]: first mask byte of each request, if masks are not packed. `view`: the requests'
    prefixes as pages, needs a table (or indices) of int32; a request whose view ran over or is for
    another length is read slot by slot.
    """
    slots, starts = _slots_of(space, lengths, table, rows, indices, indptr)
    _check_plan(space, lengths, slots, view)
    _check_starts(space, lengths, tree_slots, query_starts, mask_starts)
    need_device(lengths.device, "tree_attention_torch")
    count, tree = lengths.numel(), slots if tree_slots is None else tree_slots
    if count:
        sees, tile = space.visible, space.tile
        facts, pages, left = (view.facts, view.pages, view.left) if view else (space.spans,) * 3
        programs("_attention_work").share_work[(space.workers,)](
            slots, starts, slots.stride(0), slots.shape[-1], lengths, tree,
            lengths if query_starts is None else query_starts,
            lengths if mask_starts is None else mask_starts,
            facts, pages, pages.shape[1], left, left.shape[1], count, space.queries,  # inputs
            space.work, space.spans, space.total,  # outputs
            INDEXED=indices is not None, TREE_SLOTS=tree_slots is not None,
            RAGGED=query_starts is not None, MASK_STARTS=mask_starts is not None,
            HOLDS_TREE=lengths_hold_tree, SEES=SEES[sees],
            WIDE=sees in (Visible.TREE_OF_FULL, Visible.FULL), PAGED=view is not None,
            PARTS=(space.page or tile.tokens) // tile.tokens, TOKENS=tile.tokens,
            SLOT_BYTES=slots.element_size(), TREE_BYTES=tree.element_size(),
            WORKERS=space.workers, BLOCK=max(16, 1 << (space.requests - 1).bit_length()),
            num_warps=4,  # constants
        )  # fmt: skip
    tokens = count * space.queries if query_starts is None else None
    wide = slots.dtype == torch.int64, tree.dtype == torch.int64
    kept = slots, tree, *((view.pages, view.left) if view else ())
    return AttentionPlan(space, count, tokens, *wide, kept)


def _workers(lanes: int, across: int) -> int:
    # The most even use of the lanes; more workers than a wave needs cost parts to combine.
    if across <= lanes:
        return lanes // across
    choices = range(1, 9)

    def idle(w: int) -> float:
        waves = ceil_div(w * across, lanes)
        return round(waves * lanes / (w * across) + 0.01 * w, 4)

    return min(choices, key=idle)


def _lanes(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_LANES
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _slots_of(
    space: AttentionSpace,
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    rows: torch.Tensor | None,
    indices: torch.Tensor | None,
    indptr: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = space.work.device
    need_indices("lengths", lengths, device)
    if table is not None and rows is not None and indices is None and indptr is None:
        if table.ndim != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError(f"table must be 2-D with contiguous rows, got {table.stride()}")
        if table.dtype not in (torch.int32, torch.int64) or table.device != device:
            raise ValueError(f"table must be int32 or int64 on {device}, got {table.dtype}")
        need_indices("rows", rows, device)
        if rows.numel() != lengths.numel():
            raise ValueError(f"rows must have {lengths.numel()} entries, got {rows.numel()}")
        return table, rows
    if indices is not None and indptr is not None and table is None and rows is None:
        need_indices("indices", indices, device)
        need_indices("indptr", indptr, device)
        if indptr.numel() < lengths.numel():
            raise ValueError(f"indptr must have {lengths.numel()} starts, got {indptr.numel()}")
        return indices, indptr
    raise ValueError("slots must be given as table and rows, or as indices and indptr")


def _check_plan(
    space: AttentionSpace, lengths: torch.Tensor, slots: torch.Tensor, view: PageView | None
) -> None:
    count = lengths.numel()
    if count > space.requests:
        raise ValueError(f"lengths must have at most {space.requests} entries, got {count}")
    if (view is None) != (space.page is None):
        raise ValueError(f"view must be given if and only if page is, page is {space.page}")
    if view is not None and slots.dtype != torch.int32:
        raise ValueError(f"slots must be int32 beside a view, got {slots.dtype}")
    if view is not None and view.facts.shape[0] < count:
        raise ValueError(f"view must hold {count} requests, got {view.facts.shape[0]}")


def _check_starts(
    space: AttentionSpace,
    lengths: torch.Tensor,
    tree_slots: torch.Tensor | None,
    query_starts: torch.Tensor | None,
    mask_starts: torch.Tensor | None,
) -> None:
    device, count = space.work.device, lengths.numel()
    if tree_slots is not None:
        need_indices("tree_slots", tree_slots, device)
        if space.visible is Visible.ALL:
            raise ValueError("tree_slots must be None where visible is ALL: no tree is told apart")
    for name, starts, least in (
        ("query_starts", query_starts, count + 1),
        ("mask_starts", mask_starts, count),
    ):
        if starts is not None:
            need_indices(name, starts, device)
            if starts.numel() < least:
                raise ValueError(f"{name} must have {least} entries, got {starts.numel()}")
