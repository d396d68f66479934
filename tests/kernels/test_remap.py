from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag_kernels import remap, remap_torch, remap_values, remap_values_torch

EXAMPLES = 60 if torch.cuda.is_available() else 12
INDICES = st.sampled_from([torch.int32, torch.int64])


def lookup(size: int, moves: dict[int, int], device: torch.device, dtype=torch.int32):
    lut = torch.arange(size + 1, dtype=dtype)
    for old, new in moves.items():
        lut[old] = new
    return lut.to(device)


def test_only_the_live_range_of_each_row_is_rewritten(device):
    table = torch.tensor([[3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3]], dtype=torch.int32)
    table = table.to(device)
    two = torch.tensor([2, 0], device=device)
    remap(lookup(5, {3: 4}, device), table, two, two - two + 1, two + 2)
    assert table.tolist() == [[3, 4, 3, 3], [3, 3, 3, 3], [3, 4, 4, 4]]


def test_case_16_stale_entries_past_a_length_are_neither_read_nor_rewritten(device):
    table = torch.full((3, 1500), 7, dtype=torch.int32)
    table[:, 1200:] = torch.tensor([0, -1, 1 << 30]).repeat(100)
    old = table.clone()
    table = table.to(device)
    rows = torch.tensor([1, 2], device=device)
    remap(
        lookup(9, {7: 8, 0: 5}, device), table, rows, rows * 0, torch.tensor([1200, 0]).to(device)
    )
    old[1, :1200] = 8
    assert torch.equal(table.cpu(), old)


def test_numbers_outside_the_lookup_table_stay_as_they_are(device):
    table = torch.tensor([[-1, 6, 2, 5, -(1 << 31), (1 << 31) - 1]], dtype=torch.int32)
    table = table.to(device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    remap(lookup(5, {2: 3}, device), table, zero, zero, zero + 6)
    assert table.tolist() == [[-1, 6, 3, 5, -(1 << 31), (1 << 31) - 1]]


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_any_ranges_of_any_rows_equal_the_reference(data, device):
    columns = data.draw(st.integers(1, 1600))
    size = data.draw(st.integers(1, 3000))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    wide = torch.randint(-2, size + 3, (6, columns + 3), generator=random)
    wide = wide.to(data.draw(INDICES)).to(device)
    table = wide[:, 1 : columns + 1]
    lut = torch.randint(1, size + 1, (size + 1,), generator=random).to(data.draw(INDICES))
    dtype = data.draw(INDICES)
    rows = torch.randperm(6, generator=random)[:3].to(device, dtype)
    bounds = [data.draw(st.integers(-3, columns + 3)) for _ in range(6)]
    starts = torch.tensor(bounds[:3], dtype=dtype, device=device)
    ends = torch.tensor(bounds[3:], dtype=dtype, device=device)
    twin = wide.clone()
    remap(lut.to(device), table, rows, starts, ends)
    remap_torch(lut.to(device), twin[:, 1 : columns + 1], rows, starts, ends)
    assert torch.equal(wide, twin)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_any_list_of_values_equals_the_reference(data, device):
    size = data.draw(st.integers(1, 3000))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    lut = torch.randint(1, size + 1, (size + 1,), generator=random).to(data.draw(INDICES))
    values = [
        torch.randint(-2, size + 3, (n,), generator=random).to(data.draw(INDICES)).to(device)
        for n in data.draw(st.lists(st.sampled_from([0, 1, 2, 255, 1024, 1025, 2500]), max_size=5))
    ]
    twins = [v.clone() for v in values]
    remap_values(lut.to(device), values)
    remap_values_torch(lut.to(device), twins)
    assert all(map(torch.equal, values, twins))


def test_rows_keep_within_longest_given_by_the_host(device):
    table = torch.full((2, 5000), 1, dtype=torch.int32, device=device)
    row = torch.tensor([1], device=device)
    remap(lookup(2, {1: 2}, device), table, row, row + 9, row + 19, longest=10)
    assert table[1].eq(2).nonzero().flatten().tolist() == [*range(10, 20)]
    assert not table[0].eq(2).any()


def test_wrong_arguments_are_refused_by_name(device):
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    lut = lookup(4, {}, device)
    with pytest.raises(ValueError, match="lut must be int32 or int64"):
        remap(lut.float(), table, one, one, one)
    with pytest.raises(ValueError, match="table must be int32 or int64"):
        remap(lut, table.float(), one, one, one)
    with pytest.raises(ValueError, match="contiguous rows"):
        remap(lut, table.t(), one, one, one)
    with pytest.raises(ValueError, match="1 rows, 2 starts"):
        remap(lut, table, one, torch.cat([one, one]), one)
    with pytest.raises(ValueError, match=r"values\[1\]"):
        remap_values(lut, [one, one.float()])


@pytest.mark.gpu
def test_nothing_synchronises_with_the_host(gpu, no_sync):
    table = torch.ones(2, 4, dtype=torch.int32, device=gpu)
    one = torch.ones(1, dtype=torch.int64, device=gpu)
    lut = lookup(4, {1: 2}, gpu)
    remap(lut, table, one, one, one)
    remap_values(lut, [table[0]])
    with no_sync():
        remap(lut, table, one, one, one + 2)
        remap_values(lut, [table[0]])
