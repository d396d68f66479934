# mypy: ignore-errors
"""Device programs that join parts: of any origin, and those of `attend`."""

import triton
import triton.language as tl

from ._attention_work import FIELDS, OPENING


@triton.jit(
    do_not_specialize=["parts", "lse_scale"], do_not_specialize_on_alignment=["lses", "lse"]
)
def merge(
    found, found_part, found_token, found_head, lses, lses_part, lses_token, lses_head,
    parts, heads, lse_scale,  # inputs
    out, out_token, out_head, lse, lse_token, lse_head,  # outputs
    DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,  # constants
):  # fmt: skip
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    c = tl.arange(0, BLOCK)
    found += token * found_token + head * found_head
    lses += token * lses_token + head * lses_head
    # An infinite logarithm marks a part that saw nothing: some kernels write +inf there. What
    # stands in such a part is not read.
    i = tl.arange(0, PARTS)
    log = tl.load(lses + i.to(tl.int64) * lses_part, mask=i < parts, other=float("-inf"))
    log = tl.where(log == float("inf"), float("-inf"), log / lse_scale)
    top = tl.max(log, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(log - base), 0)
    acc = tl.zeros([BLOCK], tl.float32)
    for done in range(0, parts, CHUNK):
        j = (done + tl.arange(0, CHUNK)).to(tl.int64)
        one = tl.load(lses + j * lses_part, mask=j < parts, other=float("-inf"))
        one = tl.where(one == float("inf"), float("-inf"), one / lse_scale)
        weight = tl.exp2(one - base)
        used = (weight != 0.0)[:, None] & (c[None, :] < DIM)
        rows = tl.load(found + j[:, None] * found_part + c[None, :], mask=used, other=0.0)
        acc += tl.sum(rows.to(tl.float32) * weight[:, None], 0)
    some = total != 0.0
    total = tl.where(some, total, 1.0)
    at = out + token * out_token + head * out_head + c
    tl.store(at, (acc / total).to(out.dtype.element_ty), mask=c < DIM)
    whole = tl.where(some, top + tl.log2(total), float("-inf"))
    tl.store(lse + token * lse_token + head * lse_head, whole * lse_scale)


@triton.jit(
    do_not_specialize=["lse_scale", "tiles"],
    do_not_specialize_on_alignment=["work", "total", "lse", "part_lse"],
)
def combine(
    work, total, part, part_lse, lse_scale, tiles,  # inputs
    out, out_token, out_head, lse, lse_token, lse_head,  # outputs
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr, WORKERS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,  # constants
):  # fmt: skip
    # One program a query, head and stretch of columns: join what several workers found, or write
    # what nobody did.
    query = tl.program_id(0) // (KV_HEADS * GROUP)
    of_head = tl.program_id(0) % (KV_HEADS * GROUP)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < VALUE_DIM
    line = work + tl.program_id(1) * FIELDS
    start = tl.load(line).to(tl.int32) + OPENING
    units = tl.load(line + 1).to(tl.int32)
    many = tl.load(line + 10).to(tl.int32)
    token = tl.load(line + 9) + query
    quota = tl.load(total)
    first = start // quota
    parts = (start + units - 1) // quota - first + 1
    at = out + token * out_token + of_head * out_head + c
    lse_at = lse + token * lse_token + of_head * lse_head
    if PDL:
        tl.extra.cuda.gdc_wait()
    if query < many:
        if units == 0:
            tl.store(at, tl.zeros([COLUMNS], out.dtype.element_ty), mask=inside)
            tl.store(lse_at, float("-inf"))
        elif parts > 1:
            head = of_head // GROUP
            m = query * GROUP + of_head % GROUP
            step = KV_HEADS * tiles * ROWS
            i = tl.arange(0, WORKERS)
            place = ((first + i) * 2 + (i == 0).to(tl.int32)).to(tl.int64) * step
            place += head * tiles * ROWS + m
            log = tl.load(part_lse + place, mask=i < parts, other=float("-inf"))
            top = tl.max(log, 0)
            base = tl.where(top == float("-inf"), 0.0, top)
            sum_ = tl.sum(tl.exp2(log - base), 0)
            acc = tl.zeros([COLUMNS], tl.float32)
            for done in range(0, parts, CHUNK):
                j = done + tl.arange(0, CHUNK)
                at_part = ((first + j) * 2 + (j == 0).to(tl.int32)).to(tl.int64) * step
                at_part += head * tiles * ROWS + m
                one = tl.load(part_lse + at_part, mask=j < parts, other=float("-inf"))
                rows = part + at_part[:, None] * VALUE + c[None, :]
                found = tl.load(rows, mask=(j < parts)[:, None], other=0.0)
                acc += tl.sum(found * tl.exp2(one - base)[:, None], 0)
            some = sum_ != 0.0
            sum_ = tl.where(some, sum_, 1.0)
            tl.store(at, (acc / sum_).to(out.dtype.element_ty), mask=inside)
            whole = tl.where(some, top + tl.log2(sum_), float("-inf"))
            tl.store(lse_at, whole * lse_scale)
