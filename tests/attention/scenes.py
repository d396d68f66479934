"""Small pools whose free rows are NaN, steps over them, and the right answer in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvdefrag.attention import Kind, Numbers, Step, Task
from kvdefrag_kernels.attention_geometry import Geometry, Visible
from kvdefrag_kernels.attention_reference import tree_attention_torch, visible_tokens

SEEN_AS = {
    Kind.DECODE: Visible.ALL,
    Kind.CHAIN: Visible.CHAIN,
    Kind.TREE: Visible.TREE_OF_FULL,
}


@dataclass
class Scene:
    """`prefixes` leave the queries out, but for DECODE, where they are all there is."""

    kind: Kind
    geometry: Geometry
    prefixes: list[int]
    queries: int = 1
    seed: int = 0
    page: int = 16
    whole: int = 0  # pages at the beginning of each prefix
    numbers: Numbers = field(default_factory=lambda: Numbers(0.125))

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        g, n = self.geometry, len(self.prefixes)
        own = 0 if self.kind is Kind.DECODE else self.queries
        lengths = [p + own for p in self.prefixes]
        count = (2 * sum(lengths) // self.page + self.whole * n + 4) * self.page
        pages = torch.randperm(count // self.page - 1, generator=random) + 1
        whole, loose = pages[: self.whole * n].tolist(), pages[self.whole * n :]
        loose = (loose[:, None] * self.page + torch.arange(self.page)).flatten()
        spare = loose[torch.randperm(len(loose), generator=random)].tolist()
        self.slots = []
        for length in lengths:
            held: list[int] = []
            for _ in range(self.whole):
                first = whole.pop() * self.page
                held += range(first, first + self.page)
            held += [spare.pop() for _ in range(length - len(held))]
            self.slots.append(torch.tensor(held, dtype=torch.int64))
        used = torch.cat([*self.slots, torch.zeros(0, dtype=torch.int64)])

        def pool(dim: int) -> torch.Tensor:
            rows = torch.full((count, g.kv_heads, dim), math.nan)
            rows[used] = torch.randn(len(used), g.kv_heads, dim, generator=random)
            return rows.bfloat16()

        self.k = pool(g.k_dim)
        self.v = None if g.latent else pool(g.v_dim)
        self.q = torch.randn(n * self.queries, g.heads, g.k_dim, generator=random).bfloat16()
        masks = []
        for prefix in self.prefixes:
            tree = torch.rand(self.queries, self.queries, generator=random) < 0.5
            tree |= torch.eye(self.queries, dtype=torch.bool)
            # What stands over the prefix is not to be read.
            junk = torch.rand(self.queries, prefix, generator=random) < 0.5
            masks.append(torch.cat([junk, tree.tril()], dim=1).flatten())
        tree_masks = self.kind is Kind.TREE
        self.mask = torch.cat(masks).contiguous() if tree_masks else None
        self.seen = [
            visible_tokens(SEEN_AS[self.kind], p, self.queries, m if tree_masks else None)
            for p, m in zip(self.prefixes, masks, strict=True)
        ]

    @property
    def task(self) -> Task:
        return Task(self.kind, self.geometry, len(self.prefixes) + 1, self.queries, torch.bfloat16)

    @property
    def step(self) -> Step:
        held = [s[:p] for s, p in zip(self.slots, self.prefixes, strict=True)]
        trees = [s[p:] for s, p in zip(self.slots, self.prefixes, strict=True)]
        table = torch.zeros(len(held) + 1, max(self.prefixes) + 1, dtype=torch.int32)
        for row, slots in enumerate(held):
            table[row + 1, : len(slots)] = slots.int()
        return Step(
            lengths=torch.tensor(self.prefixes, dtype=torch.int32),
            indices=torch.cat([*held, torch.zeros(1, dtype=torch.int64)]),
            indptr=torch.tensor([0, *self.prefixes]).cumsum(0).int(),
            tree_slots=None if self.kind is Kind.DECODE else torch.cat(trees),
            table=table,
            rows=torch.arange(1, len(held) + 1),
        )

    def right(self) -> torch.Tensor:
        """Return float64 [tokens, heads, v_dim]."""
        return tree_attention_torch(
            self.geometry, self.q, self.k, self.v, self.slots, self.seen, **self.numbers._asdict()
        )[0]

    def error(self, found: torch.Tensor) -> float:
        """Return the relative error of a result; NaN counts as 1."""
        right = self.right()
        error = (found.double() - right).norm() / right.norm().clamp(min=1e-30)
        return float(error.nan_to_num(nan=1.0))


def sparse_in_torch(q, k, index, scale, *, d_v, topk_length, base_2=True):
    """Stand in for `flash_mla_sparse_fwd`: the same arguments, the same three results."""
    out = torch.zeros(*q.shape[:2], d_v, dtype=q.dtype)
    lse = torch.full(q.shape[:2], math.inf)
    for row, count in enumerate(topk_length.tolist()):
        named = index[row, 0, :count].long()
        named = named[named >= 0]
        if len(named):
            keys = k[named, 0].double()
            scores = q[row].double() @ keys.T * scale
            out[row] = (torch.softmax(scores, -1) @ keys[:, :d_v]).to(q.dtype)
            log = torch.logsumexp(scores, -1)
            lse[row] = (log / math.log(2.0) if base_2 else log).float()
    return out, lse.clone(), lse
