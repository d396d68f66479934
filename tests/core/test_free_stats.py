"""Metrics of the free slots, against hand counts and a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.free_stats import FreeStats, fragmentation_index, free_stats


def stats_of(free: list[int], size: int, *, page: int = 64, wanted: int | None = None) -> FreeStats:
    return free_stats(torch.tensor(free, dtype=torch.int64), size, page=page, wanted=wanted)


def test_case_47_nothing_free_gives_zeros_and_no_nan():
    stats = stats_of([], 256)

    assert stats == FreeStats(
        free=0,
        whole_pages=0,
        whole_share=1.0,
        runs=0,
        largest_run=0,
        fragmentation_index=0.0,
        unusable_share=0.0,
    )


def test_an_empty_pool_of_256_slots_is_one_run_with_three_whole_pages():
    # Page 0 holds the sink, and page 4 would end at slot 319.
    stats = stats_of(list(range(1, 257)), 256)

    assert (stats.free, stats.runs, stats.largest_run) == (256, 1, 256)
    assert stats.whole_pages == 3
    assert stats.whole_share == 192 / 256
    assert stats.fragmentation_index is None
    assert stats.unusable_share == 0.0


def test_the_last_page_is_whole_only_if_its_last_slot_exists():
    assert stats_of(list(range(1, 64)), 63).whole_pages == 0
    assert stats_of(list(range(1, 127)), 126).whole_pages == 0
    assert stats_of(list(range(1, 128)), 127).whole_pages == 1
    assert stats_of(list(range(1, 129)), 128).whole_pages == 1


def test_one_free_slot_is_one_run():
    stats = stats_of([17], 256)

    assert (stats.free, stats.runs, stats.largest_run, stats.whole_pages) == (1, 1, 1, 0)
    assert stats.whole_share == 0.0
    # One run, and 1 - (1 + 1/64) / 1 is below 0: the wanted page fails for want of slots.
    assert stats.fragmentation_index == 0.0
    assert stats.unusable_share == 1.0


def test_the_order_of_the_free_list_does_not_matter():
    assert stats_of([5, 6, 9, 8, 7, 2], 16, page=4) == stats_of([2, 5, 6, 7, 8, 9], 16, page=4)


def test_runs_and_whole_pages_of_a_hand_made_list():
    # Pages of 4: 4..7 whole, 8 and 9 half of page 2, 14 and 15 half of page 3.
    stats = stats_of([4, 5, 6, 7, 8, 9, 14, 15, 2], 15, page=4)

    assert (stats.free, stats.runs, stats.largest_run) == (9, 3, 6)
    assert stats.whole_pages == 1
    assert stats.whole_share == 4 / 9
    assert stats.fragmentation_index is None
    # Runs 1, 6, 2: one whole multiple of 4.
    assert stats.unusable_share == 5 / 9


def test_case_43_single_holes_are_told_apart_from_free_slots():
    stats = stats_of(list(range(2, 4098, 2)), 4096, wanted=148)

    assert (stats.free, stats.largest_run) == (2048, 1)
    assert stats.fragmentation_index == pytest.approx(1 - (1 + 2048 / 148) / 2048)
    assert stats.unusable_share == 1.0


def test_the_wanted_run_is_one_page_unless_said():
    free = list(range(1, 9))

    assert stats_of(free, 64, page=16) == stats_of(free, 64, page=16, wanted=16)
    assert stats_of(free, 64, page=16, wanted=8).fragmentation_index is None
    assert stats_of(free, 64, page=16, wanted=8).unusable_share == 0.0


def test_linux_formula_with_round_numbers():
    # 1,000 free slots in 100 runs, 100 wanted: 1 - (1 + 10) / 100.
    assert fragmentation_index(1000, 100, 50, 100) == pytest.approx(0.89)
    assert fragmentation_index(1000, 100, 100, 100) is None
    assert fragmentation_index(0, 0, 0, 1) == 0.0


@given(st.sets(st.integers(1, 300)), st.sampled_from([2, 16, 32, 64, 128]), st.integers(1, 200))
@settings(max_examples=80)
def test_a_plain_loop_gives_the_same_figures(free: set[int], page: int, wanted: int):
    stats = stats_of(sorted(free, reverse=True), 300, page=page, wanted=wanted)

    runs: list[int] = []
    for slot in sorted(free):
        if slot - 1 in free:
            runs[-1] += 1
        else:
            runs.append(1)
    whole = sum(all(k * page + i in free for i in range(page)) for k in range(1, 301 // page))
    usable = sum(r // wanted * wanted for r in runs)
    assert (stats.free, stats.runs, stats.largest_run) == (
        len(free),
        len(runs),
        max(runs, default=0),
    )
    assert stats.whole_pages == whole
    assert stats.unusable_share == ((len(free) - usable) / len(free) if free else 0)
    assert 0 <= stats.unusable_share <= 1
    assert 0 <= stats.whole_share <= 1
    assert (stats.fragmentation_index is None) == (max(runs, default=0) >= wanted)
    assert stats.fragmentation_index is None or 0 <= stats.fragmentation_index <= 1
