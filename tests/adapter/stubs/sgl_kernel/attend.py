"""Attention of SGLang's `intel_amx` backend, the one CPU backend that knows tree masks."""

from __future__ import annotations

import torch

_TENSOR = torch.Tensor


def _attend(q, k, v, scale, visible, cap):
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if cap and cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def _extend(q, k, v, out, pool, batch, counts, starts, scale, cap, options):
    k_pool, v_pool = pool
    table, rows, lengths = batch
    masks = _masks(options["tree_mask"], lengths, counts, options["is_causal"])
    for b, row in enumerate(rows.tolist()):
        end, new = int(lengths[b]), int(counts[b])
        if not new:
            continue
        here = slice(int(starts[b]), int(starts[b]) + new)
        slots = table[row, :end].long()
        keys, values = k_pool[slots], v_pool[slots]
        # The prefix comes from the pool, the new tokens from the arguments.
        if k is not None:
            keys[end - new :] = k[here].view(new, *keys.shape[1:])
        if v is not None:
            values[end - new :] = v[here].view(new, *values.shape[1:])
        out[here] = _attend(q[here], keys, values, scale, masks[b], cap).to(out.dtype)


def _masks(tree, lengths, counts, causal):
    lengths, counts = lengths.tolist(), counts.tolist()
    found = []
    pairs = list(zip(lengths, counts, strict=True))
    if tree is not None:
        tree, at = tree.view(-1).bool(), 0
        nodes_only = tree.numel() == sum(n * n for n in counts)
    for end, new in pairs:
        visible = torch.ones(new, end, dtype=torch.bool)
        if tree is not None:
            width = new if nodes_only else end
            visible[:, end - width :] = tree[at : at + new * width].view(new, width)
            at += new * width
        elif causal:
            visible = visible.tril(end - new)
        found.append(visible)
    return found


def extend_attention_cpu(q, k, v, out, k_pool, v_pool, *rest):
    """Attend from new tokens; they may form a tree."""
    if isinstance(rest[0], _TENSOR):  # 0.5.17 passes no scales of the pool
        rest = (1.0, 1.0, *rest)
    _, _, table, rows, lengths, counts, starts, _, scale, cap, *more = rest
    names = ("cross", "window", "encoder_lens", "sinks", "tree_mask", "is_causal")
    options = {"tree_mask": None, "is_causal": True} | dict(zip(names, more, strict=False))
    _refuse(options)
    pool, batch = (k_pool, v_pool), (table, rows, lengths)
    _extend(q, k, v, out, pool, batch, counts, starts, scale, cap, options)


def decode_attention_cpu(q, k_pool, v_pool, *rest):
    """Attend from one token to each request, which is written into the pool first."""
    if isinstance(rest[0], _TENSOR):
        rest = (1.0, 1.0, *rest)
    _, _, out, k, v, places, _, table, rows, lengths, scale, cap, *more = rest
    _refuse(dict(zip(("cross", "window", "encoder_lens", "sinks"), more, strict=False)))
    shared = k_pool.data_ptr() == v_pool.data_ptr()
    for pool, new in ((k_pool, k), (v_pool, None if shared else v)):
        if new is not None:
            pool[places] = new.reshape(len(places), *pool.shape[1:]).to(pool.dtype)
    for b, row in enumerate(rows.tolist()):
        slots = table[row, : int(lengths[b])].long()
        visible = torch.ones(1, slots.numel(), dtype=torch.bool)
        found = _attend(q[b : b + 1], k_pool[slots], v_pool[slots], scale, visible, cap)
        out[b : b + 1] = found.to(out.dtype)


def _refuse(options):
    for name in ("cross", "window", "encoder_lens", "sinks"):
        value = options.get(name)
        unset = value is None or value is False or (name == "window" and value <= 0)
        assert unset, name


torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
