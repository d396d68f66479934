from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag_kernels import layout_stats, layout_stats_torch, stats_space

ON_GPU = torch.cuda.is_available()
EXAMPLES = 60 if ON_GPU else 10
LONG = 12_000 if ON_GPU else 600


def stats(slots: list[int], device: torch.device, page: int = 4) -> list[int]:
    table = torch.tensor([[*slots, 99]], dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    return layout_stats(table, row, row + len(slots), page=page)[0].tolist()


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], [0, 0, 0, 0]),
        ([5], [1, 1, 0, 1]),
        ([4, 5, 6, 7], [1, 4, 4, 0]),
        ([0, 1, 2, 3], [1, 4, 0, 4]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 8, 4, 4]),
        ([4, 5, 7, 6], [3, 2, 0, 4]),
        ([8, 9, 10, 11, 4, 5, 6, 7, 30], [3, 4, 8, 1]),
        ([9, 10, 11, 12, 13, 14], [1, 6, 0, 6]),
        ([7, 6, 5, 4], [4, 1, 0, 4]),
    ],
)
def test_small_requests_have_the_statistics_counted_by_hand(slots, expected, device):
    assert stats(slots, device) == expected


@st.composite
def requests(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """Tables of runs that begin at page borders or anywhere, and lengths within them."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    mean = draw(st.sampled_from([1, 3, 40, 300, 3 * LONG]))
    table = torch.randint(-1, 9000, (4, LONG), generator=random)
    for row in table:
        t = 0
        while t < LONG:
            n = int(torch.randint(1, 2 * mean + 1, (1,), generator=random))
            first = int(torch.randint(0, 9000, (1,), generator=random))
            first = first // 64 * 64 if draw(st.booleans()) else first
            row[t : t + n] = torch.arange(first, first + n)[: LONG - t]
            t += n
            if mean < 40 and t > 200:
                break
    lengths = draw(st.lists(st.integers(0, LONG), min_size=4, max_size=4))
    return table, lengths


@settings(max_examples=EXAMPLES, deadline=None)
@given(made=requests(), page=st.sampled_from([16, 64]), dtype=st.sampled_from([32, 64]))
def test_any_request_equals_the_reference(made, page, dtype, device):
    table, lengths = made
    kind = torch.int32 if dtype == 32 else torch.int64
    table = table.to(device, kind)
    rows = torch.tensor([2, 0, 3, 1], dtype=kind, device=device)
    held = torch.tensor(lengths, dtype=kind, device=device)
    found = layout_stats(table, rows, held, page=page)
    assert torch.equal(found, layout_stats_torch(table, rows, held, page=page))


def test_scratch_is_left_ready_for_the_next_launch(device):
    table = torch.arange(100, 100 + LONG, dtype=torch.int32, device=device).repeat(2, 1)
    rows = torch.tensor([0, 1], device=device)
    lengths = torch.tensor([LONG, LONG - 1], device=device)
    space = stats_space(2, LONG, device=device)
    first = layout_stats(table, rows, lengths, space=space)
    again = layout_stats(table, rows, lengths, space=space)
    assert torch.equal(first, again)
    assert first[:, :2].tolist() == [[1, LONG], [1, LONG - 1]]
    assert not space.tickets.any()


@pytest.mark.gpu
def test_results_reach_a_pinned_buffer_without_synchronising(gpu, no_sync):
    table = torch.arange(1, 9000, dtype=torch.int32, device=gpu).repeat(3, 1)
    rows = torch.tensor([0, 2], device=gpu)
    lengths = torch.tensor([8999, 100], device=gpu)
    space = stats_space(2, 8999, device=gpu)
    host = torch.zeros(2, 4, dtype=torch.int32, pin_memory=True)
    layout_stats(table, rows, lengths, space=space)
    with no_sync():
        layout_stats(table, rows, lengths, space=space, out=host)
    torch.cuda.synchronize()
    assert host.tolist() == [[1, 8999, 8896, 103], [1, 100, 0, 100]]


def test_wrong_arguments_are_refused_by_name(device):
    table = torch.zeros(2, 64, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="power of two"):
        layout_stats(table, one, one, page=48)
    with pytest.raises(ValueError, match="1 rows, 0 lengths"):
        layout_stats(table, one, one[:0])
    with pytest.raises(ValueError, match="space holds"):
        layout_stats(table, one.repeat(3), one.repeat(3), space=stats_space(2, 64, device=device))
