"""Join attention over parts of the tokens into attention over all of them."""

from __future__ import annotations

import math

import torch

from ._load import need_device, programs
from .attention_reference import merge_attention_torch

CHUNK, WARPS, MOST = 8, 4, 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

__all__ = ["merge_attention", "merge_attention_torch"]


def merge_attention(
    parts: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    natural: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join `parts` [n, tokens, heads, dim] by `lses` float32 [n, tokens, heads].

    Logarithms have base 2, or e with `natural`, in and out. An infinite one, of either sign, marks
    a part that saw nothing: its row is not read, so it may hold NaN. Where all parts are empty
    `out` is 0 and `lse` -inf. `out` defaults to the dtype of `parts`. One launch, capture-safe.
    """
    _check(parts, lses)
    n, tokens, heads, dim = parts.shape
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=parts.dtype, device=parts.device)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=parts.device)
    if out.shape != parts.shape[1:] or out.dtype not in FLOATS or out.stride(-1) != 1:
        raise ValueError(f"out must have shape {tuple(parts.shape[1:])}, got {tuple(out.shape)}")
    if lse.shape != parts.shape[1:3] or lse.dtype != torch.float32:
        raise ValueError(f"lse must be float32 {tuple(parts.shape[1:3])}, got {tuple(lse.shape)}")
    need_device(parts.device, "merge_attention_torch")
    if tokens and heads:
        programs("_attention_merge").merge[(tokens * heads,)](
            parts, *parts.stride()[:3], lses, *lses.stride(), n, heads,
            1.0 / math.log2(math.e) if natural else 1.0,  # inputs
            out, *out.stride()[:2], lse, *lse.stride(),  # outputs
            DIM=dim, BLOCK=max(16, 1 << (dim - 1).bit_length()),
            PARTS=max(2, 1 << (n - 1).bit_length()), CHUNK=CHUNK, num_warps=WARPS,  # constants
        )  # fmt: skip
    return out, lse


def _check(parts: torch.Tensor, lses: torch.Tensor) -> None:
    if parts.ndim != 4 or parts.dtype not in FLOATS:
        raise ValueError(
            f"parts must be 4-D of one of {list(FLOATS)}, got {parts.ndim}-D {parts.dtype}"
        )
    if not 1 <= parts.shape[0] <= MOST:
        raise ValueError(f"parts must number 1 to {MOST}, got {parts.shape[0]}")
    if parts.shape[3] > 1 and parts.stride(3) != 1:
        raise ValueError(f"parts must have contiguous rows, got strides {parts.stride()}")
    if lses.shape != parts.shape[:3] or lses.dtype != torch.float32:
        raise ValueError(
            f"lses must be float32 {tuple(parts.shape[:3])}, got {lses.dtype} {tuple(lses.shape)}"
        )
    if lses.device != parts.device:
        raise ValueError(f"lses must be on {parts.device}, got {lses.device}")
