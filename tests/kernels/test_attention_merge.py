from __future__ import annotations

import math

import pytest
import torch

from kvdefrag_kernels.attention_merge import merge_attention
from kvdefrag_kernels.attention_reference import merge_attention_torch


def parts_of(n, tokens, heads, dim, device, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    parts = torch.randn(n, tokens, heads, dim, generator=random).to(dtype).to(device)
    return parts, (torch.randn(n, tokens, heads, generator=random) * 9).to(device)


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "dim"), [(1, 64), (2, 512), (13, 80), (70, 16)])
def test_any_number_of_parts_equals_float64(n, dim, dtype, natural, device):
    parts, lses = parts_of(n, 2, 3, dim, device, dtype)
    out, lse = merge_attention(parts, lses, natural=natural)
    expected, log = merge_attention_torch(parts, lses, natural=natural)
    assert (out.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)
    assert (lse.double() - log).abs().max() < 1e-4


@pytest.mark.parametrize("sign", [-math.inf, math.inf])
def test_empty_parts_are_not_read_and_all_empty_is_zero(sign, device):
    parts, lses = parts_of(4, 3, 2, 32, device)
    lses[1, 0] = lses[:, 1] = sign
    parts[1, 0] = parts[:, 1] = math.nan
    out, lse = merge_attention(parts, lses)
    expected, log = merge_attention_torch(parts, lses)
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), log, atol=1e-4, rtol=1e-5)


def test_parts_of_attention_join_to_attention_over_all_tokens(device):
    random = torch.Generator().manual_seed(1)
    score = torch.randn(1, 2, 40, generator=random, dtype=torch.float64)
    values = torch.randn(40, 16, generator=random, dtype=torch.float64)
    cuts = [(0, 13), (13, 13), (13, 40)]
    lses = torch.stack([torch.logsumexp(score[..., a:b], -1) for a, b in cuts])
    parts = torch.stack([torch.softmax(score[..., a:b], -1) @ values[a:b] for a, b in cuts])
    out, lse = merge_attention(parts.float().to(device), lses.float().to(device), natural=True)
    whole = torch.softmax(score, -1) @ values
    torch.testing.assert_close(out.cpu().double(), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), torch.logsumexp(score, -1))


def test_bad_inputs_are_named_with_what_is_allowed(device):
    parts, lses = parts_of(2, 1, 2, 16, device)
    for message, call in {
        "parts must be 4-D": lambda: merge_attention(parts[0], lses),
        "lses must be float32": lambda: merge_attention(parts, lses.double()),
        "parts must number 1 to": lambda: merge_attention(parts[:0], lses[:0]),
        "out must have shape": lambda: merge_attention(parts, lses, out=parts),
        "lse must be float32": lambda: merge_attention(parts, lses, lse=lses),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
