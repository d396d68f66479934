"""Runs and aligned pages of slot sequences, against hand counts and a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.layout import PAGE_SIZES, LayoutStats, layout_stats, regions, slot_stats

MIB = 1024 * 1024


def stats_of(*requests: list[int], pages: tuple[int, ...] = PAGE_SIZES) -> LayoutStats:
    width = max((len(r) for r in requests), default=0)
    table = torch.full((len(requests), width), -7)
    for i, slots in enumerate(requests):
        table[i, : len(slots)] = torch.tensor(slots, dtype=torch.int64)
    lengths = torch.tensor([len(r) for r in requests], dtype=torch.int64)
    return slot_stats(table, lengths, page_sizes=pages)


def naive_runs(slots: list[int]) -> list[int]:
    runs: list[int] = []
    for i, slot in enumerate(slots):
        if i and slot == slots[i - 1] + 1:
            runs[-1] += 1
        else:
            runs.append(1)
    return runs


def naive_covered(slots: list[int], page: int) -> int:
    covered = 0
    for i in range(len(slots) - page + 1):
        first = slots[i]
        in_order = all(slots[i + k] == first + k for k in range(page))
        if first % page == 0 and first >= page and in_order:
            covered += page
    return covered


def test_case_47_an_empty_request_has_no_runs_and_full_coverage():
    stats = stats_of([])

    assert stats.runs.tolist() == [0]
    assert stats.longest_run.tolist() == [0]
    assert stats.mean_run.tolist() == [0.0]
    assert stats.contiguous.tolist() == [True]
    assert [stats.coverage(p).tolist() for p in PAGE_SIZES] == [[1.0]] * 4
    assert stats.left_over(64).tolist() == [0]
    assert stats.descriptors(61).tolist() == [0]


def test_no_request_at_all_gives_empty_figures():
    stats = layout_stats(
        torch.zeros((4, 8), dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    )

    assert stats.runs.tolist() == []
    assert stats.mean_run.tolist() == []
    assert stats.coverage(64).tolist() == []


def test_one_slot_is_one_run_outside_every_page():
    stats = stats_of([64])

    assert stats.runs.tolist() == [1]
    assert stats.longest_run.tolist() == [1]
    assert stats.mean_run.tolist() == [1.0]
    assert stats.coverage(64).tolist() == [0.0]
    assert stats.left_over(16).tolist() == [1]
    assert stats.contiguous.tolist() == [True]


def test_descending_slots_are_runs_of_one_and_never_contiguous():
    stats = stats_of(list(range(127, 63, -1)))

    assert stats.runs.tolist() == [64]
    assert stats.longest_run.tolist() == [1]
    assert stats.mean_run.tolist() == [1.0]
    assert stats.contiguous.tolist() == [False]
    assert stats.covered[64].tolist() == [0]


def test_slots_that_rise_by_two_or_repeat_are_no_run():
    stats = stats_of([10, 12, 14], [5, 5, 5])

    assert stats.runs.tolist() == [3, 3]


def test_a_full_pool_of_256_slots_covers_all_but_the_page_of_the_sink_and_the_last_slot():
    stats = stats_of(list(range(1, 257)))

    assert stats.runs.tolist() == [1]
    assert stats.longest_run.tolist() == [256]
    assert {p: int(stats.covered[p]) for p in PAGE_SIZES} == {16: 240, 32: 224, 64: 192, 128: 128}
    assert stats.coverage(64).tolist() == [192 / 256]


def test_a_page_counts_whole_and_in_order_only():
    whole = list(range(64, 128))
    swapped = [*whole[:10], whole[11], whole[10], *whole[12:]]
    begun = list(range(65, 129))
    short = list(range(64, 127))
    stats = stats_of(whole, swapped, begun, short)

    assert stats.covered[64].tolist() == [64, 0, 0, 0]
    # A swap breaks the run three times.
    assert stats.runs.tolist() == [1, 4, 1, 1]


def test_a_page_may_begin_at_any_token():
    stats = stats_of([3, 9, *range(128, 192), 7])

    assert stats.covered[64].tolist() == [64]
    assert stats.left_over(64).tolist() == [3]
    assert stats.runs.tolist() == [4]
    assert stats.longest_run.tolist() == [64]


def test_the_page_of_the_sink_is_never_aligned():
    assert stats_of(list(range(0, 64))).covered[64].tolist() == [0]
    assert stats_of(list(range(0, 16)), pages=(16,)).covered[16].tolist() == [0]


def test_two_neighbouring_pages_in_the_wrong_order_still_count_each():
    stats = stats_of([*range(128, 192), *range(64, 128)])

    assert stats.covered[64].tolist() == [128]
    assert stats.covered[128].tolist() == [0]
    assert stats.runs.tolist() == [2]


def test_shares_are_double_precision():
    stats = stats_of([*range(16, 32), 5, 9])

    assert stats.mean_run.dtype == torch.float64
    assert stats.coverage(16).dtype == torch.float64
    assert stats.mean_run.tolist() == [6.0]
    assert stats.coverage(16).tolist() == [16 / 18]


def test_case_61_descriptors_are_runs_times_buffers():
    scattered = list(range(2, 2 * 4096 + 2, 2))
    stats = stats_of(scattered, list(range(64, 64 + 4096)))

    assert stats.descriptors(1).tolist() == [4096, 1]
    assert stats.descriptors(61).tolist() == [4096 * 61, 61]


def test_case_50_one_hundred_neighbouring_slots_are_contiguous_despite_padding():
    table = torch.zeros((3, 1024), dtype=torch.int32)
    table[1, :100] = torch.arange(1, 101, dtype=torch.int32)

    stats = layout_stats(table, torch.tensor([1, 2]), torch.tensor([100, 0]))

    assert stats.runs.tolist() == [1, 0]
    assert stats.contiguous.tolist() == [True, True]


def test_case_54_interleaved_requests_are_counted_each_for_itself():
    stats = stats_of(list(range(2, 2002, 2)), list(range(3, 2003, 2)))

    assert stats.runs.tolist() == [1000, 1000]


def test_entries_past_the_length_and_other_rows_are_not_read():
    table = torch.full((4, 20), 99, dtype=torch.int32)
    table[2, :3] = torch.tensor([16, 17, 18])
    table[2, 3:] = torch.arange(19, 36)

    stats = layout_stats(table, torch.tensor([2]), torch.tensor([3]), page_sizes=(16,))

    assert stats.runs.tolist() == [1]
    assert stats.longest_run.tolist() == [3]
    assert stats.covered[16].tolist() == [0]


def test_the_caller_may_change_the_lengths_afterwards():
    lengths = torch.tensor([2])
    stats = slot_stats(torch.tensor([[4, 5]]), lengths)
    lengths.zero_()

    assert stats.tokens.tolist() == [2]


def test_regions_counts_stretches_that_a_row_touches_in_part():
    assert regions(torch.tensor([], dtype=torch.int64), 1152) == 0
    assert regions(torch.tensor([1]), 1152) == 1
    # 1,820 rows of 1,152 bytes are 576 bytes short of 2 MiB: row 1,820 lies in two regions.
    assert regions(torch.tensor([1819]), 1152) == 1
    assert regions(torch.tensor([1820]), 1152) == 2
    assert regions(torch.arange(1, 1821), 1152) == 2
    assert regions(torch.tensor([0, 1, 2, 3]), 2 * MIB) == 4


def test_case_62_packed_slots_touch_as_few_regions_as_they_fill():
    assert regions(torch.arange(0, 16_000), 1152) == math.ceil(16_000 * 1152 / (2 * MIB))


@st.composite
def slot_lists(draw: st.DrawFn) -> list[int]:
    slots: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        first = draw(st.one_of(st.integers(1, 300), st.sampled_from([16, 32, 64, 128, 192])))
        slots += range(first, first + draw(st.integers(1, 140)))
    return slots


@given(st.lists(slot_lists(), min_size=1, max_size=4))
@settings(max_examples=40)
def test_a_plain_loop_gives_the_same_figures(requests: list[list[int]]):
    stats = stats_of(*requests)

    runs = [naive_runs(r) for r in requests]
    assert stats.tokens.tolist() == [len(r) for r in requests]
    assert stats.runs.tolist() == [len(r) for r in runs]
    assert stats.longest_run.tolist() == [max(r, default=0) for r in runs]
    assert stats.contiguous.tolist() == [len(r) <= 1 for r in runs]
    for page in PAGE_SIZES:
        assert stats.covered[page].tolist() == [naive_covered(r, page) for r in requests]
        share = stats.coverage(page)
        assert not share.isnan().any()
        assert ((share >= 0) & (share <= 1)).all()


@pytest.mark.parametrize("page", [2, 4, 8, 256, 512])
def test_other_powers_of_two_are_fine_too(page: int):
    stats = stats_of(list(range(1, 1025)), pages=(page,))

    assert stats.covered[page].tolist() == [1024 - page]
