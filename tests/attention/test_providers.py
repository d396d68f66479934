"""Every provider gives what float64 gives, whoever is asked, wherever the slots lie."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kvdefrag.attention import (
    Absent,
    FlashMlaSparse,
    Kind,
    Numbers,
    TreeKernel,
    TreeKernelOverPages,
    sparse_forward,
)
from kvdefrag_kernels.attention_geometry import Geometry, Tile

sys.path.append(str(Path(__file__).parent))
from scenes import Scene, sparse_in_torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton's interpreter",
)

GQA, MLA = Geometry(4, 2, 64, 64), Geometry(4, 1, 288, 256, True)
WIDE_MLA = Geometry(8, 1, 576, 512, True)
FEW = Tile(16, 16, 4, 2, 2, 2)
BOUND = 160


@pytest.mark.parametrize("geometry", [GQA, MLA])
@pytest.mark.parametrize(("kind", "queries"), [(Kind.DECODE, 1), (Kind.CHAIN, 4), (Kind.TREE, 5)])
def test_our_kernel_equals_float64_for_every_kind(geometry, kind, queries):
    scene = Scene(kind, geometry, [37, 0, 20], queries, numbers=Numbers(0.1, logit_cap=20.0))
    provider = TreeKernel(scene.task, "cpu", tile=FEW)

    provider.plan(scene.step)
    out = torch.empty(*scene.q.shape[:2], geometry.v_dim, dtype=scene.q.dtype)
    found = provider.run(scene.q, scene.k, scene.v, numbers=scene.numbers, mask=scene.mask, out=out)

    assert found.data_ptr() == out.data_ptr()
    assert scene.error(found) < 0.01


def test_one_provider_serves_one_step_after_the_other():
    scenes = [Scene(Kind.TREE, GQA, lengths, 3, seed=1) for lengths in ([30, 9], [5], [1, 40])]
    provider = TreeKernel(scenes[0].task, "cpu", tile=FEW)

    for scene in (*scenes, *scenes):
        provider.plan(scene.step)
        found = provider.run(scene.q, scene.k, scene.v, numbers=scene.numbers, mask=scene.mask)
        assert scene.error(found) < 0.01


def test_masks_may_start_anywhere():
    scene = Scene(Kind.TREE, GQA, [12, 7], 3)
    area = 3 * (12 + 3)
    mask = torch.cat([scene.mask[:area], torch.zeros(50, dtype=torch.bool), scene.mask[area:]])
    provider = TreeKernel(scene.task, "cpu", tile=FEW)

    provider.plan(scene.step._replace(mask_starts=torch.tensor([0, area + 50])))
    found = provider.run(scene.q, scene.k, scene.v, numbers=scene.numbers, mask=mask)

    assert scene.error(found) < 0.01


def test_what_our_kernel_does_not_take_is_refused_by_name():
    scene = Scene(Kind.CHAIN, GQA, [3], 2)

    with pytest.raises(Absent, match="k_dim"):
        TreeKernel(scene.task._replace(geometry=Geometry(4, 2, 72, 72)), "cpu")
    with pytest.raises(RuntimeError, match="plan"):
        TreeKernel(scene.task, "cpu").run(scene.q, scene.k, scene.v, numbers=scene.numbers)


@pytest.mark.parametrize(("kind", "queries"), [(Kind.DECODE, 1), (Kind.TREE, 3)])
def test_pages_are_read_as_blocks_with_the_same_result(kind, queries):
    scene = Scene(kind, GQA, [50, 48], queries, whole=2)
    provider = TreeKernelOverPages(
        scene.task, "cpu", longest=BOUND, page=16, most_left=BOUND, tile=FEW
    )

    provider.plan(scene.step)
    found = provider.run(scene.q, scene.k, scene.v, numbers=scene.numbers, mask=scene.mask)

    assert provider._view.facts[:2, 0].tolist() == [2, 2]
    assert scene.error(found) < 0.01


@pytest.mark.parametrize("base_2", [True, False])
@pytest.mark.parametrize(("kind", "queries"), [(Kind.DECODE, 1), (Kind.CHAIN, 9)])
@pytest.mark.parametrize("lanes", [1, 9])
def test_sparse_splits_join_to_float64_in_either_base(kind, queries, lanes, base_2):
    scene = Scene(kind, WIDE_MLA, [130, 0, 128] if kind is Kind.CHAIN else [150, 1, 128], queries)
    forward = functools.partial(sparse_in_torch, base_2=base_2)
    provider = FlashMlaSparse(
        scene.task, "cpu", longest=BOUND, forward=forward, lanes=lanes, tile=FEW
    )

    provider.plan(scene.step)
    found = provider.run(scene.q, scene.k, None, numbers=scene.numbers)

    assert scene.error(found) < 0.01


def test_splits_follow_the_lengths_and_not_their_bound():
    scene = Scene(Kind.DECODE, WIDE_MLA, [300], 1)
    provider = FlashMlaSparse(
        scene.task, "cpu", longest=2_000, forward=sparse_in_torch, lanes=6, tile=FEW
    )

    provider.plan(scene.step)

    assert provider._splits == 3
    assert (provider._index[:3] >= 0).sum(-1).flatten().tolist() == [128, 128, 44]


def test_sparse_refuses_what_it_cannot_do_right():
    tree = Scene(Kind.TREE, WIDE_MLA, [3], 2).task
    make = functools.partial(FlashMlaSparse, where="cpu", longest=BOUND, forward=sparse_in_torch)

    with pytest.raises(Absent, match="no tree mask"):
        make(tree)
    with pytest.raises(Absent, match="bfloat16"):
        make(tree._replace(kind=Kind.DECODE, queries=1, kv_dtype=torch.float8_e4m3fn))
    with pytest.raises(Absent, match=r"512 \+ 64"):
        make(tree._replace(kind=Kind.CHAIN, geometry=GQA))
    with pytest.raises(Absent, match="too large"):
        make(tree._replace(kind=Kind.CHAIN, requests=4096), longest=1 << 20)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda out, m, lse: (out * 1.1, m, lse), "wrong on a small case"),
        (lambda out, m, lse: (out, m, lse.nan_to_num(posinf=0.0)), "wrong on a small case"),
        (lambda out, m, lse: (out, m, lse + 3), "unknown base"),
    ],
)
def test_a_sparse_forward_that_is_wrong_on_this_machine_is_not_used(wrong, why):
    task = Scene(Kind.DECODE, WIDE_MLA, [3]).task

    def forward(*args, **kwargs):
        return wrong(*sparse_in_torch(*args, **kwargs))

    with pytest.raises(Absent, match=why):
        FlashMlaSparse(task, "cpu", longest=BOUND, forward=forward)


def test_sparse_takes_neither_caps_nor_scales():
    task = Scene(Kind.DECODE, WIDE_MLA, [3]).task
    provider = FlashMlaSparse(task, "cpu", longest=BOUND, forward=sparse_in_torch)

    assert provider.takes(Numbers(0.1))
    assert not provider.takes(Numbers(0.1, logit_cap=30.0))
    assert not provider.takes(Numbers(0.1, k_scale=0.5))


@pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is not None, reason="it is installed")
def test_without_sgl_kernel_there_is_no_sparse_forward():
    with pytest.raises(Absent, match="cannot be imported"):
        sparse_forward()
