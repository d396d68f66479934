# mypy: ignore-errors
"""Device programs of `remap`: rewrite slot numbers in place through a look-up table."""

import triton
import triton.language as tl

# A value list's line: address, entries, bytes per entry, padding. All int64.
FIELDS = tl.constexpr(4)


@triton.jit
def _rewrite(lut, slots, at, live):
    # Numbers outside the look-up table are not slots (padding, -1): they stay as they are, and so
    # does an entry that maps onto itself, which saves the write.
    old = tl.load(at, mask=live, other=0)
    known = live & (old >= 0) & (old < slots)
    new = tl.load(lut + old.to(tl.int64), mask=known, other=0).to(old.dtype)
    tl.store(at, new, mask=known & (new != old))


@triton.jit(
    do_not_specialize=["slots", "columns", "pitch"],
    do_not_specialize_on_alignment=["lut", "table", "rows", "starts", "ends"],
)
def remap_rows(
    lut, slots, rows, starts, ends, columns, pitch,  # inputs
    table,  # in place
    BLOCK: tl.constexpr,  # constants
):  # fmt: skip
    nth = tl.program_id(1)
    start = tl.maximum(tl.load(starts + nth).to(tl.int64), 0)
    end = tl.minimum(tl.load(ends + nth).to(tl.int64), columns)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    if first < end:
        row = tl.load(rows + nth).to(tl.int64)
        at = first + tl.arange(0, BLOCK)
        _rewrite(lut, slots, table + row * pitch + at, at < end)


@triton.jit(
    do_not_specialize=["slots"],
    do_not_specialize_on_alignment=["lut", "lines"],
)
def remap_values(
    lut, slots, lines,  # inputs; the values are rewritten in place
    BLOCK: tl.constexpr,  # constants
):  # fmt: skip
    line = lines + tl.program_id(1).to(tl.int64) * FIELDS
    count = tl.load(line + 1)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first < count:
        address = tl.load(line)
        at = first + tl.arange(0, BLOCK)
        if tl.load(line + 2) == 8:
            _rewrite(lut, slots, address.to(tl.pointer_type(tl.int64)) + at, at < count)
        else:
            _rewrite(lut, slots, address.to(tl.pointer_type(tl.int32)) + at, at < count)
