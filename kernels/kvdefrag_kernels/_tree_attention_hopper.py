# mypy: ignore-errors
"""`attend` of `_tree_attention` for latent rows on Hopper GPUs, in Gluon.

The same work, arguments and results. Written out: two warp groups share a unit's keys in the first
product and the values' columns in the second, one wait a product, copies two units ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._attention_work import CHAIN, FIELDS, FULL, OPENING, TREE

# Triton 3.6 has the one, later ones the other.
copy_in = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)


@gluon.jit
def _unit(
    u, pages, singles, branch, masks_at, in_pages, full, tail, tree, first_query, last_query,
    mask_step, PAGED: gl.constexpr, PAGE: gl.constexpr, SEES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    # Slots of a unit, and which of them some query here may see: the others are not read.
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    rest = u - in_pages - full
    slot = n
    seen = n >= 0
    if rest >= 0:
        j = rest * 64 + n
        t = j - tail
        in_tail = j < tail
        in_tree = (t >= 0) & (t < tree)
        slot = gl.load(singles + full * 64 + j, mask=in_tail, other=0).to(gl.int32)
        slot += gl.load(branch + t, mask=in_tree, other=0).to(gl.int32)
        seen = in_tail | in_tree
        if SEES == CHAIN:
            seen = seen & (in_tail | (t <= last_query))
        elif SEES == TREE:
            found = n * 0
            for q in range(first_query, last_query + 1):
                byte = gl.load(masks_at + q * mask_step + t, mask=in_tree, other=0)
                found = found | byte.to(gl.int32)
            seen = in_tail | (in_tree & (found != 0))
        elif SEES == FULL:
            found = n * 0
            for q in range(first_query, last_query + 1):
                byte = gl.load(masks_at + q * mask_step + j, mask=seen, other=0)
                found = found | byte.to(gl.int32)
            seen = seen & (found != 0)
    else:
        if PAGED:
            if u < in_pages:
                page = gl.load(pages + u // (PAGE // 64))
                slot = page * PAGE + (u % (PAGE // 64)) * 64 + n
            else:
                slot = gl.load(singles + (u - in_pages) * 64 + n).to(gl.int32)
        else:
            slot = gl.load(singles + u * 64 + n).to(gl.int32)
    return slot, seen


@gluon.jit
def _fetch(
    k, ka, kb, slot, seen, KEY_SLOT: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    at = gl.expand_dims(k + slot.to(gl.int64) * KEY_SLOT, 1)
    a = gl.expand_dims(gl.arange(0, NOPE, layout=gl.SliceLayout(0, COPY)), 0)
    b = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY)), 0) + NOPE
    live = gl.expand_dims(seen, 1)
    copy_in(ka, at + a, mask=live)
    copy_in(kb, at + b, mask=live)


@gluon.jit(
    do_not_specialize=["factor", "inner", "value_scale", "lse_scale", "tiles"],
    do_not_specialize_on_alignment=["mask", "work", "spans", "total", "lse", "part_lse"],
)
def attend_latent(
    qa, qa_token, qa_head, qb, qb_token, qb_head, k,
    mask, work, spans, total, factor, inner, value_scale, lse_scale, tiles,  # inputs
    part, part_lse, out, out_token, out_head, lse, lse_token, lse_head,  # outputs
    KEY_SLOT: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, GROUP: gl.constexpr,
    SEES: gl.constexpr, CAP: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr,
    WIDE_SLOTS: gl.constexpr, WIDE_TREE: gl.constexpr, PDL: gl.constexpr,  # constants
):  # fmt: skip
    SLOT: gl.constexpr = gl.int64 if WIDE_SLOTS else gl.int32
    TREE_SLOT: gl.constexpr = gl.int64 if WIDE_TREE else gl.int32
    DOT: gl.constexpr = k.dtype.element_ty
    # Eight lanes copy 128 bytes of a row: two rows a thread, hence two addresses.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, NOPE // 2, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    OF_VALUE: gl.constexpr = gl.SliceLayout(1, VALUE)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(128 if ROPE >= 64 else 2 * ROPE, 16, 2)
    nth = gl.program_id(0) % tiles
    worker = gl.program_id(0) // tiles
    quota = gl.load(total)
    q_nope = gl.allocate_shared_memory(DOT, [64, NOPE], SHARED)
    q_rope = gl.allocate_shared_memory(DOT, [64, ROPE], NARROW)
    key_a = gl.allocate_shared_memory(DOT, [2, 64, NOPE], SHARED)
    key_b = gl.allocate_shared_memory(DOT, [2, 64, ROPE], NARROW)
    weight = gl.allocate_shared_memory(DOT, [64, 64], SHARED)
    final = gl.load(spans + worker * 2 + 1)
    for r in range(gl.load(spans + worker * 2), final + 1):
        line = work + r * FIELDS
        start = gl.load(line).to(gl.int32) + OPENING
        units = gl.load(line + 1).to(gl.int32)
        low = gl.minimum(gl.maximum(worker * quota - start, 0), units)
        high = gl.minimum(gl.maximum((worker + 1) * quota - start, 0), units)
        many = gl.load(line + 10).to(gl.int32)
        if (high > low) & (nth * 64 < many * GROUP):
            in_pages = gl.load(line + 2).to(gl.int32)
            full = gl.load(line + 3).to(gl.int32)
            tail = gl.load(line + 4).to(gl.int32)
            tree = gl.load(line + 5).to(gl.int32)
            singles = gl.load(line + 6).to(gl.pointer_type(SLOT))
            branch = gl.load(line + 7).to(gl.pointer_type(TREE_SLOT))
            pages = gl.load(line + 8).to(gl.pointer_type(gl.int32))
            first_token = gl.load(line + 9)
            masks_at = mask + gl.load(line + 11)
            mask_step = gl.load(line + 12)
            first_query = nth * 64 // GROUP
            last_query = gl.minimum((nth * 64 + 63) // GROUP, many - 1)

            # Queries: through the copy's layout into shared memory, rows past the last as zeros.
            m = nth * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
            live = gl.expand_dims(m // GROUP < many, 1)
            token = first_token + m // GROUP
            a = gl.expand_dims(gl.arange(0, NOPE, layout=gl.SliceLayout(0, COPY)), 0)
            at = gl.expand_dims(qa + token * qa_token + (m % GROUP) * qa_head, 1)
            copy_in(q_nope, at + a, mask=live)
            b = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY)), 0)
            at = gl.expand_dims(qb + token * qb_token + (m % GROUP) * qb_head, 1)
            copy_in(q_rope, at + b, mask=live)
            slot, seen = _unit(
                low, pages, singles, branch, masks_at, in_pages, full, tail, tree, first_query,
                last_query, mask_step, PAGED, PAGE, SEES, COPY,
            )  # fmt: skip
            _fetch(k, key_a.index(0), key_b.index(0), slot, seen, KEY_SLOT, NOPE, ROPE, COPY)
            async_copy.commit_group()
            if low + 1 < high:
                slot, seen = _unit(
                    low + 1, pages, singles, branch, masks_at, in_pages, full, tail, tree,
                    first_query, last_query, mask_step, PAGED, PAGE, SEES, COPY,
                )  # fmt: skip
                _fetch(k, key_a.index(1), key_b.index(1), slot, seen, KEY_SLOT, NOPE, ROPE, COPY)
            async_copy.commit_group()

            acc = gl.zeros([64, NOPE], gl.float32, VALUE)
            top = gl.full([64], float("-inf"), gl.float32, OF_ROW)
            sums = gl.zeros([64, 64], gl.float32, SCORE)
            row = nth * 64 + gl.arange(0, 64, layout=OF_ROW)
            column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, SCORE)), 0)
            for u in range(low, high):
                ka = key_a.index((u - low) % 2)
                kb = key_b.index((u - low) % 2)
                async_copy.wait_group(1)
                fence_async_shared()
                s = gl.zeros([64, 64], gl.float32, SCORE)
                s = warpgroup_mma(q_rope, kb.permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma(q_nope, ka.permute((1, 0)), s, is_async=True)
                if u + 2 < high:
                    slot, seen = _unit(
                        u + 2, pages, singles, branch, masks_at, in_pages, full, tail, tree,
                        first_query, last_query, mask_step, PAGED, PAGE, SEES, COPY,
                    )  # fmt: skip
                s = warpgroup_mma_wait(0, deps=[s])
                if CAP:
                    s = 1.0 - 2.0 / (1.0 + gl.exp2(s * inner))  # tanh
                s = s * factor
                rest = u - in_pages - full
                if rest >= 0:
                    query = gl.expand_dims(row // GROUP, 1)
                    j = rest * 64 + column
                    t = j - tail
                    there = (query < many) & (j < tail + tree)
                    if SEES == CHAIN:
                        there = there & (t <= query)
                    elif SEES == TREE:
                        bytes_at = masks_at + query * mask_step + t
                        byte = gl.load(bytes_at, mask=there & (t >= 0), other=1)
                        there = there & (byte != 0)
                    elif SEES == FULL:
                        byte = gl.load(masks_at + query * mask_step + j, mask=there, other=0)
                        there = there & (byte != 0)
                    s = gl.where(there, s, float("-inf"))
                new = gl.maximum(top, gl.max(s, 1))
                # A query that has seen nothing yet keeps -inf: no difference may be taken of it.
                base = gl.where(new == float("-inf"), 0.0, new)
                p = gl.exp2(s - gl.expand_dims(base, 1))
                weight.store(p.to(DOT))
                fence_async_shared()
                shrink = gl.exp2(top - base)
                top = new
                sums = sums * gl.expand_dims(shrink, 1) + p
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, OF_VALUE), 1)
                acc = warpgroup_mma(weight, ka, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                if u + 2 < high:
                    _fetch(k, ka, kb, slot, seen, KEY_SLOT, NOPE, ROPE, COPY)
                async_copy.commit_group()
            async_copy.wait_group(0)

            if PDL and r == final:
                gl.inline_asm_elementwise(
                    "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
                    is_pure=False, pack=1,
                )  # fmt: skip
            sum_ = gl.sum(sums, 1)
            some = sum_ != 0.0
            sum_ = gl.where(some, sum_, 1.0)
            log = gl.where(some, top + gl.log2(sum_), float("-inf"))
            acc = acc * gl.expand_dims(gl.convert_layout(value_scale / sum_, OF_VALUE), 1)
            c = gl.expand_dims(gl.arange(0, NOPE, layout=gl.SliceLayout(0, VALUE)), 0)
            wide = nth * 64 + gl.arange(0, 64, layout=OF_VALUE)
            if start // quota == (start + units - 1) // quota:
                to = out + (first_token + wide // GROUP) * out_token + (wide % GROUP) * out_head
                inside = gl.expand_dims(wide // GROUP < many, 1)
                gl.store(gl.expand_dims(to, 1) + c, acc.to(out.dtype.element_ty), mask=inside)
                log_at = lse + (first_token + row // GROUP) * lse_token
                log_at += (row % GROUP) * lse_head
                gl.store(log_at, log * lse_scale, mask=row // GROUP < many)
            else:
                nth_part = worker * 2 + (worker == start // quota).to(gl.int32)
                place = nth_part.to(gl.int64) * tiles * 64
                gl.store(part + gl.expand_dims((place + wide) * NOPE, 1) + c, acc)
                gl.store(part_lse + place + row, log)
