"""Attention in float64 and plain torch: what the kernels are judged against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .attention_geometry import Geometry, Visible


def visible_tokens(
    visible: Visible,
    prefix: int,
    queries: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return bool [queries, tokens] for one request of `prefix` tokens and then its tree.

    `mask` holds the request's own bytes, flat, laid out as `visible` says. With ALL the tokens are
    the prefix alone.
    """
    if visible is Visible.ALL:
        return torch.ones(queries, prefix, dtype=torch.bool)
    seen = torch.ones(queries, prefix + queries, dtype=torch.bool)
    if visible is Visible.CHAIN:
        seen[:, prefix:] = torch.ones(queries, queries, dtype=torch.bool).tril()
        return seen
    if mask is None:
        raise ValueError(f"mask must be given where visible is {visible.value}")
    if visible is Visible.TREE:
        seen[:, prefix:] = mask.cpu().view(queries, queries) != 0
        return seen
    whole = mask.cpu().view(queries, prefix + queries) != 0
    if visible is Visible.FULL:
        return whole
    seen[:, prefix:] = whole[:, prefix:]
    return seen


def tree_attention_torch(
    geometry: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slots: Sequence[torch.Tensor],
    seen: Sequence[torch.Tensor],
    *,
    scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    natural: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `tree_attention`: float64 `out` [tokens, heads, v_dim], `lse` [tokens, heads].

    `slots[i]` names request i's tokens in order and `seen[i]`, bool [queries, tokens], what each of
    its queries sees; its queries follow those of request i - 1 in `q`. Holds one request's scores
    at a time.
    """
    g = geometry
    keys = k.unsqueeze(1) if k.ndim == 2 else k
    values = keys[..., : g.v_dim] if v is None else v.unsqueeze(1) if v.ndim == 2 else v
    outs, logs = [], []
    first = 0
    for at, see in zip(slots, seen, strict=True):
        queries = see.shape[0]
        rows = q[first : first + queries].double().view(queries, g.kv_heads, g.group, g.k_dim)
        first += queries
        at, see = at.to(keys.device).long(), see.to(keys.device)
        out, log = _attend(
            rows, _rows(keys, at, see) * k_scale, _rows(values, at, see) * v_scale, see,
            scale, logit_cap,
        )  # fmt: skip
        outs.append(out.flatten(1, 2))
        logs.append(log.flatten(1, 2) / (1.0 if natural else math.log(2.0)))
    if not outs:
        return q.new_zeros(0, g.heads, g.v_dim).double(), q.new_zeros(0, g.heads).double()
    return torch.cat(outs), torch.cat(logs)


def merge_attention_torch(
    parts: torch.Tensor, lses: torch.Tensor, *, natural: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `merge_attention`: float64 [..., dim] and [...]."""
    base = 1.0 if natural else math.log(2.0)
    empty = torch.isinf(lses)
    logs = torch.where(empty, -math.inf, lses.double() * base)
    lse = torch.logsumexp(logs, 0)
    some = lse != -math.inf
    weights = torch.where(empty, 0.0, torch.exp(logs - torch.where(some, lse, 0.0)))
    clean = torch.where(empty.unsqueeze(-1), 0.0, parts.double())
    return (clean * weights.unsqueeze(-1)).sum(0), lse / base


def _rows(buffer: torch.Tensor, at: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
    # Through bytes: fp8 has no indexing on the CPU. A row that nobody sees may hold anything.
    raw = buffer.contiguous().view(torch.uint8)[at].view(buffer.dtype).double()
    return torch.where(see.any(0).view(-1, 1, 1), raw, 0.0)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, see: torch.Tensor, scale: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # q [queries, kv_heads, group, dim], k and v [tokens, kv_heads, dim]; natural lse.
    score = torch.einsum("qhgd,thd->qhgt", q, k) * scale
    if cap > 0:
        score = cap * torch.tanh(score / cap)
    score = score.masked_fill(~see[:, None, None, :], -math.inf)
    log = torch.logsumexp(score, -1)
    weight = torch.exp(score - torch.where(log == -math.inf, 0.0, log).unsqueeze(-1))
    return torch.einsum("qhgt,thd->qhgd", weight, v), log
