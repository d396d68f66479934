from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdefrag_kernels import order_free_list, page_free_counts, substitute


@given(size=st.integers(1, 200), page=st.sampled_from([4, 16]), data=st.data())
def test_partly_used_pages_come_first_and_whole_ones_last(size, page, data):
    free = data.draw(st.lists(st.integers(1, size), unique=True))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    given_list = torch.tensor(free, dtype=dtype)
    counts = page_free_counts(given_list, size, page=page)
    assert counts.tolist() == [
        sum(s // page == k for s in free) for k in range(size // page + 1)
    ]  # fmt: skip
    ordered = order_free_list(given_list, size, page=page)
    assert ordered.dtype == dtype
    assert ordered.tolist() == sorted(free, key=lambda s: (int(counts[s // page]) == page, s))


def test_a_substituted_list_keeps_its_length_and_other_entries():
    free = torch.tensor([5, 9, 2, 7])
    substitute(free, torch.tensor([3, 0]), torch.tensor([1, 4]))
    assert free.tolist() == [4, 9, 2, 1]


@pytest.mark.gpu
def test_nothing_synchronises_with_the_host(gpu, no_sync):
    free = torch.randperm(100_000, device=gpu) + 1
    positions, slots = torch.arange(5, device=gpu), free[5:10].clone()
    order_free_list(free, 100_000)
    with no_sync():
        ordered = order_free_list(free, 100_000)
        substitute(free, positions, slots)
    assert torch.equal(ordered, free.new_tensor(order_free_list(ordered.cpu(), 100_000).tolist()))
