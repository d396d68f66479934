"""Attention kernels of other projects behind one signature: `peer(scene) -> call`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvdefrag_kernels.attention_merge import merge_attention

if TYPE_CHECKING:
    from cases.attention import Scene
    from measure import Run


class Absent(Exception):
    """Why a peer takes no part in a case."""


def flashmla_pages(scene: Scene) -> Run:
    """FlashMLA over pages of 64, causal in place of the tree; its metadata is made beforehand."""
    made, g = _latent(scene)
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    shape = scene.shape
    if not scene.coverage:
        raise Absent("takes whole pages only")
    q = made.q.view(shape.requests, shape.queries, g.heads, g.k_dim)
    cache = made.k.view(-1, 64, 1, g.k_dim)
    table, lengths = made.pages.int().contiguous(), made.lengths.int()
    meta, _ = get_mla_metadata()
    return lambda: flash_mla_with_kvcache(
        q, cache, table, lengths, g.v_dim, meta, None, made.scale, scene.verify
    )


def flashmla_sparse(scene: Scene) -> Run:
    """FlashMLA's sparse prefill over every slot, split by hand, and our merge; no tree mask."""
    made, g = _latent(scene)
    from sgl_kernel.flash_mla import flash_mla_sparse_fwd

    shape = scene.shape
    rows = shape.queries * g.heads
    blocks = -(-rows // 64)
    splits = max(1, 132 // (shape.requests * blocks))
    each = -(-shape.tokens // splits // 128) * 128
    splits = -(-shape.tokens // each)
    index = torch.full((shape.requests, splits * each), -1, dtype=torch.int32, device="cuda")
    index[:, : shape.tokens] = made.table
    index = index.view(shape.requests, splits, 1, each).expand(-1, -1, blocks, -1)
    index = index.permute(1, 0, 2, 3).reshape(-1, 1, each).contiguous()
    q = torch.zeros(shape.requests, blocks * 64, g.k_dim, dtype=made.q.dtype, device="cuda")

    def run() -> Any:
        q[:, :rows] = made.q.view(shape.requests, rows, g.k_dim)
        many = q.view(1, -1, 64, g.k_dim).expand(splits, -1, -1, -1).reshape(-1, 64, g.k_dim)
        out, _, lse = flash_mla_sparse_fwd(many, made.k, index, made.scale)
        if splits == 1:
            return out
        parts = out.view(splits, -1, 64, g.v_dim)
        return merge_attention(parts, lse.view(splits, -1, 64))

    return run


def sglang_verify(scene: Scene) -> Run:
    """SGLang's Triton `extend_attention_fwd` with a tree mask."""
    if not scene.verify:
        raise Absent("a verify kernel")
    made, shape = scene.inputs, scene.shape
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    g, n, prefix = shape.geometry, shape.queries, shape.tokens - shape.queries
    k, v = made.k, made.k[..., : g.v_dim] if made.v is None else made.v
    new = made.table[:, prefix:].flatten().long()
    fresh = (
        k.view(torch.uint8)[new].view(k.dtype),
        v.contiguous().view(torch.uint8)[new].view(v.dtype),
    )
    starts = torch.arange(shape.requests + 1, device="cuda")
    out = torch.empty(made.q.shape[0], g.heads, g.v_dim, dtype=made.q.dtype, device="cuda")
    mask = torch.ones(shape.requests, n, shape.tokens, dtype=torch.bool, device="cuda")
    mask[:, :, prefix:] = made.mask.view(shape.requests, n, n)
    mask = mask.flatten()
    slots = made.table[:, :prefix].flatten().long().contiguous()
    return lambda: extend_attention_fwd(
        made.q, fresh[0].to(made.q.dtype), fresh[1].to(made.q.dtype), out, k, v,
        starts * n, starts * prefix, slots, mask, False, starts * (n * shape.tokens), n,
        1.0, 1.0, made.scale,
    )  # fmt: skip


def sglang_decode(scene: Scene, splits: int) -> Run:
    """SGLang's Triton `decode_attention_fwd`."""
    if scene.verify:
        raise Absent("a decode kernel")
    made, shape = scene.inputs, scene.shape
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    g = shape.geometry
    k, v = made.k, made.k[..., : g.v_dim] if made.v is None else made.v
    shape_ = (shape.requests, g.heads, splits)
    part = torch.empty(*shape_, g.v_dim, device="cuda")
    part_lse = torch.empty(*shape_, device="cuda")
    out = torch.empty(shape.requests, g.heads, g.v_dim, dtype=made.q.dtype, device="cuda")
    starts = torch.arange(shape.requests + 1, device="cuda") * shape.tokens
    many = torch.full((shape.requests,), splits, dtype=torch.int32, device="cuda")
    slots = made.table.flatten().long()
    return lambda: decode_attention_fwd(
        made.q, k, v, out, starts, slots, part, part_lse, many, splits, made.scale, 1.0, 1.0,
        has_mla=g.latent,
    )  # fmt: skip


def flashinfer_mla(scene: Scene) -> Run:
    """FlashInfer's MLA (fa3) with page size 1, causal in place of the tree."""
    made, g = _latent(scene)
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    shape = scene.shape
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(), backend="fa3")
    starts = torch.arange(shape.requests + 1, dtype=torch.int32)
    wrapper.plan(
        (starts * shape.queries).cuda(), (starts * shape.tokens).cuda(), made.table.flatten(),
        made.lengths.int(), g.heads, g.v_dim, g.rope, 1, scene.verify, made.scale,
        made.q.dtype, made.k.dtype,
    )  # fmt: skip
    nope, rope = (x.contiguous() for x in made.q.split([g.nope, g.rope], -1))
    latent, key_rope = made.k.split([g.nope, g.rope], -1)
    return lambda: wrapper.run(nope, rope, latent, key_rope)


def flashinfer_mask(scene: Scene) -> Run:
    """FlashInfer's paged prefill with page size 1 and a custom mask."""
    made, shape = scene.inputs, scene.shape
    g = shape.geometry
    if g.latent or not scene.verify:
        raise Absent("takes heads with keys and values of their own, verify")
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    n, prefix = shape.queries, shape.tokens - shape.queries
    mask = torch.ones(shape.requests, n, shape.tokens, dtype=torch.bool, device="cuda")
    mask[:, :, prefix:] = made.mask.view(shape.requests, n, n)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa2")
    starts = torch.arange(shape.requests + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        starts * n, starts * shape.tokens, made.table.flatten(),
        torch.ones(shape.requests, dtype=torch.int32, device="cuda"), g.heads, g.kv_heads,
        g.k_dim, 1, custom_mask=mask.flatten(), sm_scale=made.scale,
        q_data_type=made.q.dtype, kv_data_type=made.k.dtype,
    )  # fmt: skip
    cache = made.k.unsqueeze(1), made.v.unsqueeze(1)
    return lambda: wrapper.run(made.q, cache)


def _latent(scene: Scene) -> tuple[Any, Any]:
    if not scene.shape.geometry.latent or scene.shape.dtype != torch.bfloat16:
        raise Absent("takes latent rows of bfloat16 only")
    return scene.inputs, scene.shape.geometry


@functools.cache
def _workspace() -> torch.Tensor:
    return torch.empty(512 << 20, dtype=torch.uint8, device="cuda")


PEERS: dict[str, Callable[[Any], Any]] = {
    "flashmla pages": flashmla_pages,
    "flashmla sparse": flashmla_sparse,
    "sglang triton verify": sglang_verify,
    **{
        f"sglang triton decode {n} splits": functools.partial(sglang_decode, splits=n)
        for n in (8, 32, 128)
    },
    "flashinfer mla fa3": flashinfer_mla,
    "flashinfer mask": flashinfer_mask,
}
