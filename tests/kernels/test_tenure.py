from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag_kernels import (
    BufferTable,
    commit_tenure,
    commit_tenure_torch,
    plan_tenure,
    plan_tenure_torch,
    relocate_rows,
    tenure_space,
)

ON_GPU = torch.cuda.is_available()
EXAMPLES = 60 if ON_GPU else 10
PAGE = 8


def scene(seed: int, size: int, live: int, device: torch.device) -> tuple[Any, ...]:
    """Four rows of 40 tokens on random slots, the rest of the pool free in random order."""
    random = torch.Generator().manual_seed(seed)
    # Few live slots leave whole pages free; they cluster, so that some pages are partly used.
    used = (torch.randperm(size, generator=random)[:live] + 1).sort().values
    used = torch.unique(torch.where(torch.rand(live, generator=random) < 0.7, used // 3 + 1, used))
    used = used[torch.randperm(used.numel(), generator=random)]
    table = torch.zeros(5, 40, dtype=torch.int32)
    for row, part in zip(table[1:], used.split(40), strict=False):
        row[: part.numel()] = part.int()
    held = torch.zeros(size + 1, dtype=torch.bool)
    held[0] = held[used] = True
    free = (~held).nonzero().flatten()
    free = free[torch.randperm(free.numel(), generator=random)]
    return table.to(device), free.to(device), used


def names_every_slot_once(table: torch.Tensor, free: torch.Tensor, size: int) -> bool:
    found = torch.cat([table[table > 0].cpu().long(), free.cpu().long()]).sort().values
    return torch.equal(found, torch.arange(1, size + 1))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(200, 420),
    live=st.integers(20, 160),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    groups=st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 4)), min_size=6, max_size=6),
)
def test_any_tenure_step_equals_the_reference(seed, size, live, dtype, groups, device):
    table, free, _ = scene(seed, size, live, device)
    table, free = table.to(dtype), free.to(dtype)
    twin_table, twin_free = table.clone(), free.clone()
    groups = [*dict.fromkeys(groups), (-1, 0), (-1, 0), (-1, 0), (-1, 0), (-1, 0)][:6]
    rows = torch.tensor([r for r, _ in groups], dtype=dtype, device=device)
    starts = torch.tensor([g * PAGE for _, g in groups], dtype=dtype, device=device)
    one, two = (tenure_space(size, 6, page=PAGE, device=device) for _ in "ab")
    state = torch.zeros(8, dtype=torch.int64, device=device)
    for _ in range(2):
        plan_tenure(table, rows, starts, free, one, page=PAGE)
        plan_tenure_torch(twin_table, rows, starts, twin_free, two, page=PAGE)
        for found, expected in zip(one[:5], two[:5], strict=True):
            assert torch.equal(found, expected)
        assert not one.counts.any()
        commit_tenure(table, rows, starts, free, one, state, page=PAGE)
        commit_tenure_torch(twin_table, rows, starts, twin_free, two, state, page=PAGE)
        assert torch.equal(table, twin_table)
        assert torch.equal(free, twin_free)
        assert names_every_slot_once(table, free, size)


def step(device: torch.device) -> tuple[Any, ...]:
    table, free, _ = scene(3, 400, 100, device)
    rows = torch.tensor([1, 2, 1, -1], device=device)
    starts = torch.tensor([0, 8, 16, 0], device=device)
    return table, free, rows, starts, tenure_space(400, 4, page=PAGE, device=device)


def test_a_step_moves_rows_table_and_list_together(device):
    table, free, rows, starts, space = step(device)
    pool = torch.randint(0, 256, (401, 48), dtype=torch.uint8, device=device)
    content = pool[table.long()].clone()
    buffers = BufferTable([pool])
    plan_tenure(table, rows, starts, free, space, page=PAGE)
    relocate_rows(buffers, space.src, space.dst, disjoint=True, distinct_src=True)
    commit_tenure(table, rows, starts, free, space, buffers.state, page=PAGE)
    assert space.moved.tolist() == [1, 1, 1, 0]
    assert torch.equal(pool[table.long()], content)
    assert names_every_slot_once(table, free, 400)
    for row, start in ((1, 0), (2, 8), (1, 16)):
        slots = table[row, start : start + PAGE].tolist()
        assert slots == [*range(slots[0], slots[0] + PAGE)]
        assert slots[0] % PAGE == 0
    plan_tenure(table, rows, starts, free, space, page=PAGE)
    assert not space.moved.any()


def test_a_voided_copy_leaves_table_and_list_alone(device):
    table, free, rows, starts, space = step(device)
    before = table.clone(), free.clone()
    plan_tenure(table, rows, starts, free, space, page=PAGE)
    state = torch.zeros(8, dtype=torch.int64, device=device)
    state[3] = 4
    commit_tenure(table, rows, starts, free, space, state, page=PAGE)
    assert torch.equal(table, before[0])
    assert torch.equal(free, before[1])
    assert not space.moved.any()


def test_a_slot_listed_twice_does_not_make_its_page_whole(device):
    table = torch.tensor([[0] * 8, [3, 5, 1, 2, 30, 31, 29, 28]], dtype=torch.int32, device=device)
    free = torch.tensor([8, 9, 10, 11, 12, 13, 14, 14], device=device)
    space = tenure_space(31, 1, page=PAGE, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    plan_tenure(table, one, one - 1, free, space, page=PAGE)
    assert space.moved.tolist() == [0]
    assert torch.equal(space.src, space.dst)


def test_wrong_arguments_are_refused_by_name(device):
    table, free, rows, starts, space = step(device)
    with pytest.raises(ValueError, match="2 rows, 4 starts, space for 4"):
        plan_tenure(table, rows[:2], starts, free, space, page=PAGE)
    with pytest.raises(ValueError, match="made for pages of 8"):
        plan_tenure(table, rows, starts, free, space, page=16)
    with pytest.raises(ValueError, match="a group and a page"):
        tenure_space(100, 0, device=device)


@pytest.mark.gpu
def test_nothing_synchronises_with_the_host(gpu, no_sync):
    table, free, rows, starts, space = step(gpu)
    state = torch.zeros(8, dtype=torch.int64, device=gpu)
    plan_tenure(table, rows, starts, free, space, page=PAGE)
    commit_tenure(table, rows, starts, free, space, state, page=PAGE)
    with no_sync():
        plan_tenure(table, rows, starts, free, space, page=PAGE)
        commit_tenure(table, rows, starts, free, space, state, page=PAGE)
