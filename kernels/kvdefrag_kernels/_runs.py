# mypy: ignore-errors
"""Device programs over runs of a table row: statistics per request, and the view as pages."""

import triton
import triton.language as tl

# Columns of a segment's part: run starts, covered tokens, first run start, last run start, longest.
PARTS = tl.constexpr(8)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smallest(a, b):
    return tl.minimum(a, b)


@triton.jit
def _entries(table, row, pitch, at, length):
    inside = (at >= 0) & (at < length)
    return tl.load(table + row * pitch + at, mask=inside, other=-2).to(tl.int32), inside


@triton.jit
def _starts(table, row, pitch, at, length):
    # A run starts where a slot does not follow the one before it; token 0 always starts one.
    slot, inside = _entries(table, row, pitch, at, length)
    before, _ = _entries(table, row, pitch, at - 1, length)
    return slot, inside, inside & ((at == 0) | (slot != before + 1))


@triton.jit(
    do_not_specialize=["pitch", "columns", "segments"],
    do_not_specialize_on_alignment=["table", "rows", "lengths", "parts", "tickets", "out"],
)
def layout_stats(
    table, pitch, columns, rows, lengths, segments,  # inputs
    parts, tickets,  # scratch
    out,  # outputs
    PAGE: tl.constexpr, BLOCK: tl.constexpr, MERGE: tl.constexpr,  # constants
):  # fmt: skip
    SPAN: tl.constexpr = BLOCK - PAGE
    segment = tl.program_id(0)
    nth = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + nth).to(tl.int64)
    length = tl.minimum(tl.load(lengths + nth).to(tl.int32), columns)
    used = tl.maximum((length + SPAN - 1) // SPAN, 1)
    if segment < used:
        # The block starts a page early, so that a page that ends in this segment is seen whole.
        begin = segment * SPAN
        at = begin - PAGE + tl.arange(0, BLOCK)
        slot, inside, start = _starts(table, row, pitch, at, length)
        own = inside & (at >= begin)
        since = tl.associative_scan(tl.where(start, at, -1), 0, _largest)
        # Before the block's first visible start the run reaches back past the block: at least a
        # page, or the block would show its start (token 0 is one).
        reach = at - tl.where(since < 0, begin - PAGE, since) + 1
        ends_page = own & (slot % PAGE == PAGE - 1) & (slot >= 2 * PAGE - 1) & (reach >= PAGE)
        runs = tl.sum((own & start).to(tl.int32), 0)
        covered = tl.sum(ends_page.to(tl.int32), 0) * PAGE
        last = tl.max(tl.where(own & start, at, -1), 0)
        first = tl.min(tl.where(own & start, at, length), 0)
        here = own & (since >= begin)
        longest = tl.max(tl.where(here, at - since + 1, 0), 0)
        final = used == 1
        if used > 1:
            part = parts + (nth * segments + segment) * PARTS
            tl.store(part, runs)
            tl.store(part + 1, covered)
            tl.store(part + 2, first)
            tl.store(part + 3, last)
            tl.store(part + 4, longest)
            final = tl.atomic_add(tickets + nth, 1) == used - 1
            if final:
                tl.store(tickets + nth, 0)
                runs = 0
                covered = 0
                longest = 0
                open_run = 0
                done = 0
                while done < used:
                    k = done + tl.arange(0, MERGE)
                    known = k < used
                    theirs = parts + (nth * segments + k) * PARTS
                    runs += tl.sum(tl.load(theirs, mask=known, other=0, volatile=True), 0)
                    covered += tl.sum(tl.load(theirs + 1, mask=known, other=0, volatile=True), 0)
                    first_k = tl.load(theirs + 2, mask=known, other=0, volatile=True)
                    inner = tl.load(theirs + 4, mask=known, other=0, volatile=True)
                    # The run that is open at a segment's beginning started at the last start of
                    # the segments before it, and lasts to this segment's first start or its end.
                    last_k = tl.load(theirs + 3, mask=known, other=-1, volatile=True)
                    prior = tl.load(theirs - PARTS + 3, mask=known & (k > done), other=-1,
                                    volatile=True)  # fmt: skip
                    prior = tl.maximum(tl.associative_scan(prior, 0, _largest), open_run)
                    stop = tl.minimum(tl.minimum(first_k, (k + 1) * SPAN), length)
                    crossing = tl.where(known, stop - prior, 0)
                    longest = tl.maximum(longest, tl.max(tl.maximum(inner, crossing), 0))
                    open_run = tl.maximum(open_run, tl.max(last_k, 0))
                    done += MERGE
        if final:
            tl.store(out + nth * 4, runs)
            tl.store(out + nth * 4 + 1, longest)
            tl.store(out + nth * 4 + 2, covered)
            tl.store(out + nth * 4 + 3, tl.maximum(length, 0) - covered)


@triton.jit
def _in_pages(table, row, pitch, length, begin, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    # Tokens [begin, begin + BLOCK - 2 PAGE) are the segment's own; a page either side makes every
    # page that touches them visible.
    SPAN: tl.constexpr = BLOCK - 2 * PAGE
    at = begin - PAGE + tl.arange(0, BLOCK)
    slot, inside, start = _starts(table, row, pitch, at, length)
    after, _ = _entries(table, row, pitch, at + 1, length)
    stop = inside & ((at + 1 >= length) | (after != slot + 1))
    since = tl.associative_scan(tl.where(start, at, begin - PAGE), 0, _largest)
    until = tl.associative_scan(
        tl.where(stop, at, begin - PAGE + BLOCK - 1), 0, _smallest, reverse=True
    )
    own = inside & (at >= begin) & (at < begin + SPAN)
    offset = slot % PAGE
    paged = own & (slot >= PAGE) & (since <= at - offset) & (until >= at - offset + PAGE - 1)
    return slot, offset, own & paged, own & (paged == 0)


@triton.jit(
    do_not_specialize=["pitch", "columns", "segments"],
    do_not_specialize_on_alignment=["table", "rows", "lengths", "counts"],
)
def count_pages(
    table, pitch, columns, rows, lengths, segments,  # inputs
    counts,  # outputs: pages that start, and tokens left over, in each segment
    PAGE: tl.constexpr, BLOCK: tl.constexpr,  # constants
):  # fmt: skip
    segment = tl.program_id(0)
    nth = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + nth).to(tl.int64)
    length = tl.minimum(tl.load(lengths + nth).to(tl.int32), columns)
    begin = segment * (BLOCK - 2 * PAGE)
    pages = 0
    left = 0
    if begin < length:
        _slot, offset, paged, over = _in_pages(table, row, pitch, length, begin, PAGE, BLOCK)
        pages = tl.sum((paged & (offset == 0)).to(tl.int32), 0)
        left = tl.sum(over.to(tl.int32), 0)
    tl.store(counts + (nth * segments + segment) * 2, pages)
    tl.store(counts + (nth * segments + segment) * 2 + 1, left)


@triton.jit(
    do_not_specialize=["pitch", "columns", "segments", "most_pages", "most_left"],
    do_not_specialize_on_alignment=["table", "rows", "lengths", "counts", "pages", "left", "out"],
)
def write_pages(
    table, pitch, columns, rows, lengths, segments, counts, most_pages, most_left,  # inputs
    pages, left, out,  # outputs
    PAGE: tl.constexpr, BLOCK: tl.constexpr, MERGE: tl.constexpr,  # constants
):  # fmt: skip
    segment = tl.program_id(0)
    nth = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + nth).to(tl.int64)
    length = tl.minimum(tl.load(lengths + nth).to(tl.int32), columns)
    begin = segment * (BLOCK - 2 * PAGE)
    prior_pages = 0
    prior_left = 0
    done = 0
    while done < segment:
        k = done + tl.arange(0, MERGE)
        count = counts + (nth * segments + k) * 2
        prior_pages += tl.sum(tl.load(count, mask=k < segment, other=0), 0)
        prior_left += tl.sum(tl.load(count + 1, mask=k < segment, other=0), 0)
        done += MERGE
    if begin < length:
        slot, offset, paged, over = _in_pages(table, row, pitch, length, begin, PAGE, BLOCK)
        opens = paged & (offset == 0)
        rank = prior_pages + tl.cumsum(opens.to(tl.int32), 0) - 1
        tl.store(pages + nth * most_pages + rank, slot // PAGE, mask=opens & (rank < most_pages))
        rank = prior_left + tl.cumsum(over.to(tl.int32), 0) - 1
        tl.store(left + nth * most_left + rank, slot, mask=over & (rank < most_left))
    if segment == segments - 1:
        here = counts + (nth * segments + segment) * 2
        page_count = prior_pages + tl.load(here)
        left_count = prior_left + tl.load(here + 1)
        tl.store(out + nth * 4, tl.minimum(page_count, most_pages))
        tl.store(out + nth * 4 + 1, tl.minimum(left_count, most_left))
        spilt = (page_count > most_pages) | (left_count > most_left)
        tl.store(out + nth * 4 + 2, spilt.to(tl.int32))
        tl.store(out + nth * 4 + 3, tl.maximum(length, 0))
