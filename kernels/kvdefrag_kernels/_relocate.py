# mypy: ignore-errors
"""Device programs of `relocate`: check a plan, copy rows whose slots are disjoint."""

import triton
import triton.language as tl

# Each buffer's line in the table: base address, stride in units, units per row, division magic,
# bytes per unit, padding. All int64.
FIELDS = tl.constexpr(8)

# Why a launch was voided (bits of the verdict).
SLOT_ZERO = tl.constexpr(1)
OUT_OF_RANGE = tl.constexpr(2)
DUPLICATE_DST = tl.constexpr(4)
OVERLAP = tl.constexpr(8)
DUPLICATE_SRC = tl.constexpr(16)

# Words of the state: epoch, ticket, arrivals at meetings, verdict, every reason so far, voided.
EPOCH = tl.constexpr(0)
TICKET = tl.constexpr(1)
ARRIVALS = tl.constexpr(2)
VERDICT = tl.constexpr(3)
HISTORY = tl.constexpr(4)
VOIDED = tl.constexpr(5)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _index(ptr, i, step, mask):
    # Index tensors come as 32-bit words, `step` words apart: one compiled variant serves int32 and
    # int64, and a value outside 32 bits is still seen as what it is.
    low = tl.load(ptr + i * step, mask=mask, other=0)
    high = tl.load(ptr + i * step + (step - 1), mask=mask, other=0)
    wide = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return tl.where(step == 2, wide, low.to(tl.int64))


@triton.jit(
    do_not_specialize=["step", "count", "limit", "disjoint", "fatal"],
    do_not_specialize_on_alignment=["src", "dst", "claims", "state"],
)
def check_moves(
    src, dst, step, count, limit, disjoint, fatal,  # inputs
    claims, state,  # scratch and verdict
    BLOCK: tl.constexpr, PDL: tl.constexpr,  # constants
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    programs = tl.num_programs(0)
    epoch = tl.load(state + EPOCH)
    as_src = epoch * 4 + 1
    as_dst = epoch * 4 + 2
    bad = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0) * BLOCK
    while first < count:
        i = (first + tl.arange(0, BLOCK)).to(tl.int64)
        live = i < count
        s = _index(src, i, step, live)
        d = _index(dst, i, step, live)
        moving = live & (s != d)
        zero = moving & ((s == 0) | (d == 0))
        outside = moving & ((s < 0) | (s >= limit) | (d < 0) | (d >= limit))
        sound = moving & (zero == 0) & (outside == 0)
        bad |= tl.where(zero, SLOT_ZERO, 0) | tl.where(outside, OUT_OF_RANGE, 0)
        # The stamp only grows within a launch, so of two entries naming one slot the later sees
        # the earlier, whatever the order; stamps of earlier launches are smaller. Relaxed: each
        # slot's word decides for itself, and the copy starts after this kernel ends.
        stamp = tl.zeros([BLOCK], tl.int64)
        old_d = tl.atomic_max(claims + d, stamp + as_dst, mask=sound, sem="relaxed")
        bad |= tl.where(sound & (old_d == as_dst), DUPLICATE_DST, 0)
        bad |= tl.where(sound & (old_d == as_src), OVERLAP, 0)
        if disjoint != 0:
            old_s = tl.atomic_max(claims + s, stamp + as_src, mask=sound, sem="relaxed")
            bad |= tl.where(sound & (old_s == as_dst), OVERLAP, 0)
            bad |= tl.where(sound & (old_s == as_src), DUPLICATE_SRC, 0)
        first += programs * BLOCK
    reasons = tl.reduce(bad, 0, _either).to(tl.int64)
    last = programs == 1
    if programs > 1:
        # One word carries the ticket and, ten bits each, how many programs found each reason.
        own = tl.full([], 1, tl.int64)
        for k in tl.static_range(5):
            own += ((reasons >> k) & 1) << (10 * k + 10)
        total = own + tl.atomic_add(state + TICKET, own, sem="relaxed")
        last = (total & 1023) == programs
        for k in tl.static_range(5):
            found = ((total >> (10 * k + 10)) & 1023) != 0
            reasons |= found.to(tl.int64) << k
    if last:
        verdict = reasons & fatal
        tl.store(state + VERDICT, verdict)
        tl.store(state + EPOCH, epoch + 1)
        tl.store(state + TICKET, 0)
        tl.store(state + ARRIVALS, 0)
        if verdict != 0:
            tl.store(state + HISTORY, tl.load(state + HISTORY) | verdict)
            tl.store(state + VOIDED, tl.load(state + VOIDED) + 1)


@triton.jit
def _split(column, words, magic):
    # Exact for column * words < 2**32 (columns stay under 2**15 + the tile); one word a row needs
    # no division and has no 32-bit magic.
    words = words.to(tl.int32)
    row = tl.umulhi(column.to(tl.uint32), magic.to(tl.uint32)).to(tl.int32)
    row = tl.where(words == 1, column, row)
    return row, column - row * words


@triton.jit
def _granted(state, PDL: tl.constexpr):
    # With programmatic launch the verdict is final only once the check kernel has ended.
    if PDL:
        tl.extra.cuda.gdc_wait()
    return tl.load(state + VERDICT, volatile=True) == 0


@triton.jit
def _move16(source, read_at, target, write_at, moving, state, PDL: tl.constexpr):
    # Offsets count 16-byte units: two int64 lanes make one vector access.
    lane = tl.arange(0, 2)[None, :]
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    at = source + (read_at[:, None] * 2 + lane)
    x = tl.load(at, mask=moving[:, None])
    if _granted(state, PDL):
        at = target + (write_at[:, None] * 2 + lane)
        tl.store(at, x, mask=moving[:, None])


@triton.jit
def _move(source, read_at, target, write_at, moving, state, dtype: tl.constexpr, PDL: tl.constexpr):
    source = source.to(tl.pointer_type(dtype))
    target = target.to(tl.pointer_type(dtype))
    x = tl.load(source + read_at, mask=moving)
    if _granted(state, PDL):
        tl.store(target + write_at, x, mask=moving)


@triton.jit
def _pair(src, dst, step, limit, row, live):
    # Rows are read before the verdict is known, so a source outside the pool must not be followed.
    at = row * step
    s = tl.load(src + at, mask=live, other=0)
    d = tl.load(dst + at, mask=live, other=0)
    return s, d, live & (s != d) & (s >= 0) & (s < limit)


@triton.jit
def _place(first, words, magic, total, N: tl.constexpr):
    # Row and column of each of N units from `first` on (which may lie before 0): one 64-bit
    # division for all, 32 bits for each.
    row = tl.maximum(first, 0) // words
    column = (first - row * words).to(tl.int32)
    unit = tl.arange(0, N)
    down, across = _split(column + unit, words, magic)
    live = unit < tl.minimum(total - first, N).to(tl.int32)
    live = live & (unit >= tl.minimum(-first, N).to(tl.int32))
    return row.to(tl.int32) + down, across, live


@triton.jit
def _at(slot, pitch, column):
    # Both factors are 32-bit values of the memory, so one wide multiplication gives 64 bits.
    return slot.to(tl.int64) * pitch.to(tl.int64) + column


@triton.jit
def _pitch(line):
    return tl.load((line + 1).to(tl.pointer_type(tl.int32)))


@triton.jit
def _copy_wide(
    table, buffer, src, dst, step, limit, start, words, magic, pitch, total, state,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if start < total:
        row, column, live = _place(start, words, magic, total, N)
        s, d, moving = _pair(src, dst, step, limit, row, live)
        base = tl.load(table + buffer * FIELDS)
        there, here = _at(s, pitch, column), _at(d, pitch, column)
        _move16(base, there, base, here, moving, state, PDL)


@triton.jit
def _copy_narrow(
    table, first, last, src, dst, step, limit, start, words, magic, pitch, total, state,
    dtype: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The same units of several buffers: with few bytes a unit, indices and places cost as much as
    # the rows, so they are read and computed once.
    if start < total:
        row, column, live = _place(start, words, magic, total, N)
        s, d, moving = _pair(src, dst, step, limit, row, live)
        while first < last:
            line = table + first * FIELDS
            base = tl.load(line)
            # A zero that the compiler cannot know keeps 64-bit offsets out of registers.
            zero = tl.load(line + 5).to(tl.int32)
            there = _at(s + zero, pitch, column + zero)
            here = _at(d + zero, pitch, column + zero)
            _move(base, there, base, here, moving, state, dtype, PDL)
            first += 1


@triton.jit(
    do_not_specialize=[
        "step", "count", "limit", "buffers", "many",
        "same_words", "same_magic", "same_pitch", "same_size",
    ],
    do_not_specialize_on_alignment=["table", "chunks", "src", "dst", "state"],
)  # fmt: skip
def copy_rows(
    table, chunks, src, dst, step, count, limit, state,  # inputs
    buffers, many, same_words, same_magic, same_pitch, same_size,  # inputs
    UNITS: tl.constexpr, NARROW: tl.constexpr, MIXED: tl.constexpr, PDL: tl.constexpr,  # constants
):  # fmt: skip
    nth = tl.program_id(1)
    # Where all rows are cut alike the host says how: nothing to wait for before the indices.
    mixed = same_size == 0
    first = tl.load(chunks + nth * 2, mask=mixed, other=nth * many)
    last = tl.load(chunks + nth * 2 + 1, mask=mixed, other=tl.minimum(nth * many + many, buffers))
    line = table + first * FIELDS
    pitch = tl.load((line + 1).to(tl.pointer_type(tl.int32)), mask=mixed, other=same_pitch)
    words = tl.load(line + 2, mask=mixed, other=same_words)
    magic = tl.load(line + 3, mask=mixed, other=same_magic) + (1 << 31)
    size = tl.load(line + 4, mask=mixed, other=same_size)
    total = count * words
    tile = tl.program_id(0).to(tl.int64)
    # Without MIXED all units have 16 bytes: a third fewer registers, so more rows in flight.
    wide = size == 16
    if not MIXED or wide:
        # Whole rows where they nearly fill a tile: a row that two programs read at different
        # times opens its page of memory twice (1,152-byte rows: 0.5 % slower on an H200).
        rows = UNITS // tl.minimum(words, UNITS).to(tl.int32)
        span = tl.where(rows * words * 5 >= UNITS * 4, rows * words, UNITS)
        span = tl.where(words <= UNITS, span, UNITS)
        start = tile * span
        _copy_wide(table, first, src, dst, step, limit, start, words, magic, pitch,
                   tl.minimum(start + span, total), state, UNITS, PDL)  # fmt: skip
    if MIXED:
        # Consecutive destinations are stored in whole 128-byte lines.
        scale = tl.where(size == 4, 2, 0).to(tl.int64)
        address = tl.load(line) + ((tl.load(dst).to(tl.int64) * pitch) << scale)
        start = tile * NARROW - ((address & 127) >> scale)
        if size == 4:
            _copy_narrow(table, first, last, src, dst, step, limit, start, words, magic, pitch,
                         total, state, tl.int32, NARROW, PDL)  # fmt: skip
        elif size == 1:
            _copy_narrow(table, first, last, src, dst, step, limit, start, words, magic, pitch,
                         total, state, tl.int8, NARROW, PDL)  # fmt: skip
