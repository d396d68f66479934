"""Decode and tree-verify attention over page_size=1 pools: ours, and every peer there is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from attention_peers import PEERS, Absent
from measure import Entry, Run

from kvdefrag_kernels.attention_geometry import Geometry, Tile, Visible
from kvdefrag_kernels.attention_metadata import AttentionPlan, attention_space, plan_attention
from kvdefrag_kernels.attention_reference import tree_attention_torch, visible_tokens
from kvdefrag_kernels.page_view import page_view, page_view_buffers
from kvdefrag_kernels.tree_attention import tree_attention

PAGE = 64
MLA, MLA8 = Geometry(16, 1, 576, 512, True), Geometry(8, 1, 576, 512, True)
GQA = Geometry(32, 8, 128, 128)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """One line of the table."""

    name: str
    geometry: Geometry
    queries: int
    requests: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def params(self) -> dict[str, Any]:
        """What a result records of it."""
        g = self.geometry
        return {
            "heads": f"{g.heads}/{g.kv_heads}x{g.k_dim}", "queries": self.queries,
            "requests": self.requests, "tokens": self.tokens,
            "kv": str(self.dtype).removeprefix("torch."),
        }  # fmt: skip

    @property
    def read(self) -> int:
        """Bytes of keys and values that every provider must read once."""
        g = self.geometry
        row = g.kv_heads * (g.k_dim + (0 if g.latent else g.v_dim)) * self.dtype.itemsize
        return self.requests * self.tokens * row


SHAPES = [
    Shape("verify9-bs1-8k", MLA, 9, 1, 8_192),
    Shape("verify9-bs1-32k", MLA, 9, 1, 32_768),
    Shape("verify9-bs1-131k", MLA, 9, 1, 131_072),
    Shape("verify9-bs16-32k", MLA, 9, 16, 32_768),
    Shape("verify64-bs16-32k", MLA, 64, 16, 32_768),
    Shape("decode-bs1-189k", MLA, 1, 1, 189_000),
    Shape("decode-bs32-32k", MLA, 1, 32, 32_768),
    Shape("gqa-verify9-bs1-131k", GQA, 9, 1, 131_072),
    Shape("gqa-verify9-bs16-32k", GQA, 9, 16, 32_768),
    Shape("8heads-verify9-bs1-131k", MLA8, 9, 1, 131_072),
    Shape("8heads-decode-bs32-32k", MLA8, 1, 32, 32_768),
    Shape("fp8-decode-bs32-32k", MLA, 1, 32, 32_768, FP8),
    Shape("fp8-verify9-bs1-131k", MLA, 9, 1, 131_072, FP8),
    Shape("fp8-gqa-verify9-bs16-32k", GQA, 9, 16, 32_768, FP8),
]


def entries() -> Iterator[Entry]:
    """Every shape at 0 % and 99 % coverage, every provider that takes it."""
    for shape in SHAPES:
        for coverage in (0.0, 0.99):
            scene = Scene(shape, coverage)
            for name, make in scene.providers().items():
                yield Entry(
                    "attention", shape.params | {"coverage": coverage}, name, shape.read, make,
                    notes={"shape": shape.name},
                )  # fmt: skip


class Scene:
    """A pool with requests at random places, or in aligned pages but for a few left-overs."""

    def __init__(self, shape: Shape, coverage: float, *, seed: int = 0) -> None:
        self.shape, self.coverage, self.seed = shape, coverage, seed

    @property
    def verify(self) -> bool:
        """True where the last tokens are a tree."""
        return self.shape.queries > 1

    @functools.cached_property
    def inputs(self) -> Inputs:
        """Make the tensors, when the first provider asks for them."""
        return Inputs(self.shape, self.coverage, self.seed)

    def providers(self) -> dict[str, Callable[[], Run]]:
        """Name what can be tried; a peer that cannot take the case raises `Absent`."""
        found: dict[str, Callable[[], Run]] = {"kvdefrag": lambda: self.ours(paged=False)}
        if self.coverage:
            found["kvdefrag pages"] = lambda: self.ours(paged=True)
        if self.shape.geometry.latent and self.verify:
            paged = self.coverage > 0
            found["kvdefrag portable"] = lambda: self.ours(paged=paged, portable=True)
        for name, peer in PEERS.items():
            found[name] = functools.partial(peer, self)
        return found

    def ours(
        self,
        *,
        paged: bool,
        tile: Tile | None = None,
        workers: int | None = None,
        portable: bool = False,
    ) -> Run:
        """Attention and the combination of its parts; the plan is made once a step, not here."""
        made = self.inputs
        plan = made.plan(paged, tile, workers)
        out = torch.empty(made.q.shape[0], made.q.shape[1], self.shape.geometry.v_dim,
                          dtype=made.q.dtype, device="cuda")  # fmt: skip
        lse = torch.empty(*made.q.shape[:2], device="cuda")
        module = importlib.import_module(tree_attention.__module__)

        def run() -> object:
            kept = module._hopper
            if portable:
                module._hopper = lambda *_: False
            try:
                return tree_attention(
                    plan, made.q, made.k, made.v, scale=made.scale, mask=made.mask, out=out,
                    lse=lse,
                )  # fmt: skip
            finally:
                module._hopper = kept

        return run

    def check(self, found: Any) -> float:
        """Return the error of `(out, lse)` against float64, over the first request."""
        made, shape = self.inputs, self.shape
        seen = visible_tokens(
            Visible.TREE if self.verify else Visible.ALL,
            shape.tokens - shape.queries if self.verify else shape.tokens, shape.queries,
            made.mask[: shape.queries**2] if made.mask is not None else None,
        )  # fmt: skip
        expected, _ = tree_attention_torch(
            shape.geometry, made.q[: shape.queries], made.k, made.v, [made.table[0]], [seen],
            scale=made.scale,
        )  # fmt: skip
        out = found[0][: shape.queries].double()
        return float((out - expected).norm() / expected.norm())


class Inputs:
    """Tensors of a scene. `pages` [requests, n] is filled where every page is whole."""

    def __init__(self, shape: Shape, coverage: float, seed: int) -> None:
        g, device = shape.geometry, "cuda"
        random = torch.Generator(device).manual_seed(seed)
        self.shape, self.verify = shape, shape.queries > 1
        each = -(-shape.tokens // PAGE)
        count = shape.requests * each
        slots = (count * 5 // 4 + 2) * PAGE
        order = torch.randperm(slots // PAGE - 1, generator=random, device=device) + 1
        self.pages = order[:count].view(shape.requests, each)
        at = self.pages[..., None] * PAGE + torch.arange(PAGE, device=device)
        if not coverage:
            at = torch.randperm(slots - 1, generator=random, device=device)[: count * PAGE] + 1
        else:
            # One page in a hundred is made of single slots, from pages that nobody has.
            loose = torch.randperm(each, generator=random, device=device)
            loose = loose[: round(each * (1 - coverage))]
            spare = order[count:, None] * PAGE + torch.arange(PAGE, device=device)
            spare = spare.flatten()[torch.randperm(spare.numel(), generator=random, device=device)]
            many = shape.requests * loose.numel() * PAGE
            at[:, loose] = spare[:many].view(shape.requests, loose.numel(), PAGE)
        self.table = at.view(shape.requests, -1)[:, : shape.tokens].int().contiguous()

        def rows(dim: int) -> torch.Tensor:
            shape_ = (slots, g.kv_heads, dim)
            made = torch.empty(shape_, dtype=torch.bfloat16, device=device)
            return made.normal_(generator=random).to(shape.dtype)

        self.k = rows(g.k_dim)
        self.v = None if g.latent else rows(g.v_dim)
        tokens = shape.requests * shape.queries
        self.q = torch.randn(tokens, g.heads, g.k_dim, generator=random, device=device)
        self.q = self.q.to(torch.bfloat16)
        self.scale = g.k_dim**-0.5
        self.lengths = torch.full((shape.requests,), shape.tokens, device=device)
        self.mask = None
        if self.verify:
            n = shape.queries
            tree = torch.rand(n, n, generator=random, device=device) < 0.5
            tree = (tree | torch.eye(n, dtype=torch.bool, device=device)).tril()
            self.mask = tree.repeat(shape.requests, 1, 1).flatten().contiguous()

    def plan(self, paged: bool, tile: Tile | None, workers: int | None) -> AttentionPlan:
        """Plan a step as it stands; how long that takes is measured elsewhere."""
        shape = self.shape
        rows = torch.arange(shape.requests, device="cuda")
        view = None
        if paged:
            prefix = self.lengths - (shape.queries if self.verify else 0)
            view = page_view_buffers(
                shape.requests, shape.tokens, most_left=8192, page=PAGE, device="cuda"
            )
            page_view(self.table, rows, prefix, view, page=PAGE)
        space = attention_space(
            shape.geometry, requests=shape.requests, queries=shape.queries,
            kv_dtype=shape.dtype, visible=Visible.TREE if self.verify else Visible.ALL,
            page=PAGE if paged else None, device="cuda", tile=tile, workers=workers,
        )  # fmt: skip
        return plan_attention(space, self.lengths, table=self.table, rows=rows, view=view)


__all__ = ["PAGE", "SHAPES", "Absent", "Inputs", "Scene", "Shape", "entries"]
