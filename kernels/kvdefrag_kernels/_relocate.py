# mypy: ignore-errors
"""Device programs of `relocate`: check a plan, copy rows, stage overlapping rows."""

import triton
import triton.language as tl

# Each buffer's line in the table: base address, stride in bytes, units per row, division magic,
# bytes per unit, padding. All int64.
FIELDS = tl.constexpr(8)

# Why a launch was voided (bits of the verdict).
SLOT_ZERO = tl.constexpr(1)
OUT_OF_RANGE = tl.constexpr(2)
DUPLICATE_DST = tl.constexpr(4)
OVERLAP = tl.constexpr(8)
DUPLICATE_SRC = tl.constexpr(16)

# Words of the state: epoch, ticket, reasons being gathered, verdict, every reason so far, voided.
EPOCH = tl.constexpr(0)
TICKET = tl.constexpr(1)
GATHERED = tl.constexpr(2)
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
    do_not_specialize=["src_step", "dst_step", "count", "limit", "disjoint", "fatal"],
    do_not_specialize_on_alignment=["src", "dst", "claims", "state"],
)
def check_moves(
    src, dst, src_step, dst_step, count, limit, disjoint, fatal,  # inputs
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
        s = _index(src, i, src_step, live)
        d = _index(dst, i, dst_step, live)
        moving = live & (s != d)
        zero = moving & ((s == 0) | (d == 0))
        outside = moving & ((s < 0) | (s >= limit) | (d < 0) | (d >= limit))
        sound = moving & (zero == 0) & (outside == 0)
        bad |= tl.where(zero, SLOT_ZERO, 0) | tl.where(outside, OUT_OF_RANGE, 0)
        # The stamp only grows within a launch, so of two entries naming one slot the later sees
        # the earlier, whatever the order; stamps of earlier launches are smaller.
        old = tl.atomic_max(claims + d, tl.zeros([BLOCK], tl.int64) + as_dst, mask=sound)
        bad |= tl.where(sound & (old == as_dst), DUPLICATE_DST, 0)
        bad |= tl.where(sound & (old == as_src), OVERLAP, 0)
        if disjoint != 0:
            old = tl.atomic_max(claims + s, tl.zeros([BLOCK], tl.int64) + as_src, mask=sound)
            bad |= tl.where(sound & (old == as_dst), OVERLAP, 0)
            bad |= tl.where(sound & (old == as_src), DUPLICATE_SRC, 0)
        first += programs * BLOCK
    reasons = tl.reduce(bad, 0, _either).to(tl.int64)
    last = programs == 1
    if programs > 1:
        tl.atomic_or(state + GATHERED, reasons)
        last = tl.atomic_add(state + TICKET, 1) == programs - 1
        if last:
            reasons = tl.atomic_xchg(state + GATHERED, 0)
            tl.store(state + TICKET, 0)
    if last:
        verdict = reasons & fatal
        tl.store(state + VERDICT, verdict)
        tl.store(state + EPOCH, epoch + 1)
        if verdict != 0:
            tl.store(state + HISTORY, tl.load(state + HISTORY) | verdict)
            tl.store(state + VOIDED, tl.load(state + VOIDED) + 1)


@triton.jit
def _split(column, words, magic):
    # Exact for column * words < 2**32 (columns stay under 2**15 + the tile); one word a row needs
    # no division and has no 32-bit magic.
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
def _move16(
    source, read_at, target, write_at, moving, state, KEEP: tl.constexpr, PDL: tl.constexpr
):
    # Offsets count 16-byte units: two int64 lanes make one vector access.
    lane = tl.arange(0, 2)[None, :]
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    at = source + (read_at[:, None] * 2 + lane)
    x = tl.load(at, mask=moving[:, None], eviction_policy=KEEP)
    if _granted(state, PDL):
        at = target + (write_at[:, None] * 2 + lane)
        tl.store(at, x, mask=moving[:, None], eviction_policy=KEEP)


@triton.jit
def _move(source, read_at, target, write_at, moving, state, dtype: tl.constexpr, PDL: tl.constexpr):
    source = source.to(tl.pointer_type(dtype))
    target = target.to(tl.pointer_type(dtype))
    x = tl.load(source + read_at, mask=moving)
    if _granted(state, PDL):
        tl.store(target + write_at, x, mask=moving)


@triton.jit
def _pair(src, dst, src_step, dst_step, row, live):
    s = tl.load(src + row * src_step, mask=live, other=0).to(tl.int64)
    d = tl.load(dst + row * dst_step, mask=live, other=0).to(tl.int64)
    return s, d, live & (s != d)


@triton.jit
def _place(first, words, magic, total, N: tl.constexpr):
    # Row and column of each unit of a tile, from one 64-bit division for the whole tile.
    row = first // words
    column = (first - row * words).to(tl.int32)
    unit = tl.arange(0, N)
    down, across = _split(column + unit, words.to(tl.int32), magic)
    return row + down.to(tl.int64), across.to(tl.int64), first + unit < total


@triton.jit(
    do_not_specialize=["src_step", "dst_step", "count"],
    do_not_specialize_on_alignment=["table", "src", "dst", "state"],
)
def copy_rows(
    table, src, dst, src_step, dst_step, count, state,  # inputs
    UNITS: tl.constexpr, NARROW: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,  # constants
):  # fmt: skip
    line = table + tl.program_id(1) * FIELDS
    base = tl.load(line)
    stride = tl.load(line + 1)
    words = tl.load(line + 2)
    magic = tl.load(line + 3)
    size = tl.load(line + 4)
    tile = tl.program_id(0).to(tl.int64)
    total = count * words
    if size == 16:
        if tile * UNITS < total:
            row, column, live = _place(tile * UNITS, words, magic, total, UNITS)
            s, d, moving = _pair(src, dst, src_step, dst_step, row, live)
            pitch = stride // 16
            _move16(base, s * pitch + column, base, d * pitch + column, moving, state, KEEP, PDL)
    elif size == 4:
        if tile * NARROW < total:
            row, column, live = _place(tile * NARROW, words, magic, total, NARROW)
            s, d, moving = _pair(src, dst, src_step, dst_step, row, live)
            pitch = stride // 4
            _move(base, s * pitch + column, base, d * pitch + column, moving, state, tl.int32, PDL)
    else:
        if tile * NARROW < total:
            row, column, live = _place(tile * NARROW, words, magic, total, NARROW)
            s, d, moving = _pair(src, dst, src_step, dst_step, row, live)
            _move(base, s * stride + column, base, d * stride + column, moving, state, tl.int8, PDL)


@triton.jit(
    do_not_specialize=[
        "src_step", "dst_step", "count",
        "load_buffer", "load_buffers", "load_column", "load_width", "load_magic", "load_size",
        "load_at",
        "save_buffer", "save_buffers", "save_column", "save_width", "save_magic", "save_size",
        "save_at",
    ],
    do_not_specialize_on_alignment=["table", "src", "dst", "state", "staging"],
)  # fmt: skip
def stage_rows(
    table, src, dst, src_step, dst_step, count, state, staging,  # inputs
    load_buffer, load_buffers, load_column, load_width, load_magic, load_size, load_at,
    save_buffer, save_buffers, save_column, save_width, save_magic, save_size, save_at,
    UNITS: tl.constexpr, NARROW: tl.constexpr,  # constants
):  # fmt: skip
    # Gathers one wave into one half of the staging memory while the wave before it is scattered
    # from the other half; a wave is a column slice of all rows, so no wave reads what another wrote
    saving = tl.program_id(2) == 1
    first_buffer = tl.where(saving, save_buffer, load_buffer)
    buffers = tl.where(saving, save_buffers, load_buffers)
    left = tl.where(saving, save_column, load_column).to(tl.int64)
    width = tl.where(saving, save_width, load_width).to(tl.int64)
    magic = tl.where(saving, save_magic, load_magic)
    size = tl.where(saving, save_size, load_size)
    at = tl.where(saving, save_at, load_at).to(tl.int64)
    nth = tl.program_id(1)
    if nth < buffers:
        line = table + (first_buffer + nth) * FIELDS
        base = tl.load(line)
        stride = tl.load(line + 1)
        tile = tl.program_id(0).to(tl.int64)
        total = count * width
        memory = staging.to(tl.int64) + at
        skip = nth * total
        if size == 16:
            if tile * UNITS < total:
                row, column, live = _place(tile * UNITS, width, magic, total, UNITS)
                s, d, moving = _pair(src, dst, src_step, dst_step, row, live)
                staged = skip + tile * UNITS + tl.arange(0, UNITS)
                if saving:
                    there = d * (stride // 16) + left + column
                    _move16(memory, staged, base, there, moving, state, "", False)
                else:
                    there = s * (stride // 16) + left + column
                    _move16(base, there, memory, staged, moving, state, "", False)
        else:
            if tile * NARROW < total:
                row, column, live = _place(tile * NARROW, width, magic, total, NARROW)
                s, d, moving = _pair(src, dst, src_step, dst_step, row, live)
                staged = skip + tile * NARROW + tl.arange(0, NARROW)
                if size == 4:
                    if saving:
                        there = d * (stride // 4) + left + column
                        _move(memory, staged, base, there, moving, state, tl.int32, False)
                    else:
                        there = s * (stride // 4) + left + column
                        _move(base, there, memory, staged, moving, state, tl.int32, False)
                else:
                    if saving:
                        there = d * stride + left + column
                        _move(memory, staged, base, there, moving, state, tl.int8, False)
                    else:
                        there = s * stride + left + column
                        _move(base, there, memory, staged, moving, state, tl.int8, False)
