from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag_kernels import layout_stats_torch, page_view, page_view_buffers, page_view_torch

ON_GPU = torch.cuda.is_available()
EXAMPLES = 60 if ON_GPU else 6
LONG = 12_000 if ON_GPU else 330


def view_of(slots: list[int], device: torch.device, most_left: int = 8, page: int = 4):
    table = torch.tensor([[*slots, 99, 100]], dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    view = page_view_buffers(1, 16, most_left=most_left, page=page, device=device)
    page_view(table, row, row + len(slots), view, page=page)
    pages, left, spilt, tokens = view.facts[0].tolist()
    return view.pages[0, :pages].tolist(), view.left[0, :left].tolist(), spilt, tokens


@pytest.mark.parametrize(
    ("slots", "pages", "left"),
    [
        ([], [], []),
        ([4, 5, 6, 7], [1], []),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1], [1, 2, 3, 8]),
        ([9, 8, 9, 10, 11, 12, 4, 5, 6, 7], [2, 1], [9, 12]),
        ([0, 1, 2, 3], [], [0, 1, 2, 3]),
        ([4, 5, 6], [], [4, 5, 6]),
        ([4, 5, 7, 6], [], [4, 5, 7, 6]),
    ],
)
def test_small_requests_split_as_by_hand(slots, pages, left, device):
    assert view_of(slots, device) == (pages, left, 0, len(slots))


def test_too_many_left_overs_raise_the_overflow_flag_and_write_no_further(device):
    table = torch.arange(1, 40, 2, dtype=torch.int32, device=device).view(1, -1)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    view = page_view_buffers(2, 64, most_left=5, page=4, device=device)
    page_view(table, zero, zero + 20, view, page=4)
    assert view.facts.tolist() == [[0, 5, 1, 20], [0, 0, 0, 0]]
    assert view.left.tolist() == [[1, 3, 5, 7, 9], [0] * 5]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    mean=st.sampled_from([1, 20, 100, 400]),
    most_left=st.sampled_from([7, 4096]),
    page=st.sampled_from([16, 64]),
    lengths=st.lists(st.integers(0, LONG), min_size=2, max_size=2),
)
def test_any_request_equals_the_reference(seed, mean, most_left, page, lengths, device):
    random = torch.Generator().manual_seed(seed)
    table = torch.randint(-1, 9000, (3, LONG), generator=random, dtype=torch.int32)
    for row in table:
        t = 0
        while t < LONG and mean > 1:
            n, first = torch.randint(1, 2 * mean, (2,), generator=random).tolist()
            row[t : t + n] = torch.arange(first * 64, first * 64 + n)[: LONG - t]
            t += n
    table = table.to(device)
    rows = torch.tensor([2, 0], device=device)
    held = torch.tensor(lengths, device=device)
    views = [
        page_view_buffers(2, LONG, most_left=most_left, page=page, device=device) for _ in "ab"
    ]
    page_view(table, rows, held, views[0], page=page)
    page_view_torch(table, rows, held, views[1], page=page)
    for found, expected in zip(views[0][:3], views[1][:3], strict=True):
        assert torch.equal(found, expected)
    if not views[0].facts[:, 2].any():
        stats = layout_stats_torch(table, rows, held, page=page)
        assert torch.equal(stats[:, 2], views[0].facts[:, 0] * page)
        assert torch.equal(stats[:, 3], views[0].facts[:, 1])


@pytest.mark.gpu
def test_a_captured_view_follows_lengths_that_change_on_the_device(gpu):
    table = torch.arange(64, 64 + 9000, dtype=torch.int32, device=gpu).view(1, -1)
    row = torch.zeros(1, dtype=torch.int64, device=gpu)
    length = torch.full((1,), 9000, device=gpu)
    view = page_view_buffers(1, 9000, device=gpu)
    page_view(table, row, length, view)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        page_view(table, row, length, view)
    for n in (0, 63, 64, 6401, 9000):
        length.fill_(n)
        graph.replay()
        assert view.facts[0].tolist() == [n // 64, n % 64, 0, n]
