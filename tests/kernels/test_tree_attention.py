from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from kvdefrag_kernels.attention_geometry import Geometry, Tile, Visible
from kvdefrag_kernels.attention_metadata import attention_space, plan_attention
from kvdefrag_kernels.attention_reference import tree_attention_torch, visible_tokens
from kvdefrag_kernels.page_view import page_view, page_view_buffers
from kvdefrag_kernels.tree_attention import tree_attention

ON_GPU = torch.cuda.is_available()
BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MLA = Geometry(16, 1, 576, 512, True)
MLA_SMALL = Geometry(8, 1, 288, 256, True)
GQA = Geometry(4, 2, 64, 64)
TREES = (Visible.TREE, Visible.TREE_OF_FULL, Visible.FULL)
# Small programs, so that a few tokens make several units and workers.
FEW = None if ON_GPU else Tile(16, 16, 4, 2, 2, 2)


@dataclass
class Scene:
    """A pool whose free rows are NaN, requests at random places in it, and what they ask."""

    geometry: Geometry
    prefixes: list[int]
    queries: int
    device: torch.device
    visible: Visible = Visible.CHAIN
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    coverage: float = 0.0
    page: int = 16
    seed: int = 0
    counts: list[int] | None = None
    table: torch.Tensor = field(init=False)

    def __post_init__(self):
        random = torch.Generator().manual_seed(self.seed)
        g, n = self.geometry, len(self.prefixes)
        self.kv_dtype = self.kv_dtype or self.dtype
        self.counts = self.counts or [self.queries] * n
        trees = [0] * n if self.visible is Visible.ALL else self.counts
        self.lengths = [p + t for p, t in zip(self.prefixes, trees, strict=True)]
        slots = (2 * sum(self.lengths) // self.page + 2 * n + 3) * self.page
        pages = torch.randperm(slots // self.page - 1, generator=random) + 1
        whole, loose = pages[: len(pages) // 2].tolist(), pages[len(pages) // 2 :]
        loose = (loose[:, None] * self.page + torch.arange(self.page)).flatten()
        loose = loose[torch.randperm(len(loose), generator=random)].tolist()
        # Tails past the lengths name the sink and slots that do not exist.
        self.table = torch.full((n + 2, max(self.lengths, default=0) + 7), -1, dtype=torch.int32)
        self.table[:, -3:] = 0
        for row, length in enumerate(self.lengths):
            own: list[int] = []
            while len(own) < length:
                paged = torch.rand(1, generator=random).item() < self.coverage
                if paged and len(own) + self.page <= self.prefixes[row]:
                    first = whole.pop() * self.page
                    own += range(first, first + self.page)
                else:
                    own.append(loose.pop())
            self.table[row + 1, :length] = torch.tensor(own, dtype=torch.int32)
        used = torch.cat([self.slots(i).cpu() for i in range(n)] + [torch.zeros(0)]).long()
        self.k = self.pool(slots, g.k_dim, used, random)
        self.v = None if g.latent else self.pool(slots, g.v_dim, used, random)
        tokens = sum(self.counts)
        self.q = torch.randn(tokens, g.heads, g.k_dim, generator=random).to(self.dtype)
        self.q = self.q.to(self.device)
        self.table = self.table.to(self.device)
        masks = [self.request_mask(i, random) for i in range(n)]
        self.seen = [
            visible_tokens(self.visible, self.prefixes[i], self.counts[i], masks[i])
            for i in range(n)
        ]
        self.mask = None
        if self.visible in TREES:
            self.mask = torch.cat([m.flatten() for m in masks] + [torch.ones(1, dtype=torch.bool)])
            self.mask = self.mask.to(self.device)

    def pool(self, slots, dim, used, random):
        rows = torch.full((slots, self.geometry.kv_heads, dim), math.nan)
        rows[used] = torch.randn(len(used), self.geometry.kv_heads, dim, generator=random)
        return rows.to(self.kv_dtype).to(self.device)

    def request_mask(self, i, random):
        wide = self.visible is not Visible.TREE
        columns = self.counts[i] + (self.prefixes[i] if wide else 0)
        mask = torch.rand(self.counts[i], columns, generator=random) < 0.5
        return mask | torch.eye(self.counts[i], columns, dtype=torch.bool)

    def slots(self, i):
        return self.table[i + 1, : self.lengths[i]]

    def plan(self, *, tile=FEW, workers=None, paged=False, tree_apart=False, indexed=False):
        n = len(self.prefixes)
        view = None
        rows = torch.arange(1, n + 1, device=self.device)
        prefix = torch.tensor(self.prefixes, dtype=torch.int32, device=self.device)
        if paged:
            longest = max(1, *self.prefixes)
            view = page_view_buffers(
                n, longest, most_left=longest, page=self.page, device=self.device
            )
            page_view(self.table, rows, prefix, view, page=self.page)
        space = attention_space(
            self.geometry, requests=n, queries=self.queries, kv_dtype=self.kv_dtype,
            visible=self.visible, page=self.page if paged else None, device=self.device,
            tile=tile, workers=workers,
        )  # fmt: skip
        ragged = self.counts != [self.queries] * n
        starts = torch.tensor([0, *self.counts], device=self.device).cumsum(0)
        lengths = prefix if tree_apart else torch.tensor(self.lengths, device=self.device)
        more = {
            "lengths_hold_tree": not tree_apart,
            "query_starts": starts if ragged else None,
            "view": view,
        }
        if indexed:
            # The prefixes in one list, the trees' slots in another, as SGLang has them.
            held = [self.slots(i)[:p].long() for i, p in enumerate(self.prefixes)]
            trees = [self.slots(i)[p:] for i, p in enumerate(self.prefixes)]
            offsets = torch.tensor([0, *self.prefixes], device=self.device).cumsum(0)
            sink = torch.zeros(1, dtype=torch.int64, device=self.device)
            more |= {
                "indices": torch.cat([*held, sink]),
                "indptr": offsets,
                "tree_slots": torch.cat(trees) if self.visible is not Visible.ALL else None,
            }
        else:
            more |= {"table": self.table, "rows": rows}
        return plan_attention(space, lengths, **more)

    def check(self, plan, *, tolerance=None, **how):
        how.setdefault("scale", self.geometry.k_dim**-0.5)
        out, lse = tree_attention(plan, self.q, self.k, self.v, mask=self.mask, **how)
        at = [self.slots(i) for i in range(len(self.lengths))]
        expected, log = tree_attention_torch(
            self.geometry, self.q, self.k, self.v, at, self.seen, **how
        )
        if tolerance is None:
            tolerance = 0.002 if self.dtype == FP16 else 0.01
        assert not out.isnan().any()
        error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < tolerance
        finite = log != -math.inf
        assert torch.equal(finite, lse != -math.inf)
        assert (lse[finite].double() - log[finite]).abs().max() < 0.02 if finite.any() else True
        return out, lse


SHAPES = [
    (MLA, 3, BF16),
    (MLA_SMALL, 2, FP16),
    (Geometry(64, 1, 576, 512, True), 1, BF16),
    (Geometry(128, 1, 288, 256, True), 1, BF16),
    (GQA, 9, BF16),
    (Geometry(4, 4, 80, 80), 3, BF16),
    (Geometry(6, 2, 96, 96), 2, FP16),
    (Geometry(8, 1, 128, 128), 5, BF16),
    (Geometry(4, 2, 256, 256), 2, BF16),
    (Geometry(4, 4, 192, 128), 2, BF16),
]


@pytest.mark.parametrize(("geometry", "queries", "dtype"), SHAPES)
def test_every_width_equals_float64(geometry, queries, dtype, device):
    scene = Scene(geometry, [37, 20], queries, device, dtype=dtype)
    scene.check(scene.plan())


@pytest.mark.parametrize("visible", list(Visible))
@pytest.mark.parametrize("indexed", [False, True])
def test_every_mask_equals_float64_wherever_slots_are_listed(visible, indexed, device):
    scene = Scene(GQA, [40, 0, 17], 3, device, visible=visible, seed=3)
    scene.check(scene.plan(tree_apart=indexed or visible is Visible.TREE, indexed=indexed))


@pytest.mark.parametrize("coverage", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("visible", [Visible.ALL, Visible.CHAIN, Visible.TREE])
def test_pages_and_left_overs_together_equal_float64(coverage, visible, device):
    scene = Scene(GQA, [50, 0, 16, 15], 2, device, visible=visible, coverage=coverage, seed=7)
    found = scene.check(scene.plan(paged=True))
    other = scene.check(scene.plan())
    torch.testing.assert_close(found, other, atol=0.03, rtol=0.02)


def test_latent_rows_are_read_by_page_too(device):
    scene = Scene(MLA, [96], 2, device, coverage=0.9, visible=Visible.TREE)
    scene.check(scene.plan(paged=True))


def test_a_view_that_ran_over_or_is_stale_is_not_used(device):
    scene = Scene(GQA, [48, 48], 2, device)
    rows = torch.arange(1, 3, device=device)
    held = torch.tensor(scene.prefixes, dtype=torch.int32, device=device)
    view = page_view_buffers(2, 48, most_left=3, page=16, device=device)
    page_view(scene.table, rows, held, view, page=16)
    assert view.facts[:, 2].tolist() == [1, 1]
    space = attention_space(
        GQA, requests=2, queries=2, kv_dtype=BF16, visible=Visible.CHAIN, page=16, device=device,
        tile=FEW,
    )  # fmt: skip
    scene.check(plan_attention(space, held + 2, table=scene.table, rows=rows, view=view))
    view = page_view_buffers(2, 48, most_left=48, page=16, device=device)
    page_view(scene.table, rows, held - 1, view, page=16)
    scene.check(plan_attention(space, held + 2, table=scene.table, rows=rows, view=view))


@pytest.mark.parametrize("workers", [1, 2, 17])
@pytest.mark.parametrize("paged", [False, True])
def test_any_number_of_workers_gives_the_same(workers, paged, device):
    scene = Scene(GQA, [40, 0, 3, 33], 2, device, visible=Visible.TREE, coverage=0.5, seed=1)
    scene.check(scene.plan(workers=workers, paged=paged, tree_apart=True))


def test_requests_may_have_different_numbers_of_queries(device):
    scene = Scene(GQA, [30, 40, 20, 0], 4, device, counts=[4, 1, 0, 2], visible=Visible.TREE)
    scene.check(scene.plan())


def test_nothing_to_see_gives_zero_and_minus_infinity(device):
    scene = Scene(GQA, [0, 20, 0], 1, device, visible=Visible.ALL)
    out, lse = scene.check(scene.plan())
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -math.inf).all()


def test_a_query_that_sees_nothing_gets_zero_among_others_that_do(device):
    scene = Scene(GQA, [0, 34], 2, device, visible=Visible.FULL)
    scene.mask[:4] = torch.tensor([1, 0, 0, 0], dtype=torch.bool, device=device)
    scene.seen[0] = torch.tensor([[True, False], [False, False]])
    out, lse = scene.check(scene.plan())
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()


@pytest.mark.parametrize("visible", [Visible.TREE, Visible.FULL])
def test_rows_that_no_query_may_see_are_not_used_even_if_nan(visible, device):
    scene = Scene(GQA, [40], 3, device, visible=visible)
    hidden = [40, 41] if visible is Visible.TREE else [3, 20, 41]
    scene.seen[0][:, hidden] = False
    scene.mask = scene.seen[0][:, 40 if visible is Visible.TREE else 0 :].to(device).contiguous()
    for at in hidden:
        scene.k[scene.slots(0)[at].item()] = math.nan
        scene.v[scene.slots(0)[at].item()] = math.nan
    scene.check(scene.plan())


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("geometry", [MLA_SMALL, GQA])
def test_eight_bit_rows_are_scaled(kv_dtype, geometry, device):
    scene = Scene(geometry, [40, 9], 2, device, kv_dtype=kv_dtype, coverage=0.3)
    scene.check(scene.plan(), k_scale=0.5, v_scale=3.0)
    scene.check(scene.plan(paged=True), k_scale=2.0)


def test_scores_are_capped_and_logarithms_natural_on_demand(device):
    scene = Scene(GQA, [40, 0], 3, device)
    scene.check(scene.plan(), logit_cap=0.7, natural=True, scale=0.4)


def test_a_query_in_two_parts_equals_one_in_one(device):
    scene = Scene(MLA_SMALL, [40], 2, device)
    whole = tree_attention(scene.plan(), scene.q, scene.k, scale=0.1)
    nope, rope = scene.q[..., :256].contiguous(), scene.q[..., 256:].contiguous()
    parts = tree_attention(scene.plan(), nope, scene.k, scale=0.1, q_rope=rope)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_no_request_at_all_is_no_work(device):
    space = attention_space(GQA, requests=2, queries=1, kv_dtype=BF16, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    plan = (
        plan_attention(space, none, table=torch.zeros(1, 4, dtype=torch.int32), rows=none)
        if device.type == "cpu"
        else plan_attention(
            space, none, table=torch.zeros(1, 4, dtype=torch.int32, device=device), rows=none
        )
    )
    k = torch.zeros(4, 2, 64, dtype=BF16, device=device)
    out, lse = tree_attention(plan, k.new_zeros(0, 4, 64), k, k, scale=1.0)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_bad_shapes_are_named_with_what_is_allowed(device):
    def space(geometry=GQA, **more):
        how = {"requests": 2, "queries": 2, "kv_dtype": BF16, "device": device} | more
        return attention_space(geometry, **how)

    for message, call in {
        "heads must be a multiple of kv_heads 2, got 7": lambda: space(Geometry(7, 2, 64, 64)),
        "k_dim must be .* got 600": lambda: space(Geometry(8, 1, 600, 512)),
        "v_dim of latent rows of 576 must be 512, got 256": lambda: space(
            Geometry(8, 1, 576, 256, True)
        ),
        "v_dim must be a multiple of 16 up to 512, got 72": lambda: space(Geometry(8, 1, 64, 72)),
        "requests must be 1 to 4096, got 0": lambda: space(requests=0),
        "queries must be 1 to 512, got 513": lambda: space(queries=513),
        "kv_dtype must be one of .*float32": lambda: space(kv_dtype=torch.float32),
        "page must be None or one of .* got 24": lambda: space(page=24),
        "page must be None": lambda: space(page=64, visible=Visible.FULL),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_bad_inputs_are_named_with_what_is_allowed(device):
    scene = Scene(GQA, [20, 20], 2, device, visible=Visible.TREE)
    plan = scene.plan()
    good = {"q": scene.q, "k": scene.k, "v": scene.v, "scale": 1.0, "mask": scene.mask}
    for message, bad in {
        "q must have shape .* got": {"q": scene.q[:3]},
        "q must be one of .*float32": {"q": scene.q.float()},
        "k must be one of .*float16": {"k": scene.k.half()},
        "k must have shape": {"k": scene.k[..., :32]},
        "v must be given": {"v": None},
        "mask must be given where visible is tree": {"mask": None},
        "mask must be contiguous bool or uint8": {"mask": scene.mask.float()},
        "scale must be a finite number above 0, got 0": {"scale": 0.0},
        "k_scale must be a finite number above 0": {"k_scale": -1.0},
        "logit_cap must be a finite number, 0 for none": {"logit_cap": -2.0},
        "out must have shape": {"out": scene.q[..., :32]},
    }.items():
        with pytest.raises(ValueError, match=message):
            tree_attention(plan, **(good | bad))
    lengths = torch.tensor([3, 3], device=device)
    rows = torch.tensor([1, 2], device=device)
    for message, bad in {
        "slots must be given as": {"table": None},
        "rows must have 2 entries, got 1": {"rows": rows[:1]},
        "table must be int32 or int64": {"table": scene.table.float()},
        "lengths must have at most 2 entries, got 3": {
            "lengths": rows.new_zeros(3),
            "rows": rows.new_zeros(3),
        },
        "query_starts must have 3 entries, got 2": {"query_starts": rows},
        "view must be given if and only if page is": {
            "view": page_view_buffers(2, 20, page=16, device=device)
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            plan_attention(
                plan.space, **({"lengths": lengths, "table": scene.table, "rows": rows} | bad)
            )


LONG = [
    (MLA, 9, [200_000], Visible.TREE),
    (MLA, 9, [32_000, 1, 0, 777, 8_191], Visible.TREE),
    (MLA, 64, [5_000, 12_345], Visible.CHAIN),
    (MLA, 1, [189_000, 64, 3], Visible.ALL),
    (MLA_SMALL, 512, [3_000], Visible.TREE),
    (Geometry(128, 1, 576, 512, True), 2, [9_000, 100], Visible.CHAIN),
    (Geometry(32, 8, 128, 128), 9, [131_000, 5], Visible.TREE_OF_FULL),
    (Geometry(32, 8, 128, 128), 1, [70_000, 5], Visible.ALL),
    (Geometry(64, 8, 128, 128), 16, [20_000, 500], Visible.FULL),
    (Geometry(24, 8, 80, 80), 9, [20_000], Visible.TREE),
    (Geometry(24, 8, 96, 96), 9, [20_000], Visible.TREE),
    (Geometry(16, 4, 256, 256), 9, [20_000], Visible.TREE),
]


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("geometry", "queries", "prefixes", "visible"), LONG)
def test_long_requests_equal_float64(geometry, queries, prefixes, visible, paged, gpu):
    if paged and visible is Visible.FULL:
        pytest.skip("a full mask follows token order")
    scene = Scene(geometry, prefixes, queries, gpu, visible=visible, coverage=0.6, page=64)
    scene.check(scene.plan(paged=paged))


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [MLA, Geometry(32, 8, 128, 128)])
@pytest.mark.parametrize("queries", [1, 9])
def test_long_eight_bit_requests_equal_float64(geometry, queries, gpu):
    scene = Scene(geometry, [40_000, 9], queries, gpu, kv_dtype=E4M3, coverage=0.5, page=64)
    scene.check(scene.plan(), k_scale=0.5, v_scale=3.0)
    scene.check(scene.plan(paged=True))


@pytest.mark.gpu
def test_a_captured_step_follows_lengths_that_change_on_the_device(gpu, no_sync):
    scene = Scene(MLA, [9_000, 4_000], 3, gpu, visible=Visible.CHAIN)
    lengths = torch.tensor(scene.lengths, device=gpu)
    space = attention_space(
        MLA, requests=2, queries=3, kv_dtype=BF16, visible=Visible.CHAIN, device=gpu
    )
    rows = torch.tensor([1, 2], device=gpu)
    out = torch.empty(6, 16, 512, dtype=BF16, device=gpu)

    def step():
        plan = plan_attention(space, lengths, table=scene.table, rows=rows)
        return tree_attention(plan, scene.q, scene.k, scale=0.05, out=out)

    step()
    with no_sync():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for prefixes in ([9_000, 4_000], [1, 3_999], [0, 64], [8_191, 0]):
        held = [p + 3 for p in prefixes]
        lengths.copy_(torch.tensor(held))
        out.fill_(math.nan)
        graph.replay()
        at = [scene.table[i + 1, :n] for i, n in enumerate(held)]
        seen = [visible_tokens(Visible.CHAIN, p, 3) for p in prefixes]
        expected, _ = tree_attention_torch(MLA, scene.q, scene.k, None, at, seen, scale=0.05)
        assert (out.double() - expected).norm() / expected.norm() < 0.01
