"""Which of SGLang's Triton backends our attention serves; the others stay stock, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvdefrag.sglang.attention_compat import Seams
from kvdefrag.sglang.compat import require
from kvdefrag.sglang.refusal import Refusal
from kvdefrag_kernels.attention_geometry import Geometry, Visible, check_geometry

_MHA, _MLA = "MHATokenToKVPool", "MLATokenToKVPool"


class Rows(NamedTuple):
    """Rows of a pool as our kernel sees them."""

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device


def rows_of(backend: Any, seams: Seams) -> Rows:
    """Check a backend that SGLang has just made; return what its rows are.

    Raises:
        Refusal: It is not served; names what stands in the way.
    """
    require(backend, "token_to_kv_pool", "num_head", "num_kv_head", "v_head_dim", "use_mla",
            "enable_deterministic", "dcp_size", "page_size", "max_context_len")  # fmt: skip
    pool = backend.token_to_kv_pool
    name = type(pool).__name__
    if backend.enable_deterministic:
        raise Refusal("--enable-deterministic-inference", "our sums depend on the batch")
    if backend.dcp_size > 1:
        raise Refusal(f"--dcp-size {backend.dcp_size}", "slots are owned by rank; 1 is supported")
    if backend.page_size != 1:
        raise Refusal(f"--page-size {backend.page_size}", "1 is supported")
    if getattr(backend, "dllm_block_size", None) is not None:
        raise Refusal("--dllm-algorithm", "its blocks see each other")
    if name not in (_MHA, _MLA):
        raise Refusal(f"pool {name}", f"{_MHA} and {_MLA} are supported")
    if seams.translates(backend):
        raise Refusal("--enable-unified-memory", "table entries are not slots of the pool")
    keys = pool.get_key_buffer(getattr(pool, "start_layer", None) or 0)
    if keys.ndim != 3:
        raise Refusal(f"rows of shape {tuple(keys.shape[1:])}", "a row a token is supported")
    geometry = _geometry(backend, keys, latent=name == _MLA)
    try:
        check_geometry(geometry, 1, 1, keys.dtype, Visible.ALL, None)
    except ValueError as error:
        raise Refusal(f"heads of {name}", str(error)) from error
    return Rows(geometry, keys.dtype, keys.device)


def _geometry(backend: Any, keys: torch.Tensor, *, latent: bool) -> Geometry:
    if latent != bool(backend.use_mla):
        raise Refusal(f"use_mla {backend.use_mla}", "it must go with the pool's class")
    heads = int(backend.num_head)
    if latent:
        return Geometry(heads, 1, keys.shape[-1], int(backend.token_to_kv_pool.kv_lora_rank), True)
    return Geometry(heads, int(keys.shape[1]), int(keys.shape[-1]), int(backend.v_head_dim))
