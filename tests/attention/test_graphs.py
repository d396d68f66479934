"""A captured plan and layer serve whatever lies in the same tensors when they are replayed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from kvdefrag.attention import (
    Absent,
    FlashMlaSparse,
    Kind,
    Numbers,
    Provider,
    Step,
    Task,
    TreeKernel,
    sparse_forward,
)
from kvdefrag_kernels.attention_geometry import Geometry, Tile
from kvdefrag_kernels.attention_reference import tree_attention_torch, visible_tokens

ON_GPU = torch.cuda.is_available()
WHERE = torch.device("cuda" if ON_GPU else "cpu")
MLA, GQA = Geometry(16, 1, 576, 512, True), Geometry(8, 2, 128, 128)
TIMES = 40 if ON_GPU else 1  # lengths on a GPU
TILE = None if ON_GPU else Tile(16, 16, 4, 2, 2, 2)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton or its interpreter"
)


def sparse(task: Task) -> Provider:
    try:
        return FlashMlaSparse(task, WHERE, longest=4096, forward=sparse_forward())
    except Absent as absent:
        pytest.skip(str(absent))


MAKERS: dict[str, Callable[[Task], Provider]] = {
    "kernel": lambda task: TreeKernel(task, WHERE, tile=TILE),
    "flashmla_sparse": sparse,
}


def captured(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Capture a call on a GPU, after a run of it on a side stream."""
    if not ON_GPU:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("kind", "geometry", "queries"),
    [
        (Kind.DECODE, MLA, 1),
        (Kind.DECODE, GQA, 1),
        (Kind.CHAIN, MLA, 9),
        (Kind.TREE, MLA, 9),
        (Kind.TREE, GQA, 5),
    ],
)
def test_a_replay_serves_other_lengths_slots_and_masks(name, kind, geometry, queries):
    g, requests, slots = geometry, 3, 500 * TIMES
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).bfloat16().to(WHERE)

    k = normal(slots, g.kv_heads, g.k_dim)
    v = None if g.latent else normal(slots, g.kv_heads, g.v_dim)
    q = normal(requests * queries, g.heads, g.k_dim)
    tree = kind is not Kind.DECODE
    lengths = torch.zeros(requests, dtype=torch.int32, device=WHERE)
    indptr = torch.zeros(requests + 1, dtype=torch.int32, device=WHERE)
    indices = torch.zeros(slots, dtype=torch.int64, device=WHERE)
    own = torch.zeros(requests * queries, dtype=torch.int64, device=WHERE)
    mask = torch.zeros(queries * slots, dtype=torch.uint8, device=WHERE)
    starts = torch.zeros(requests + 1, dtype=torch.int64, device=WHERE)
    step = Step(
        lengths, indices, indptr, own if tree else None, starts if kind is Kind.TREE else None
    )
    provider = MAKERS[name](Task(kind, g, requests + 1, queries, torch.bfloat16))
    out = torch.zeros(requests * queries, g.heads, g.v_dim, dtype=torch.bfloat16, device=WHERE)
    numbers = Numbers(g.k_dim**-0.5)

    def call() -> torch.Tensor:
        provider.plan(step)
        part = mask if kind is Kind.TREE else None
        return provider.run(q, k, v, numbers=numbers, mask=part, out=out)

    def lay(prefixes: list[int]) -> torch.Tensor:
        order = torch.randperm(slots, generator=random)
        ends = torch.tensor([0, *prefixes]).cumsum(0)
        area = torch.tensor([0, *[queries * (p + queries) for p in prefixes]]).cumsum(0)
        lengths.copy_(torch.tensor(prefixes))
        indptr.copy_(ends)
        starts.copy_(area)
        indices[: ends[-1]] = order[: ends[-1]].to(WHERE)
        own.copy_(order[ends[-1] : ends[-1] + requests * queries])
        held, seen = [], []
        for i, prefix in enumerate(prefixes):
            see = torch.rand(queries, prefix + queries, generator=random) < 0.5
            see[:, prefix:] |= torch.eye(queries, dtype=torch.bool)
            mask[area[i] : area[i + 1]] = see.flatten().to(torch.uint8).to(WHERE)
            at = indices[ends[i] : ends[i + 1]]
            held.append(torch.cat([at, own[i * queries : (i + 1) * queries]]) if tree else at)
            seen.append(visible_tokens(kind.visible, prefix, queries, see.flatten()))
        return tree_attention_torch(g, q, k, v, held, seen, scale=numbers.scale)[0]

    first = [p * TIMES for p in (20, 1, 33)]
    right = lay(first)
    replay = captured(call)
    for prefixes in (first, [p * TIMES for p in (3, 47, 18)], [1, 1, 90 * TIMES]):
        right = lay(prefixes)
        out.fill_(float("nan"))
        replay()
        error = (out.double() - right).norm() / right.norm()
        assert float(error.nan_to_num(nan=1.0)) < 0.01
