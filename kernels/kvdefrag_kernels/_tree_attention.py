# mypy: ignore-errors
"""Device program of `tree_attention`: attend to one worker's share of the units."""

import triton
import triton.language as tl

from ._attention_work import CHAIN, FIELDS, FULL, OPENING, TREE


@triton.jit
def _share(line, quota, worker):
    # The units of one request that fall to one worker, and whether it is the only one.
    start = tl.load(line).to(tl.int32) + OPENING
    units = tl.load(line + 1).to(tl.int32)
    low = tl.minimum(tl.maximum(worker * quota - start, 0), units)
    high = tl.minimum(tl.maximum((worker + 1) * quota - start, 0), units)
    return low, high, start // quota, (start + units - 1) // quota


@triton.jit
def _weigh(s, top, factor, inner, keep, CAP: tl.constexpr, MASKED: tl.constexpr):
    if CAP:
        s = factor - 2.0 * factor / (1.0 + tl.exp2(s * inner))  # factor * tanh
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    # A query that has seen nothing yet keeps -inf, of which no difference may be taken.
    base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    return tl.exp2(s - base[:, None]), tl.exp2(top - base), new


@triton.jit
def _absorb(
    qa, qb, ka, kb, v, acc, top, total, factor, inner, keep, always,
    ROPE: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    # One unit of online softmax in base 2; `factor` turns a score into an exponent.
    if APART:
        # Behind a branch, and the halves scaled before they are added, for the compiler's sake:
        # where one product feeds another, it has every warp group compute the first one whole.
        if always:
            scale = 1.0 if CAP else factor
            s = tl.dot(qa, tl.trans(ka)) * scale
            if ROPE > 0:
                s += tl.dot(qb, tl.trans(kb)) * scale
            p, shrink, new = _weigh(s, top, factor, inner, keep, CAP, MASKED)
            total = total * shrink + tl.sum(p, 1)
            p = p.to(v.dtype)
        else:
            p = tl.zeros([qa.shape[0], ka.shape[0]], v.dtype)
            shrink = top
            new = top
    else:
        s = tl.dot(qa, tl.trans(ka))
        if ROPE > 0:
            s = tl.dot(qb, tl.trans(kb), s)
        if not CAP:
            s *= factor
        p, shrink, new = _weigh(s, top, factor, inner, keep, CAP, MASKED)
        total = total * shrink + tl.sum(p, 1)
        p = p.to(v.dtype)
    acc = acc * shrink[:, None]
    acc = tl.dot(p, v, acc)
    return acc, new, total


@triton.jit
def _rows(
    k, v, slot, seen, KEY_SLOT: tl.constexpr, VALUE_SLOT: tl.constexpr, LATENT: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    # Gather a unit's rows by slot. Offsets are 64-bit: pools outgrow 2^31 elements.
    at = k + slot.to(tl.int64)[:, None] * KEY_SLOT
    a = tl.arange(0, NOPE)
    if MASKED:
        ka = tl.load(at + a[None, :], mask=seen[:, None], other=0.0)
    else:
        ka = tl.load(at + a[None, :])
    kb = ka
    if ROPE > 0:
        b = NOPE + tl.arange(0, ROPE)
        if MASKED:
            kb = tl.load(at + b[None, :], mask=seen[:, None], other=0.0)
        else:
            kb = tl.load(at + b[None, :])
    vv = ka
    if not LATENT:
        c = tl.arange(0, VALUE)
        there = v + slot.to(tl.int64)[:, None] * VALUE_SLOT + c[None, :]
        if MASKED:
            vv = tl.load(there, mask=seen[:, None] & (c[None, :] < VALUE_DIM), other=0.0)
        elif VALUE == VALUE_DIM:
            vv = tl.load(there)
        else:
            vv = tl.load(there, mask=c[None, :] < VALUE_DIM, other=0.0)
    return ka, kb, vv


@triton.jit(
    do_not_specialize=["factor", "inner", "value_scale", "lse_scale", "tiles"],
    do_not_specialize_on_alignment=["mask", "work", "spans", "total", "lse", "part_lse"],
)
def attend(
    qa, qa_token, qa_head, qb, qb_token, qb_head, k, v, key_map, rope_map, value_map,
    mask, work, spans, total, factor, inner, value_scale, lse_scale, tiles,  # inputs
    part, part_lse, out, out_token, out_head, lse, lse_token, lse_head,  # outputs
    KEY_SLOT: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_SLOT: tl.constexpr,
    VALUE_HEAD: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SEES: tl.constexpr, CAP: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, MAPPED: tl.constexpr, WIDE_SLOTS: tl.constexpr,
    WIDE_TREE: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
    PAGE_STAGES: tl.constexpr, APART: tl.constexpr, HELD: tl.constexpr,
    PDL: tl.constexpr,  # constants
):  # fmt: skip
    SLOT: tl.constexpr = tl.int64 if WIDE_SLOTS else tl.int32
    TREE_SLOT: tl.constexpr = tl.int64 if WIDE_TREE else tl.int32
    PARTS: tl.constexpr = PAGE // TOKENS
    # Programs that read the same tokens run side by side, so that the cache serves all but one.
    nth = tl.program_id(0) % (tiles * KV_HEADS)
    worker = tl.program_id(0) // (tiles * KV_HEADS)
    head = nth % KV_HEADS
    tile = nth // KV_HEADS
    m = tile * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, TOKENS)
    a = tl.arange(0, NOPE)
    c = tl.arange(0, VALUE)
    query = m // GROUP
    of_head = head * GROUP + m % GROUP
    quota = tl.load(total)
    always = quota > 0
    k += head * KEY_HEAD
    v += head * VALUE_HEAD
    final = tl.load(spans + worker * 2 + 1)
    for r in range(tl.load(spans + worker * 2), final + 1):
        line = work + r * FIELDS
        low, high, first_worker, last_worker = _share(line, quota, worker)
        many = tl.load(line + 10).to(tl.int32)
        if (high > low) & (tile * ROWS < many * GROUP):
            in_pages = tl.load(line + 2).to(tl.int32)
            full = tl.load(line + 3).to(tl.int32)
            token = tl.load(line + 9) + query
            live = query < many
            qa_at = qa + token[:, None] * qa_token + of_head[:, None] * qa_head
            q_nope = tl.load(qa_at + a[None, :], mask=live[:, None], other=0.0).to(DOT)
            q_rope = q_nope
            if ROPE > 0:
                b = tl.arange(0, ROPE)
                qb_at = qb + token[:, None] * qb_token + of_head[:, None] * qb_head
                q_rope = tl.load(qb_at + b[None, :], mask=live[:, None], other=0.0).to(DOT)
            acc = tl.zeros([ROWS, VALUE], tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            sum_ = tl.zeros([ROWS], tl.float32)

            if PAGED:
                pages = tl.load(line + 8).to(tl.pointer_type(tl.int32))
                end = tl.minimum(high, in_pages)
                # The next page's number is on its way while this page is read; HELD, so are its
                # rows, in registers: copies into shared memory are left out where rows of 8 bits
                # are wanted in two layouts.
                page = tl.load(pages + low // PARTS, mask=low < end, other=0)
                if HELD:
                    ha, hb, hv = _rows(
                        k, v, page * PAGE + (low % PARTS) * TOKENS + n, n >= 0, KEY_SLOT,
                        VALUE_SLOT, LATENT, NOPE, ROPE, VALUE, VALUE_DIM, False,
                    )  # fmt: skip
                    page = tl.load(pages + (low + 1) // PARTS, mask=low + 1 < end, other=0)
                for u in tl.range(low, end, num_stages=PAGE_STAGES):
                    if HELD:
                        after = tl.load(pages + (u + 2) // PARTS, mask=u + 2 < end, other=0)
                        ka, kb, vv = ha, hb, hv
                        ha, hb, hv = _rows(
                            k, v, page * PAGE + ((u + 1) % PARTS) * TOKENS + n, n >= 0, KEY_SLOT,
                            VALUE_SLOT, LATENT, NOPE, ROPE, VALUE, VALUE_DIM, False,
                        )  # fmt: skip
                    else:
                        after = tl.load(pages + (u + 1) // PARTS, mask=u + 1 < end, other=0)
                        first = page * PAGE + (u % PARTS) * TOKENS
                        if MAPPED:
                            ka = key_map.load([first, head * KEY_HEAD])
                            kb = ka
                            if ROPE > 0:
                                kb = rope_map.load([first, head * KEY_HEAD + NOPE])
                            vv = ka
                            if not LATENT:
                                vv = value_map.load([first, head * VALUE_HEAD])
                        else:
                            ka, kb, vv = _rows(
                                k, v, first + n, n >= 0, KEY_SLOT, VALUE_SLOT, LATENT, NOPE, ROPE,
                                VALUE, VALUE_DIM, False,
                            )  # fmt: skip
                    ka = ka.to(DOT)
                    kb = kb.to(DOT) if ROPE > 0 else ka
                    vv = ka if LATENT else vv.to(DOT)
                    acc, top, sum_ = _absorb(
                        q_nope, q_rope, ka, kb, vv, acc, top, sum_, factor, inner, live,
                        always, ROPE, CAP, False, APART,
                    )  # fmt: skip
                    page = after

            singles = tl.load(line + 6).to(tl.pointer_type(SLOT))
            begin = tl.maximum(low - in_pages, 0)
            end = tl.minimum(high - in_pages, full)
            slot = tl.load(singles + begin * TOKENS + n, mask=n < (end - begin) * TOKENS, other=0)
            if HELD:
                ga, gb, gv = _rows(
                    k, v, slot, n >= 0, KEY_SLOT, VALUE_SLOT, LATENT, NOPE, ROPE, VALUE, VALUE_DIM,
                    False,
                )  # fmt: skip
                ahead = singles + (begin + 1) * TOKENS
                slot = tl.load(ahead + n, mask=n < (end - begin - 1) * TOKENS, other=0)
            for u in tl.range(begin, end, num_stages=STAGES):
                if HELD:
                    ka, kb, vv = ga, gb, gv
                    ga, gb, gv = _rows(
                        k, v, slot, n >= 0, KEY_SLOT, VALUE_SLOT, LATENT, NOPE, ROPE, VALUE,
                        VALUE_DIM, False,
                    )  # fmt: skip
                    ahead = singles + (u + 2) * TOKENS
                    after = tl.load(ahead + n, mask=n < (end - u - 2) * TOKENS, other=0)
                else:
                    ahead = singles + (u + 1) * TOKENS
                    after = tl.load(ahead + n, mask=n < (end - u - 1) * TOKENS, other=0)
                    ka, kb, vv = _rows(
                        k, v, slot, n >= 0, KEY_SLOT, VALUE_SLOT, LATENT, NOPE, ROPE, VALUE,
                        VALUE_DIM, False,
                    )  # fmt: skip
                ka = ka.to(DOT)
                kb = kb.to(DOT) if ROPE > 0 else ka
                vv = ka if LATENT else vv.to(DOT)
                acc, top, sum_ = _absorb(
                    q_nope, q_rope, ka, kb, vv, acc, top, sum_, factor, inner, live,
                    always, ROPE, CAP, False, APART,
                )  # fmt: skip
                slot = after

            tail = tl.load(line + 4).to(tl.int32)
            tree = tl.load(line + 5).to(tl.int32)
            branch = tl.load(line + 7).to(tl.pointer_type(TREE_SLOT))
            masks = mask + tl.load(line + 11) + query.to(tl.int64)[:, None] * tl.load(line + 12)
            singles += full * TOKENS
            begin = tl.maximum(low - in_pages - full, 0)
            for u in tl.range(begin, high - in_pages - full, num_stages=1):
                j = u * TOKENS + n
                t = j - tail
                in_tail = j < tail
                in_tree = (t >= 0) & (t < tree)
                where = tl.load(singles + j, mask=in_tail, other=0).to(tl.int64)
                where += tl.load(branch + t, mask=in_tree, other=0).to(tl.int64)
                there = live[:, None] & (in_tail | in_tree)[None, :]
                if SEES == CHAIN:
                    there = there & (in_tail[None, :] | (t[None, :] <= query[:, None]))
                elif SEES == TREE:
                    byte = tl.load(masks + t[None, :], mask=there & in_tree[None, :], other=1)
                    there = there & (byte != 0)
                elif SEES == FULL:
                    byte = tl.load(masks + j[None, :], mask=there, other=0)
                    there = there & (byte != 0)
                # A row that no query here may see is not even read: 0 * NaN would be NaN.
                seen = tl.max(there.to(tl.int32), 0) > 0
                ka, kb, vv = _rows(
                    k, v, where, seen, KEY_SLOT, VALUE_SLOT, LATENT, NOPE, ROPE, VALUE,
                    VALUE_DIM, True,
                )  # fmt: skip
                ka = ka.to(DOT)
                kb = kb.to(DOT) if ROPE > 0 else ka
                vv = ka if LATENT else vv.to(DOT)
                acc, top, sum_ = _absorb(
                    q_nope, q_rope, ka, kb, vv, acc, top, sum_, factor, inner, there,
                    always, ROPE, CAP, True, APART,
                )  # fmt: skip

            if PDL and r == final:
                tl.extra.cuda.gdc_launch_dependents()
            some = sum_ != 0.0
            acc = acc * (value_scale / tl.where(some, sum_, 1.0))[:, None]
            log = tl.where(some, top + tl.log2(tl.where(some, sum_, 1.0)), float("-inf"))
            if first_worker == last_worker:
                at = out + token[:, None] * out_token + of_head[:, None] * out_head + c[None, :]
                inside = live[:, None] & (c[None, :] < VALUE_DIM)
                tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
                tl.store(lse + token * lse_token + of_head * lse_head, log * lse_scale, mask=live)
            else:
                # A worker holds two parts at most: of a request that it goes on with, and of one
                # that it leaves to the next worker.
                nth_part = worker * 2 + (worker == first_worker).to(tl.int32)
                place = (nth_part.to(tl.int64) * KV_HEADS + head) * tiles * ROWS + m
                tl.store(part + place[:, None] * VALUE + c[None, :], acc)
                tl.store(part_lse + place, log)
