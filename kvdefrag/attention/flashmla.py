"""FlashMLA's sparse forward over every slot, split by hand, as a provider."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, device

from kvdefrag.attention.kernel import TreeKernel
from kvdefrag.attention.provider import Absent, Kind, Numbers, Step, Task
from kvdefrag_kernels.attention_geometry import Tile
from kvdefrag_kernels.attention_merge import merge_attention

SparseForward = Callable[..., tuple[Tensor, Tensor, Tensor]]

_ROWS, _TOKENS = 64, 128  # of a program: query rows, tokens a round
_MOST_BYTES = 256 << 20
_LOG2E = 1.0 / math.log(2.0)


def sparse_forward(package: str = "sgl_kernel") -> SparseForward:
    """Return `flash_mla_sparse_fwd` of an installed package.

    Raises:
        Absent: There is none, or it cannot be told how many of its indices count.
    """
    try:
        module = importlib.import_module(f"{package}.flash_mla")
        found: SparseForward = module.flash_mla_sparse_fwd
    except (ImportError, OSError, AttributeError) as error:
        raise Absent(f"{package}.flash_mla cannot be imported: {error}") from error
    if "topk_length" not in inspect.signature(found).parameters:
        raise Absent("this flash_mla_sparse_fwd has no topk_length: a graph would pay the bound")
    return found


class FlashMlaSparse:
    """Prefixes of latent rows by `flash_mla_sparse_fwd`; a chain's own tokens by our kernel.

    It knows no masks, so that a TREE is refused: the mask's rows are as wide as the prefix, which
    the part over the tree alone does not know. Lengths are read on the device: the splits of a
    request share its real length, and each is told how many of its indices count.

    Args:
        task: What it is made for.
        where: Device of the pool.
        longest: Bound of a prefix.
        forward: `sparse_forward()`. Tried on a small case first, which also shows the base of its
            log-sum-exp, so this must not be made while a graph is captured.
        lanes: Programs that run at once.
        tile: Of our kernel, in place of what was tuned.

    Raises:
        Absent: It does not take the task, or its results are not what they should be.
    """

    name = "flashmla_sparse"
    follows_lengths = True

    def __init__(
        self,
        task: Task,
        where: device | str,
        *,
        longest: int,
        forward: SparseForward,
        lanes: int = 132,
        tile: Tile | None = None,
    ) -> None:
        g = task.geometry
        if task.kind is Kind.TREE:
            raise Absent("flash_mla_sparse_fwd knows no tree mask: decode and chains only")
        if not g.latent or (g.k_dim, g.v_dim) != (576, 512) or task.kv_dtype != torch.bfloat16:
            raise Absent("flash_mla_sparse_fwd takes latent rows of 512 + 64 in bfloat16 only")
        self._task, self._forward = task, forward
        self._blocks = -(-task.queries * g.heads // _ROWS)
        self._splits = max(1, lanes // (task.requests * self._blocks))
        self._each = _round_up(-(-longest // self._splits), _TOKENS)
        rows = self._splits * task.requests * self._blocks
        if rows * self._each * 4 > _MOST_BYTES:
            raise Absent(f"its lists of {rows} x {self._each} indices are too large")
        self._index = torch.full((rows, 1, self._each), -1, dtype=torch.int32, device=where)
        self._counts = torch.full((rows,), _TOKENS, dtype=torch.int32, device=where)
        self._within = torch.arange(self._each, device=where)
        self._split = torch.arange(self._splits, device=where).view(-1, 1)
        self._to_base_2 = _try_out(forward, where)
        self._chain = TreeKernel(task, where, tile=tile) if task.kind is Kind.CHAIN else None
        self._none = torch.zeros(task.requests, dtype=torch.int32, device=where)
        self._requests = 0

    def takes(self, numbers: Numbers) -> bool:
        """Say whether it can work with these factors: no cap, no scales."""
        return not numbers.logit_cap and numbers.k_scale == numbers.v_scale == 1.0

    def plan(self, step: Step) -> None:
        """Lay out the indices of every split: device operations of fixed shapes."""
        n = self._requests = step.lengths.numel()
        blocks, rows = self._blocks, self._splits * n * self._blocks
        lengths, starts = step.lengths.long(), step.indptr[:n].long()
        share = (lengths + self._splits * _TOKENS - 1) // (self._splits * _TOKENS) * _TOKENS
        begins = self._split * share  # [splits, n]
        counts = torch.minimum(lengths - begins, share).clamp(min=0)
        at = (starts + begins).unsqueeze(-1) + self._within
        inside = self._within < counts.unsqueeze(-1)
        source = step.indices if step.indices.numel() else self._none
        slots = source[torch.where(inside, at, 0)].int()
        lists = torch.where(inside, slots, -1).unsqueeze(2).expand(-1, -1, blocks, -1)
        self._index[:rows].view(self._splits, n, blocks, -1).copy_(lists)
        # One round at least: what no index names comes out as an empty part.
        many = counts.clamp(min=_TOKENS).unsqueeze(2).expand(-1, -1, blocks)
        self._counts[:rows].view(self._splits, n, blocks).copy_(many)
        if self._chain is not None:
            self._chain.plan(step._replace(lengths=self._none[:n]))

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        numbers: Numbers,
        mask: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend: the sparse forward, with a chain our kernel too, and a merge."""
        g, n = self._task.geometry, self._requests
        asked, room = self._task.queries * g.heads, self._blocks * _ROWS
        packed = q.new_zeros(n, room, g.k_dim)
        packed[:, :asked] = q.reshape(n, asked, g.k_dim)
        many = packed.view(1, -1, _ROWS, g.k_dim).expand(self._splits, -1, -1, -1)
        rows = self._splits * n * self._blocks
        found, _, lse = self._forward(
            many.reshape(rows, _ROWS, g.k_dim), k.view(-1, 1, g.k_dim), self._index[:rows],
            numbers.scale, d_v=g.v_dim, topk_length=self._counts[:rows],
        )  # fmt: skip
        shape = self._splits, n * self._task.queries, g.heads
        parts = found.view(self._splits, n, room, -1)[:, :, :asked].reshape(*shape, -1)
        lses = lse.view(self._splits, n, room)[:, :, :asked].reshape(shape) * self._to_base_2
        if self._chain is not None:
            own, own_lse = self._chain.run_with_lse(q, k, v, numbers=numbers)
            parts = torch.cat([parts, own.unsqueeze(0)])
            lses = torch.cat([lses, own_lse.unsqueeze(0)])
        return merge_attention(parts, lses, out=out)[0]


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _try_out(forward: SparseForward, where: device | str) -> float:
    """Run a small case; return the factor that takes its log-sum-exp to base 2."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, _ROWS, 576, generator=random).bfloat16()
    k = torch.randn(256, 1, 576, generator=random).bfloat16()
    index = torch.full((2, 1, 256), -1, dtype=torch.int32)
    index[0, 0, :100] = torch.randperm(256, generator=random)[:100].int()
    counts = torch.tensor([_TOKENS, _TOKENS], dtype=torch.int32)
    scale = 576**-0.5
    given: tuple[Any, ...] = tuple(t.to(where) for t in (q, k, index, counts))
    found, _, lse = forward(*given[:3], scale, d_v=512, topk_length=given[3])
    keys = k[index[0, 0, :100].long(), 0].double()
    scores = q[0].double() @ keys.T * scale
    right = torch.softmax(scores, -1) @ keys[:, :512]
    log = torch.logsumexp(scores, -1)
    error = (found[0].double().cpu() - right).norm() / right.norm()
    if not error < 0.02 or not torch.isinf(lse[1]).all():
        raise Absent(f"flash_mla_sparse_fwd is wrong on a small case: error {float(error):.3f}")
    for factor, wanted in ((1.0, log * _LOG2E), (_LOG2E, log)):
        if (lse[0].double().cpu() - wanted).abs().max() < 0.02:
            return factor
    raise Absent("flash_mla_sparse_fwd gives a log-sum-exp in an unknown base")
