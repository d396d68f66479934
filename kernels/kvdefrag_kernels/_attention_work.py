# mypy: ignore-errors
"""Device program that shares the tokens of a batch out over the workers of `attend`.

A request's tokens are cut into units of TOKENS: whole aligned pages first, then full units of
single slots, then the rest, which alone needs masks: the slots that fill no unit, and the tree.
"""

import triton
import triton.language as tl

# Words of a request's line of work: where its cost begins, units, units in pages, full units of
# single slots, slots that fill no unit, tree tokens, addresses of the single slots, of the tree's
# slots and of the pages, first query, queries, first mask byte, mask bytes a query.
FIELDS = tl.constexpr(16)

# What a share costs beside its units, in units: its queries and results, and a rest's latency.
OPENING = tl.constexpr(2)
REST = tl.constexpr(1)

# Ways to see the tokens.
ALL = tl.constexpr(0)
CHAIN = tl.constexpr(1)
TREE = tl.constexpr(2)
FULL = tl.constexpr(3)


@triton.jit(
    do_not_specialize=["pitch", "columns", "most_pages", "most_left", "count", "queries"],
    do_not_specialize_on_alignment=[
        "slots", "rows", "lengths", "tree_slots", "query_starts", "mask_starts",
        "facts", "pages", "left", "work", "spans", "total",
    ],
)  # fmt: skip
def share_work(
    slots, rows, pitch, columns, lengths, tree_slots, query_starts, mask_starts,
    facts, pages, most_pages, left, most_left, count, queries,  # inputs
    work, spans, total,  # outputs
    INDEXED: tl.constexpr, TREE_SLOTS: tl.constexpr, RAGGED: tl.constexpr,
    MASK_STARTS: tl.constexpr, HOLDS_TREE: tl.constexpr, SEES: tl.constexpr, WIDE: tl.constexpr,
    PAGED: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, SLOT_BYTES: tl.constexpr,
    TREE_BYTES: tl.constexpr, WORKERS: tl.constexpr, BLOCK: tl.constexpr,  # constants
):  # fmt: skip
    # Every program works out the whole list and keeps its own span; the first one writes the list.
    worker = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    inside = r < count
    if RAGGED:
        first_query = tl.load(query_starts + r, mask=inside, other=0).to(tl.int64)
        many = tl.load(query_starts + r + 1, mask=inside, other=0).to(tl.int64) - first_query
    else:
        first_query = r.to(tl.int64) * queries
        many = tl.where(inside, queries, 0).to(tl.int64)
    length = tl.load(lengths + r, mask=inside, other=0).to(tl.int64)
    length = tl.maximum(length, 0)
    tree = many * 0 if SEES == ALL else many
    if HOLDS_TREE:
        tree = tl.minimum(tree, length)
        prefix = length - tree
    else:
        prefix = length
    if INDEXED:
        begin = tl.load(rows + r, mask=inside, other=0).to(tl.int64)
    else:
        prefix = tl.minimum(prefix, columns)
        begin = tl.load(rows + r, mask=inside, other=0).to(tl.int64) * pitch
    singles_at = slots.to(tl.int64) + begin * SLOT_BYTES
    if TREE_SLOTS:
        tree_at = tree_slots.to(tl.int64) + first_query * TREE_BYTES
    else:
        tree_at = singles_at + prefix * SLOT_BYTES
    singles = prefix
    in_pages = prefix * 0
    pages_at = prefix * 0
    if PAGED:
        fact = facts + r * 4
        whole = tl.load(fact, mask=inside, other=0).to(tl.int64)
        over = tl.load(fact + 1, mask=inside, other=0).to(tl.int64)
        spilt = tl.load(fact + 2, mask=inside, other=1)
        viewed = tl.load(fact + 3, mask=inside, other=0).to(tl.int64)
        # A view that ran over, or was made for another length, is not used.
        usable = (spilt == 0) & (viewed == prefix)
        in_pages = tl.where(usable, whole * PARTS, 0)
        singles = tl.where(usable, over, prefix)
        pages_at = pages.to(tl.int64) + r.to(tl.int64) * most_pages * 4
        singles_at = tl.where(usable, left.to(tl.int64) + r.to(tl.int64) * most_left * 4,
                              singles_at)  # fmt: skip
    full = singles * 0 if SEES == FULL else singles // TOKENS
    tail = singles - full * TOKENS
    rest = (tail + tree + TOKENS - 1) // TOKENS
    units = tl.where(many > 0, in_pages + full + rest, 0)
    cost = tl.where(units > 0, units + OPENING + tl.where(rest > 0, REST, 0), 0)
    end = tl.cumsum(cost, 0)
    start = end - cost
    whole_cost = tl.sum(cost, 0)
    quota = tl.maximum((whole_cost + WORKERS - 1) // WORKERS, 1)
    begins = inside & (cost > 0) & (start + OPENING < (worker + 1) * quota)
    ends = inside & (cost > 0) & (start + OPENING + units > worker * quota)
    mine = begins & ends
    tl.store(spans + worker * 2, tl.min(tl.where(mine, r, BLOCK), 0))
    tl.store(spans + worker * 2 + 1, tl.max(tl.where(mine, r, -1), 0))
    if worker == 0:
        tl.store(total, quota.to(tl.int32))
        wide = many * (prefix + tree)
        square = many * tree
        stride = prefix + tree if WIDE else tree
        if MASK_STARTS:
            seen = tl.load(mask_starts + r, mask=inside, other=0).to(tl.int64)
        else:
            area = wide if WIDE else square
            seen = tl.cumsum(area, 0) - area
        if WIDE and SEES == TREE:
            seen += prefix
        line = work + r * FIELDS
        tl.store(line, start, mask=inside)
        tl.store(line + 1, units, mask=inside)
        tl.store(line + 2, in_pages, mask=inside)
        tl.store(line + 3, full, mask=inside)
        tl.store(line + 4, tail, mask=inside)
        tl.store(line + 5, tree, mask=inside)
        tl.store(line + 6, singles_at, mask=inside)
        tl.store(line + 7, tree_at, mask=inside)
        tl.store(line + 8, pages_at, mask=inside)
        tl.store(line + 9, first_query, mask=inside)
        tl.store(line + 10, many, mask=inside)
        tl.store(line + 11, seen, mask=inside)
        tl.store(line + 12, stride, mask=inside)
