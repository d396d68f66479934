"""One layer's call, and what of it is left to stock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvdefrag.attention import Kind, Numbers
from kvdefrag.sglang.attention_compat import is_plain
from kvdefrag.sglang.attention_steps import Described
from kvdefrag.sglang.attention_support import Rows

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Layer(NamedTuple):
    """What a layer's kernel is called with.

    Attributes:
        q, out: [tokens, heads, dim].
        k, v: The pool's buffers.
        indptr: Where the requests' slots begin; tells windows from whole prefixes.
        mask: Of the tree, or None.
        numbers: Factors of scores and values.
        plain: Whether nothing else is asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    indptr: Tensor
    mask: Tensor | None
    numbers: Numbers
    plain: bool


ReadCall = Callable[[tuple[Any, ...], dict[str, Any]], Layer]


def decode_call(args: tuple[Any, ...], more: dict[str, Any]) -> Layer:
    """Read a call of `decode_attention_fwd`."""
    q, k, v, out, indptr, *_, scale, k_scale, v_scale = args
    numbers = Numbers(scale, more.get("logit_cap", 0.0), k_scale, v_scale)
    return Layer(q, k, v, out, indptr, None, numbers, is_plain(more))


def extend_call(args: tuple[Any, ...], more: dict[str, Any]) -> Layer:
    """Read a call of `extend_attention_fwd`; the new rows are read from the pool instead."""
    (q, _, _, out, k, v, _, indptr, _, mask, causal, _, _, k_scale, v_scale, scale) = args
    numbers = Numbers(scale, more.get("logit_cap", 0.0), k_scale, v_scale)
    plain = is_plain(more) and (bool(causal) or mask is not None)
    return Layer(q, k, v, out, indptr, mask, numbers, plain)


def why_not(layer: Layer, described: Described, rows: Rows) -> str:
    """Return why stock is to serve a layer; empty if we do."""
    task, numbers, g = described.task, layer.numbers, rows.geometry
    tokens = (described.step.indptr.numel() - 1) * task.queries
    if not layer.plain:
        return "sinks, windows, score changes, or a tree that is not in the pool"
    if layer.indptr is not described.metadata.kv_indptr:
        return "a window of the prefix"
    if (layer.mask is not None) != (task.kind is Kind.TREE):
        return "a mask that the step did not have"
    if layer.q.shape != (tokens, g.heads, g.k_dim) or layer.out.shape != (tokens, g.heads, g.v_dim):
        return "queries of another shape"
    if layer.k.shape[1:] != (g.kv_heads, g.k_dim) or layer.v.shape[1:] != (g.kv_heads, g.v_dim):
        return "rows of another shape"
    if layer.k.dtype is not rows.dtype or layer.k.dtype not in (layer.q.dtype, *_FP8):
        return "rows of another type"
    if layer.k.dtype not in _FP8 and (numbers.k_scale, numbers.v_scale) != (1.0, 1.0):
        return "scales of rows that are not in 8 bits"
    if not 0.0 < numbers.scale < math.inf or not described.provider.takes(numbers):
        return "factors that the provider does not take"
    return ""
