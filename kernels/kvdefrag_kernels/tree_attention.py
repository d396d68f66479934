"""Attention of decode and tree-verify steps over pools whose slots lie anywhere."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from ._load import interpreted, need_device, overlaps_launches, programs
from .attention_geometry import FP8, SEES, WIDE, Visible
from .attention_metadata import AttentionPlan

COMBINE_PROGRAMS, COMBINE_BLOCK, COMBINE_WARPS = 2048, 4096, 4
LOG2E = 1.0 / math.log(2.0)


def tree_attention(
    plan: AttentionPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    q_rope: torch.Tensor | None = None,
    scale: float,
    mask: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    natural: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend for every query of the plan; returns `out` [tokens, heads, v_dim], `lse` float32.

    `q` is bfloat16 or float16 [tokens, heads, k_dim], or its first part beside `q_rope`. `k` is
    [slots, kv_heads, k_dim] (or [slots, k_dim] for one head), in the dtype of `q` or fp8 with
    `k_scale` and `v_scale`; `v` [slots, kv_heads, v_dim], None where values are latent. Scores are
    `scale * k_scale * q.k`, with `logit_cap` c > 0 then c * tanh(score / c). `mask`: bytes, 0 =
    hidden, as the plan's `visible` says. `lse` [tokens, heads] is the log-sum-exp of the visible
    scores, base 2, or e with `natural`; a query that sees nothing gets 0 and -inf. Rows that no
    query sees are never used, NaN or not. Partial results are float32. Two launches, no
    synchronisation: capture-safe, lengths are read on the device.
    """
    keys, values = _check(plan, q, q_rope, k, v)
    _check_mask(plan, mask)
    _check_numbers(scale, logit_cap, k_scale, v_scale)
    need_device(q.device, "tree_attention_torch")
    g = plan.space.geometry
    shape = (q.shape[0], g.heads)
    if out is None:
        out = torch.empty(*shape, g.v_dim, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(*shape, dtype=torch.float32, device=q.device)
    _check_out(out, lse, (*shape, g.v_dim), q.device)
    if plan.requests:
        parts = q, q[..., g.nope :] if q_rope is None else q_rope
        numbers = scale * k_scale, logit_cap, v_scale, natural
        call = _call(plan, parts, keys, values, mask, (out, lse), numbers)
        _attend(call)
        _combine(call)
    return out, lse


class _Call(NamedTuple):
    # What the launches of one call share.
    plan: AttentionPlan
    keys: torch.Tensor
    values: torch.Tensor
    queries: tuple[Any, ...]  # the two parts of the queries, with strides
    rest: tuple[Any, ...]  # mask, work, numbers, parts
    outputs: tuple[Any, ...]
    capped: bool
    lse_scale: float
    overlap: bool


def _call(
    plan: AttentionPlan,
    parts: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
    numbers: tuple[float, float, float, bool],
) -> _Call:
    scale, cap, v_scale, natural = numbers
    space, (q, rope), (out, lse) = plan.space, parts, results
    # With a cap the kernel computes tanh through base 2: tanh(x) = 1 - 2 / (1 + 2 ** (2 x / ln 2)).
    inner = 2.0 * LOG2E * scale / cap if cap > 0 else 0.0
    factor = (cap if cap > 0 else scale) * LOG2E
    lse_scale = 1.0 / LOG2E if natural else 1.0
    outputs = out, *out.stride()[:2], lse, *lse.stride()
    rest = (
        space.work if mask is None else mask.view(torch.uint8),
        space.work, space.spans, space.total,
        factor, inner, v_scale, lse_scale, space.tiles,  # inputs
        space.part, space.part_lse, *outputs,  # outputs
    )  # fmt: skip
    queries = q, *q.stride()[:2], rope, *rope.stride()[:2]
    pdl = overlaps_launches(q.device)
    return _Call(plan, keys, values, queries, rest, outputs, cap > 0, lse_scale, pdl)


def _attend(call: _Call) -> None:
    plan, keys, values = call.plan, call.keys, call.values
    space, g, tile = plan.space, plan.space.geometry, plan.space.tile
    grid = (space.workers * space.tiles * g.kv_heads,)
    common: dict[str, Any] = {
        "KEY_SLOT": keys.stride(0), "NOPE": g.nope, "ROPE": g.rope, "GROUP": g.group,
        "SEES": SEES[space.visible], "CAP": call.capped, "PAGED": space.page is not None,
        "PAGE": space.page or tile.tokens, "WIDE_SLOTS": plan.wide_slots,
        "WIDE_TREE": plan.wide_tree, "PDL": call.overlap, "num_warps": tile.warps,
    }  # fmt: skip
    if _hopper(call):
        programs("_tree_attention_hopper").attend_latent[grid](
            *call.queries, keys, *call.rest, **common
        )
        return
    # Copies of 8-bit rows into shared memory are not overlapped where the rows are wanted in two
    # layouts: such rows wait in registers instead, one unit ahead.
    held = keys.dtype in FP8 and tile.rows < 64
    maps = _maps(space.page is not None and call.overlap and not held, plan, keys, values)
    programs("_tree_attention").attend[grid](
        *call.queries, keys, values, *(maps or (keys,) * 3), *call.rest,
        KEY_HEAD=keys.stride(1), VALUE_SLOT=values.stride(0), VALUE_HEAD=values.stride(1),
        LATENT=g.latent, VALUE=g.value, VALUE_DIM=g.v_dim, KV_HEADS=g.kv_heads, ROWS=tile.rows,
        TOKENS=tile.tokens, MAPPED=bool(maps), DOT=_dot_type(keys.dtype),
        STAGES=1 if held else tile.stages, PAGE_STAGES=1 if held else tile.page_stages,
        APART=64 <= tile.rows < 16 * tile.warps, HELD=held, **common,
    )  # fmt: skip


def _combine(call: _Call) -> None:
    space, g, requests = call.plan.space, call.plan.space.geometry, call.plan.requests
    # Few rows: cut their columns, or each program would walk many parts on its own.
    rows = max(1, space.queries * g.heads * requests)
    cuts = 1 if interpreted() else 1 << max(0, (COMBINE_PROGRAMS // rows).bit_length() - 1)
    columns = max(min(g.value, 64), g.value // cuts)
    grid = (space.queries * g.heads, requests, g.value // columns)
    programs("_attention_merge").combine[grid](
        space.work, space.total, space.part, space.part_lse, call.lse_scale, space.tiles,  # inputs
        *call.outputs,  # outputs
        VALUE=g.value, VALUE_DIM=g.v_dim, GROUP=g.group, KV_HEADS=g.kv_heads,
        ROWS=space.tile.rows, WORKERS=max(2, 1 << (space.workers - 1).bit_length()),
        COLUMNS=columns, CHUNK=COMBINE_BLOCK // columns, PDL=call.overlap,
        num_warps=COMBINE_WARPS, **({"launch_pdl": True} if call.overlap else {}),
    )  # fmt: skip


def _hopper(call: _Call) -> bool:
    # Latent rows in 16 bits and tiles of 64 rows, on a Hopper GPU with Gluon beside Triton.
    space, keys, (q, *steps, rope, rope_token, rope_head) = call.plan.space, call.keys, call.queries
    g, tile = space.geometry, space.tile
    aligned = all(t.data_ptr() % 16 == 0 for t in (keys, q, rope)) and all(
        step % 8 == 0 for step in (keys.stride(0), *steps, rope_token, rope_head)
    )
    return (
        g.latent
        and g.rope > 0
        and (tile.rows, tile.tokens, tile.warps) == (64, 64, 8)
        and (space.page is None or space.page >= 64)
        and keys.dtype in WIDE
        and aligned
        and _has_gluon(keys.device)
    )


@functools.cache
def _has_gluon(device: torch.device) -> bool:
    if not overlaps_launches(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    # Gluon changes from version to version: run on 3.6, built with 3.9.
    major, minor = triton.__version__.split(".")[:2]
    return (3, 6) <= (int(major), int(minor)) <= (3, 9)


def _dot_type(dtype: torch.dtype) -> Any:
    # Every fp8 number is a float16 number too. The interpreter cannot multiply bfloat16.
    import triton.language as tl

    if dtype == torch.bfloat16:
        return tl.float32 if interpreted() else tl.bfloat16
    return tl.float16


def _maps(
    wanted: bool, plan: AttentionPlan, keys: torch.Tensor, values: torch.Tensor
) -> tuple[Any, Any, Any] | None:
    # Tensor maps for block loads, where the device has them and the rows are aligned for them.
    if not wanted or any(
        t.stride(0) * t.element_size() % 16 or t.data_ptr() % 16 for t in (keys, values)
    ):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    g, tokens = plan.space.geometry, plan.space.tile.tokens

    def over(rows: torch.Tensor, width: int) -> Any:
        columns = (rows.shape[1] - 1) * rows.stride(1) + rows.shape[2]
        shape, strides = [rows.shape[0], columns], [rows.stride(0), 1]
        return TensorDescriptor(rows, shape, strides, [tokens, width])

    key_map = over(keys, g.nope)
    return (
        key_map,
        over(keys, g.rope) if g.rope else key_map,
        key_map if g.latent else over(values, g.value),
    )


def _check(
    plan: AttentionPlan,
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    g, device = plan.space.geometry, plan.space.work.device
    q_dim = g.k_dim if q_rope is None else g.nope
    _need("q", q, (plan.tokens, g.heads, q_dim), WIDE, device)
    if q_rope is not None:
        _need("q_rope", q_rope, (q.shape[0], g.heads, g.rope), (q.dtype,), device)
    keys = k.unsqueeze(1) if k.ndim == 2 else k
    _need("k", keys, (None, g.kv_heads, g.k_dim), (q.dtype, *FP8), device)
    if (v is None) != g.latent:
        raise ValueError(f"v must be {'None: values are latent' if g.latent else 'given'}")
    values = keys if v is None else v.unsqueeze(1) if v.ndim == 2 else v
    if v is not None:
        _need("v", values, (keys.shape[0], g.kv_heads, g.v_dim), (keys.dtype,), device)
    return keys, values


def _check_mask(plan: AttentionPlan, mask: torch.Tensor | None) -> None:
    visible, device = plan.space.visible, plan.space.work.device
    masked = visible not in (Visible.ALL, Visible.CHAIN)
    if (mask is not None) != masked:
        need = "given" if masked else "None"
        raise ValueError(f"mask must be {need} where visible is {visible.value}")
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.uint8) or not mask.is_contiguous():
        raise ValueError(f"mask must be contiguous bool or uint8, got {mask.dtype}")
    if mask.device != device:
        raise ValueError(f"mask must be on {device}, got {mask.device}")


def _check_numbers(scale: float, logit_cap: float, k_scale: float, v_scale: float) -> None:
    for name, value in (("scale", scale), ("k_scale", k_scale)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}")
    if not 0 <= logit_cap < math.inf:
        raise ValueError(f"logit_cap must be a finite number, 0 for none, got {logit_cap}")
    if not math.isfinite(v_scale):
        raise ValueError(f"v_scale must be a finite number, got {v_scale}")


def _check_out(
    out: torch.Tensor, lse: torch.Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    _need("out", out, shape, (*WIDE, torch.float32), device)
    _need("lse", lse.unsqueeze(-1), (*shape[:2], 1), (torch.float32,), device)


def _need(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    fits = tensor.ndim == len(shape) and all(
        b is None or a == b for a, b in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ["any" if b is None else b for b in shape]
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {list(dtypes)}, got {tensor.dtype}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have contiguous rows, got strides {tensor.stride()}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
