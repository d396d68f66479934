"""A small pool of SGLang's on a CPU, whose free rows are NaN, and the right answers over it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

SIZE, CONTEXT, ROWS, HEADS = 512, 96, 6, 4


class Pool:
    """Pool, request table and one layer; free rows are NaN."""

    def __init__(self, *, latent: bool, seed: int = 0) -> None:
        from sglang.srt.mem_cache import memory_pool

        self.latent, self.random = latent, torch.Generator().manual_seed(seed)
        common: dict[str, Any] = {
            "size": SIZE, "page_size": 1, "dtype": torch.bfloat16, "layer_num": 1,
            "device": "cpu", "enable_memory_saver": False,
        }  # fmt: skip
        self.k_dim, self.v_dim, self.kv_heads = (288, 256, 1) if latent else (64, 64, 2)
        if latent:
            self.pool: Any = memory_pool.MLATokenToKVPool(
                kv_lora_rank=256, qk_rope_head_dim=32, **common
            )
        else:
            self.pool = memory_pool.MHATokenToKVPool(head_num=2, head_dim=64, **common)
        self.rows = memory_pool.ReqToTokenPool(
            size=ROWS, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False
        )
        for buffer in self.buffers:
            buffer.fill_(math.nan)
        self.layer = SimpleNamespace(
            layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=self.kv_heads,
            tp_v_head_num=self.kv_heads, qk_head_dim=self.k_dim, v_head_dim=self.v_dim,
            head_dim=self.k_dim, scaling=self.k_dim**-0.5, logit_cap=0.0,
            logit_capping_method="tanh", sliding_window_size=-1, k_scale=None, v_scale=None,
            k_scale_float=None, v_scale_float=None, is_cross_attention=False,
            attn_type=_decoder(), xai_temperature_len=-1,
        )  # fmt: skip

    @property
    def buffers(self) -> list[torch.Tensor]:
        return self.pool.kv_buffer if self.latent else [*self.pool.k_buffer, *self.pool.v_buffer]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).bfloat16()

    def fill(self, lengths: list[int], beyond: int) -> None:
        """Give row i + 1 random slots for `lengths[i] + beyond[i]` tokens; write the first."""
        order = torch.randperm(SIZE, generator=self.random) + 1
        for i, length in enumerate(lengths):
            held, order = order[: length + beyond], order[length + beyond :]
            self.rows.req_to_token[i + 1, : length + beyond] = held.int()
            for buffer in self.buffers:
                buffer[held[:length]] = self.normal(length, *buffer.shape[1:])

    def slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        return self.rows.req_to_token[row, begin:end].long()

    def new(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v of new tokens, as a model gives them."""
        k = self.normal(tokens, self.kv_heads, self.k_dim)
        v = k[..., : self.v_dim] if self.latent else self.normal(tokens, self.kv_heads, self.v_dim)
        return self.normal(tokens, HEADS * self.k_dim), k, v

    def right(self, q, slots, seen, cap: float = 0.0) -> torch.Tensor:
        """Return float64 [tokens, heads * v_dim] over the rows as they are in the pool."""
        from kvdefrag_kernels.attention_geometry import Geometry
        from kvdefrag_kernels.attention_reference import tree_attention_torch

        g = Geometry(HEADS, self.kv_heads, self.k_dim, self.v_dim, self.latent)
        k = self.pool.get_key_buffer(0)
        v = None if self.latent else self.pool.get_value_buffer(0)
        found, _ = tree_attention_torch(
            g, q.view(-1, HEADS, self.k_dim), k, v, slots, seen, scale=self.layer.scaling,
            logit_cap=cap,
        )  # fmt: skip
        return found.flatten(1)


def _decoder() -> Any:
    from sglang.srt.layers.radix_attention import AttentionType

    return AttentionType.DECODER
