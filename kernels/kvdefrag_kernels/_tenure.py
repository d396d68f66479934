# mypy: ignore-errors
"""Device programs of a tenure step: find whole free pages, plan, and commit."""

import triton
import triton.language as tl

VERDICT = tl.constexpr(3)


@triton.jit(
    do_not_specialize=["count", "size"],
    do_not_specialize_on_alignment=["free", "place", "counts"],
)
def mark_free(
    free, count, size,  # inputs
    place, counts,  # outputs: list position of each free slot, free slots of each page
    PAGE: tl.constexpr, BLOCK: tl.constexpr,  # constants
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(free + i, mask=i < count, other=0).to(tl.int64)
    sound = (i < count) & (slot >= 1) & (slot <= size)
    tl.store(place + slot, i, mask=sound)
    tl.atomic_add(counts + slot // PAGE, tl.full([BLOCK], 1, tl.int32), mask=sound, sem="relaxed")


@triton.jit(
    do_not_specialize=["pitch", "columns", "groups", "size", "pages"],
    do_not_specialize_on_alignment=[
        "table", "rows", "starts", "free", "place", "counts", "chosen",
        "src", "dst", "position", "moved", "found",
    ],
)  # fmt: skip
def plan_tenure(
    table, pitch, columns, rows, starts, groups, free, size, pages,  # inputs
    place, counts, chosen,  # scratch
    src, dst, position, moved, found,  # outputs
    PAGE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,  # constants
):  # fmt: skip
    # One program: choosing the lowest whole free pages is a scan, and 32,000 page counts are few.
    whole_pages = 0
    k = tl.arange(0, BLOCK)
    first = 0
    while first < pages:
        page = first + k
        free_slots = tl.load(counts + page, mask=page < pages, other=0)
        whole = (free_slots == PAGE) & (page >= 1)
        rank = whole_pages + tl.cumsum(whole.to(tl.int32), 0) - 1
        tl.store(chosen + rank, page, mask=whole & (rank < groups))
        # Left clean for the next step, which saves a launch.
        tl.store(counts + page, 0, mask=page < pages)
        whole_pages += tl.sum(whole.to(tl.int32), 0)
        first += BLOCK
    tl.debug_barrier()
    across = tl.arange(0, PAGE)[None, :]
    taken = 0
    group = 0
    while group < groups:
        g = group + tl.arange(0, GROUPS)
        row = tl.load(rows + g, mask=g < groups, other=-1).to(tl.int64)
        start = tl.load(starts + g, mask=g < groups, other=0).to(tl.int64)
        real = (row >= 0) & (start >= 0) & (start + PAGE <= columns)
        at = table + row * pitch + start
        head = tl.load(at, mask=real, other=0).to(tl.int64)
        slots = tl.load(at[:, None] + across, mask=real[:, None], other=0).to(tl.int64)
        sound = tl.min(((slots >= 1) & (slots <= size)).to(tl.int32), 1) == 1
        in_order = tl.min((slots == head[:, None] + across).to(tl.int32), 1) == 1
        wants = real & sound & ((in_order == 0) | (head % PAGE != 0))
        rank = taken + tl.cumsum(wants.to(tl.int32), 0) - 1
        moving = wants & (rank < whole_pages)
        page = tl.load(chosen + rank, mask=moving, other=0).to(tl.int64)
        target = page[:, None] * PAGE + across
        where = tl.load(place + target, mask=moving[:, None], other=0)
        listed = tl.load(free + where, mask=moving[:, None], other=0).to(tl.int64)
        # A slot listed twice would make a page look whole: every slot must be where it is said.
        moving = moving & (tl.min((listed == target).to(tl.int32), 1) == 1)
        out = g[:, None].to(tl.int64) * PAGE + across
        within = (g < groups)[:, None] & (across >= 0)
        tl.store(src + out, slots, mask=within)
        tl.store(dst + out, tl.where(moving[:, None], target, slots), mask=within)
        tl.store(position + out, where, mask=within)
        tl.store(moved + g, moving.to(tl.int32), mask=g < groups)
        taken += tl.sum(wants.to(tl.int32), 0)
        group += GROUPS
    tl.store(found, whole_pages)


@triton.jit(
    do_not_specialize=["pitch", "total"],
    do_not_specialize_on_alignment=[
        "table", "rows", "starts", "free", "src", "dst", "position", "moved", "state",
    ],
)  # fmt: skip
def commit_tenure(
    src, dst, position, rows, starts, pitch, total, state,  # inputs
    table, free, moved,  # in place
    PAGE: tl.constexpr, BLOCK: tl.constexpr,  # constants
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = e // PAGE
    live = e < total
    if tl.load(state + VERDICT) == 0:
        s = tl.load(src + e, mask=live, other=0)
        d = tl.load(dst + e, mask=live, other=0)
        moving = live & (s != d)
        row = tl.load(rows + g, mask=moving, other=0).to(tl.int64)
        at = tl.load(starts + g, mask=moving, other=0).to(tl.int64) + e % PAGE
        where = tl.load(position + e, mask=moving, other=0)
        tl.store(table + row * pitch + at, d.to(table.dtype.element_ty), mask=moving)
        tl.store(free + where, s.to(free.dtype.element_ty), mask=moving)
    else:
        tl.store(moved + g, tl.zeros([BLOCK], tl.int32), mask=live & (e % PAGE == 0))
