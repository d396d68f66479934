# mypy: ignore-errors
"""Device programs of a tenure step: find whole free pages, walk rows, plan, and commit."""

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


@triton.jit
def _choose(counts, pages, chosen, lanes, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    # The lowest whole free pages, one a lane at most. Counts are left clean for the next step,
    # which saves a launch.
    whole_pages = 0
    k = tl.arange(0, BLOCK)
    first = 0
    while first < pages:
        page = first + k
        free_slots = tl.load(counts + page, mask=page < pages, other=0)
        whole = (free_slots == PAGE) & (page >= 1)
        rank = whole_pages + tl.cumsum(whole.to(tl.int32), 0) - 1
        tl.store(chosen + rank, page, mask=whole & (rank < lanes))
        tl.store(counts + page, 0, mask=page < pages)
        whole_pages += tl.sum(whole.to(tl.int32), 0)
        first += BLOCK
    tl.debug_barrier()
    return whole_pages


@triton.jit
def _behind_begun_page(row, base, limit, across, PAGE: tl.constexpr):
    # Where an aligned page that the row has begun before `base`, and fills in order, ends.
    # Positions at or past `limit` count as whatever is hoped for, here and below.
    head = tl.load(row + base, mask=(base >= 0) & (base < limit), other=0)
    offset = head % PAGE
    position = (base - offset)[:, None] + across
    known = (position >= 0) & (position < limit[:, None])
    slot = tl.load(row[:, None] + position, mask=known, other=0)
    fits = (slot == (head - offset)[:, None] + across) | (known == 0)
    in_order = tl.min(fits.to(tl.int32), 1) == 1
    begun = in_order & (base >= offset) & (head >= PAGE) & (offset > 0)
    return tl.where(begun, base + PAGE - offset, base)


@triton.jit
def _breaks(row, position, known):
    slot = tl.load(row[:, None] + position, mask=known, other=0)
    before = tl.load(row[:, None] + position - 1, mask=known & (position >= 1), other=0)
    return slot, (known & (slot != before + 1)).to(tl.int32)


@triton.jit
def _next_page(row, start, limit, across, PAGE: tl.constexpr):
    # Slots of the group, and the distance from `start` to the first of its tokens that begins an
    # aligned page; PAGE if there is none.
    near = start[:, None] + across
    known = near < limit[:, None]
    slot, broken = _breaks(row, near, known)
    _, broken_far = _breaks(row, near + PAGE, near + PAGE < limit[:, None])
    until = tl.cumsum(broken, 1)
    # Breaks up to PAGE - 1 tokens behind each token: as many as up to itself if it heads a run.
    ahead = tl.sum(broken, 1)[:, None] + tl.cumsum(broken_far, 1) - broken_far
    begins = known & (until == ahead) & (slot % PAGE == 0) & (slot >= PAGE)
    return slot, tl.min(tl.where(begins, across, PAGE), 1)


@triton.jit(
    do_not_specialize=["pitch", "columns", "lanes", "count", "pages"],
    do_not_specialize_on_alignment=[
        "table", "walks", "free", "place", "counts", "chosen",
        "src", "dst", "position", "first", "reached", "moved",
    ],
)  # fmt: skip
def plan_tenure(
    table, pitch, columns, walks, lanes, free, count, pages,  # inputs
    place, counts, chosen,  # scratch
    src, dst, position, first, reached, moved,  # outputs
    PAGE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,  # constants
):  # fmt: skip
    # One program: choosing the lowest whole free pages is a scan, and 32,000 page counts are few.
    whole_pages = _choose(counts, pages, chosen, lanes, PAGE, BLOCK)
    across = tl.arange(0, PAGE)[None, :]
    taken = 0
    total = 0
    lane = 0
    while lane < lanes:
        g = lane + tl.arange(0, LANES)
        here = g < lanes
        row_at = tl.load(walks + g, mask=here, other=0).to(tl.int64) * pitch
        base = tl.load(walks + lanes + g, mask=here, other=0).to(tl.int64)
        limit = tl.load(walks + 2 * lanes + g, mask=here, other=0).to(tl.int64)
        limit = tl.minimum(limit, columns)
        row = table + row_at
        start = _behind_begun_page(row, base, limit, across, PAGE)
        slots, skip = _next_page(row, start, limit, across, PAGE)
        fits = start + PAGE <= limit
        wants = fits & (skip == PAGE)
        rank = taken + tl.cumsum(wants.to(tl.int32), 0) - 1
        moving = wants & (rank < whole_pages)
        page = tl.load(chosen + rank, mask=moving, other=0).to(tl.int64)
        target = page[:, None] * PAGE + across
        where = tl.load(place + target, mask=moving[:, None], other=0)
        inside = moving[:, None] & (where < count)
        listed = tl.load(free + where, mask=inside, other=0).to(tl.int64)
        # A slot listed twice would make a page look whole: every slot must be where it is said.
        moving = moving & (tl.min((inside & (listed == target)).to(tl.int32), 1) == 1)
        out = g[:, None].to(tl.int64) * PAGE + across
        within = here[:, None] & (across >= 0)
        tl.store(src + out, tl.where(moving[:, None], slots, 0).to(tl.int64), mask=within)
        tl.store(dst + out, tl.where(moving[:, None], target, 0), mask=within)
        tl.store(position + out, where, mask=within)
        tl.store(first + g, tl.where(fits, row_at + start, 0), mask=here)
        stays = fits & (skip == 0)
        passed = tl.where(moving | stays, PAGE, tl.where(skip < PAGE, skip, 0))
        tl.store(reached + g, start + passed, mask=here)
        taken += tl.sum(wants.to(tl.int32), 0)
        total += tl.sum(moving.to(tl.int32), 0)
        lane += LANES
    tl.store(moved, (total * PAGE).to(tl.int64))


@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=[
        "first", "position", "state", "table", "free", "src", "dst", "reached", "moved",
    ],
)  # fmt: skip
def commit_tenure(
    first, position, total, state,  # inputs
    table, free, src, dst, reached, moved,  # in place
    PAGE: tl.constexpr, BLOCK: tl.constexpr,  # constants
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = e // PAGE
    live = e < total
    if tl.load(state + VERDICT) == 0:
        s = tl.load(src + e, mask=live, other=0)
        d = tl.load(dst + e, mask=live, other=0)
        moving = live & (s != d)
        at = tl.load(first + g, mask=moving, other=0) + e % PAGE
        where = tl.load(position + e, mask=moving, other=0)
        tl.store(table + at, d.to(table.dtype.element_ty), mask=moving)
        tl.store(free + where, s.to(free.dtype.element_ty), mask=moving)
    else:
        nothing = tl.zeros([BLOCK], tl.int64)
        tl.store(src + e, nothing, mask=live)
        tl.store(dst + e, nothing, mask=live)
        tl.store(reached + g, nothing, mask=live & (e % PAGE == 0))
        if tl.program_id(0) == 0:
            tl.store(moved, tl.full([], 0, tl.int64))
