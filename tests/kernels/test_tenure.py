from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag_kernels import (
    BufferTable,
    TenureSpace,
    commit_tenure,
    commit_tenure_torch,
    plan_tenure,
    plan_tenure_torch,
    relocate_rows,
    tenure_space,
    void_tenure,
)

ON_GPU = torch.cuda.is_available()
EXAMPLES = 60 if ON_GPU else 25
PAGE, WIDTH, ROWS = 8, 44, 6
# How a piece of a row lies: a whole page, a page begun or cut short, a run anywhere, single slots.
KINDS = ("page", "begun", "cut", "run", "single")


class Scene(NamedTuple):
    """Rows of a table, all other slots free in any order."""

    table: torch.Tensor
    lengths: list[int]
    free: torch.Tensor
    size: int


def scene(size: int, seed: int, spare: float, device: torch.device) -> Scene:
    random = torch.Generator().manual_seed(seed)

    def below(count: int) -> int:
        return int(torch.randint(0, count, (), generator=random))

    unused = [True] * (size + 1)
    rows: list[list[int]] = [[] for _ in range(ROWS)]
    for _ in range(below(50)):
        row, kind, count = below(ROWS), KINDS[below(len(KINDS))], 1 + below(PAGE - 1)
        page = PAGE + below(max(1, size // PAGE)) * PAGE
        if kind == "single":
            stretch = (torch.randperm(size, generator=random)[:count] + 1).tolist()
        else:
            first = {"begun": count, "run": count}.get(kind, 0)
            last = {"cut": count, "run": count + PAGE}.get(kind, PAGE)
            stretch = [*range(page + first, page + last)]
        for slot in [s for s in stretch if s <= size and unused[s]][: WIDTH - len(rows[row])]:
            rows[row].append(slot)
            unused[slot] = False
    # Others hold a slot of many pages, so that whole pages are few.
    for page in range(size // PAGE + 1):
        if float(torch.rand((), generator=random)) > spare:
            unused[min(page * PAGE + PAGE - 1, size)] = False
    table = torch.full((ROWS + 1, WIDTH), 13, dtype=torch.int32)
    for i, row in enumerate(rows, start=1):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    free = torch.tensor([s for s in range(1, size + 1) if unused[s]], dtype=torch.int64)
    free = free[torch.randperm(free.numel(), generator=random)]
    return Scene(table.to(device), [len(row) for row in rows], free.to(device), size)


def walks_of(made: Scene, bases: list[int], order: list[int], device: torch.device) -> torch.Tensor:
    """One lane a row, in any order, and padding up to a power of two."""
    walks = torch.zeros(3, 8, dtype=torch.int64)
    lanes = [r for r in order if made.lengths[r] - bases[r] >= PAGE]
    for lane, row in enumerate(lanes):
        walks[:, lane] = torch.tensor([row + 1, bases[row], made.lengths[row]])
    return walks.to(device)


def same_plan(one: TenureSpace, two: TenureSpace) -> None:
    moving = (one.src != one.dst).cpu()
    for name in ("src", "dst", "reached", "moved", "first"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert torch.equal(one.position.cpu()[moving], two.position.cpu()[moving])
    assert not one.counts.any()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    size=st.one_of(st.integers(1, 300), st.integers(200, 300)),
    seed=st.integers(0, 1 << 30),
    spare=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
    bases=st.lists(st.integers(0, 12), min_size=ROWS, max_size=ROWS),
    order=st.permutations(range(ROWS)),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_tenure_step_equals_the_reference(size, seed, spare, bases, order, dtype, device):
    made = scene(size, seed, spare, device)
    table, free = made.table.to(dtype), made.free.to(dtype)
    twin_table, twin_free = table.clone(), free.clone()
    named = torch.cat([table.flatten().long(), free.long()]).sort().values
    one, two = (tenure_space(size, 8, page=PAGE, device=device) for _ in "ab")
    state = torch.zeros(8, dtype=torch.int64, device=device)
    bases = [min(b, n) for b, n in zip(bases, made.lengths, strict=True)]
    for _ in range(3):
        walks = walks_of(made, bases, order, device)
        plan_tenure(table, walks, free, one, page=PAGE)
        plan_tenure_torch(twin_table, walks, twin_free, two, page=PAGE)
        same_plan(one, two)
        moving = one.dst[one.src != one.dst]
        assert moving.unique().numel() == moving.numel()
        assert torch.isin(moving, free.long()).all()
        commit_tenure(table, free, one, state, page=PAGE)
        commit_tenure_torch(twin_table, twin_free, two, state, page=PAGE)
        assert torch.equal(table, twin_table)
        assert torch.equal(free, twin_free)
        assert torch.equal(torch.cat([table.flatten().long(), free.long()]).sort().values, named)
        for row, reached in zip(walks[0].tolist(), one.reached.tolist(), strict=True):
            if row:
                bases[row - 1] = reached


def step(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TenureSpace]:
    """Rows 1 and 2 have a group to move, row 3 has three tokens before an aligned page."""
    table = torch.full((4, 24), 5, dtype=torch.int32)
    table[1, :9] = torch.tensor([40, 42, 44, 46, 41, 43, 45, 47, 55])
    table[2, :15] = torch.tensor([*range(33, 40), 50, 60, 51, 61, 52, 62, 53, 63])
    table[3, :16] = torch.tensor([2, 57, 58, *range(64, 72), *range(73, 78)])
    used = torch.cat([table[1, :9], table[2, :15], table[3, :16]]).tolist()
    free = torch.tensor([s for s in range(100, 0, -1) if s not in used and s != 5])
    walks = torch.tensor([[1, 2, 3, 0], [0, 3, 0, 0], [9, 15, 16, 0]])
    space = tenure_space(100, 4, page=PAGE, device=device)
    return table.to(device), free.to(device), walks.to(device), space


def test_a_step_moves_rows_table_and_list_together(device):
    table, free, walks, space = step(device)
    pool = torch.randint(0, 256, (101, 48), dtype=torch.uint8, device=device)
    content, named = pool[table.long()].clone(), [*table.flatten().tolist(), *free.tolist()]
    buffers = BufferTable([pool])
    walks[1, 1] = 7
    plan_tenure(table, walks, free, space, page=PAGE)
    assert int(space.moved) == 16
    assert space.reached.tolist() == [8, 15, 3, 0]
    relocate_rows(buffers, space.src, space.dst, disjoint=True, distinct_src=True)
    commit_tenure(table, free, space, buffers.state, page=PAGE)
    assert torch.equal(pool[table.long()], content)
    assert table[1, :9].tolist() == [*range(8, 16), 55]
    assert table[2, 7:15].tolist() == [*range(16, 24)]
    assert sorted([*table.flatten().tolist(), *free.tolist()]) == sorted(named)


def test_a_row_goes_on_behind_a_page_that_it_has_begun(device):
    table, free, walks, space = step(device)
    table[2, :16] = torch.tensor([*range(32, 40), 50, 60, 51, 61, 52, 62, 53, 63])
    plan_tenure(table, walks, free, space, page=PAGE)
    assert space.reached.tolist()[1] == 8
    walks[2, 1] = 16
    plan_tenure(table, walks, free, space, page=PAGE)
    assert space.reached.tolist()[1] == 16
    assert space.src[PAGE : 2 * PAGE].tolist() == table[2, 8:16].tolist()


def test_a_voided_copy_leaves_table_and_list_alone(device):
    table, free, walks, space = step(device)
    before = table.clone(), free.clone()
    plan_tenure(table, walks, free, space, page=PAGE)
    assert int(space.moved) > 0
    state = torch.zeros(8, dtype=torch.int64, device=device)
    state[3] = 4
    commit_tenure(table, free, space, state, page=PAGE)
    assert torch.equal(table, before[0])
    assert torch.equal(free, before[1])
    for part in (space.moved, space.reached, space.src, space.dst):
        assert not part.any()


@pytest.mark.parametrize("refused", [True, False])
def test_a_refused_plan_moves_nothing(refused, device):
    table, free, walks, space = step(device)
    before = table.clone()
    plan_tenure(table, walks, free, space, page=PAGE)
    planned = space.src.clone(), space.reached.clone()
    void_tenure(space, torch.tensor(refused, device=device))
    if refused:
        commit_tenure(table, free, space, torch.zeros(8, dtype=torch.int64, device=device),
                      page=PAGE)  # fmt: skip
        assert torch.equal(table, before)
        assert not space.reached.any()
    else:
        assert torch.equal(space.src, planned[0])
        assert torch.equal(space.reached, planned[1])


def test_fewer_lanes_use_the_same_memory(device):
    table, free, walks, space = step(device)
    few = space.narrow(2)
    assert (few.lanes, few.size) == (2, 100)
    plan_tenure(table, walks[:, :2].contiguous(), free, few, page=PAGE)
    assert few.reached.tolist() == space.reached[:2].tolist() == [8, 11]
    assert int(space.moved) == int(few.moved) == 2 * PAGE


def test_an_empty_list_leaves_every_group_waiting(device):
    table, free, walks, space = step(device)
    plan_tenure(table, walks, free[:0], space, page=PAGE)
    assert not space.moved.any()
    assert space.reached.tolist() == [0, 3, 3, 0]


def test_a_slot_listed_twice_does_not_make_its_page_whole(device):
    table = torch.tensor([[0] * 8, [3, 5, 1, 2, 30, 31, 29, 28]], dtype=torch.int32, device=device)
    free = torch.tensor([8, 9, 10, 11, 12, 13, 14, 14], device=device)
    space = tenure_space(31, 1, page=PAGE, device=device)
    # Where a longer list once held the missing slot must not be looked at.
    space.place.fill_(1 << 20)
    walks = torch.tensor([[1], [0], [8]], device=device)
    plan_tenure(table, walks, free, space, page=PAGE)
    assert int(space.moved) == 0
    assert torch.equal(space.src, space.dst)


def test_wrong_arguments_are_refused_by_name(device):
    table, free, walks, space = step(device)
    with pytest.raises(ValueError, match=r"walks must be int64 \[3, 4\], got \(3, 2\)"):
        plan_tenure(table, walks[:, :2], free, space, page=PAGE)
    with pytest.raises(ValueError, match="made for pages of 8, not 16"):
        plan_tenure(table, walks, free, space, page=16)
    with pytest.raises(ValueError, match="free must be int32 or int64"):
        commit_tenure(table, free.float(), space, walks, page=PAGE)
    with pytest.raises(ValueError, match="a lane and a slot"):
        tenure_space(100, 0, device=device)


@pytest.mark.gpu
def test_nothing_synchronises_with_the_host(gpu, no_sync):
    table, free, walks, space = step(gpu)
    state = torch.zeros(8, dtype=torch.int64, device=gpu)
    plan_tenure(table, walks, free, space, page=PAGE)
    commit_tenure(table, free, space, state, page=PAGE)
    with no_sync():
        plan_tenure(table, walks, free, space, page=PAGE)
        void_tenure(space, state[0] != 0)
        commit_tenure(table, free, space, state, page=PAGE)
