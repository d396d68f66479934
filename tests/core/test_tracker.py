"""What is remembered of each running request."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView
from kvdefrag.errors import IntegrityError


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def view_of(
    table: torch.Tensor,
    rows: list[int],
    committed: list[int],
    *,
    protected: list[int] | None = None,
    generations: list[int] | None = None,
) -> EngineView:
    return EngineView(
        step=0,
        table=table,
        rows=ints(*rows),
        generations=ints(*(generations or [0] * len(rows))),
        protected=ints(*(protected or [0] * len(rows))),
        committed=ints(*committed),
        allocated=ints(*committed),
    )


@pytest.fixture
def table() -> torch.Tensor:
    table = torch.zeros((4, 40), dtype=torch.int32)
    table[1, :10] = torch.tensor([8, 9, 10, 11, 12, 13, 14, 15, 30, 32])
    table[2, :6] = torch.tensor([21, 16, 17, 18, 19, 22])
    return table


def test_nothing_is_measured_at_first(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6])
    tracker.observe(view)

    assert tracker.coverage(view) is None
    assert tracker.coverage(view_of(table, [], [])) is None
    assert tracker.tenured(view).tolist() == [0, 0]


def test_coverage_is_weighted_by_tokens(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6])
    tracker.observe(view)

    counts = tracker.measure(view)

    assert counts.runs.tolist() == [3, 3]
    assert counts.covered.tolist() == [8, 4]
    assert tracker.coverage(view) == 12 / 16


def test_a_measurement_made_elsewhere_is_remembered(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6])
    tracker.observe(view)
    tracker.learn(view.rows, ints(10, 6), ints(1, 1), ints(8, 0))

    assert tracker.coverage(view) == 0.5


def test_groups_are_ready_beyond_the_tenured_position(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6], protected=[0, 3])
    tracker.observe(view)

    # Ten tokens are two groups; three private tokens are none.
    assert tracker.groups_ready(view) == 2
    tracker.confirm(ints(1), ints(0), ints(7))
    assert tracker.tenured(view).tolist() == [7, 3]
    assert tracker.groups_ready(view) == 0


def test_a_confirmation_never_goes_back_and_never_reaches_the_next_request(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6])
    tracker.observe(view)
    tracker.confirm(ints(1, 2), ints(0, 0), ints(8, 4))
    tracker.confirm(ints(1), ints(0), ints(4))
    assert tracker.tenured(view).tolist() == [8, 4]

    later = view_of(table, [1, 2], [10, 6], generations=[1, 0])
    tracker.observe(later)
    tracker.confirm(ints(1, 2), ints(0, 0), ints(8, 6))

    assert tracker.tenured(later).tolist() == [0, 6]


def test_a_longer_shared_prefix_needs_no_tenure(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    tracker.observe(view_of(table, [1], [10], protected=[2]))
    view = view_of(table, [1], [10], protected=[5])
    tracker.observe(view)

    assert tracker.tenured(view).tolist() == [5]


def test_a_row_that_changed_hands_is_not_measured_yet(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6])
    tracker.observe(view)
    tracker.measure(view)

    later = view_of(table, [1, 2], [10, 6], generations=[1, 0])
    tracker.observe(later)

    assert tracker.coverage(later) == 4 / 6


def test_case_41_nothing_is_left_after_clear(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6])
    tracker.observe(view)
    tracker.measure(view)
    tracker.confirm(ints(1), ints(0), ints(8))
    tracker.clear()

    # A confirmation that was under way finds nobody.
    tracker.confirm(ints(1), ints(0), ints(8))
    assert tracker.coverage(view) is None
    tracker.observe(view)
    assert tracker.tenured(view).tolist() == [0, 0]
    assert tracker.coverage(view) is None


def test_moved_rows_are_counted_anew(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1], [10], protected=[4])
    tracker.observe(view)
    tracker.measure(view)
    table[1, 4:8] = torch.tensor([20, 24, 28, 2])

    tracker.moved_private(view.rows)
    assert tracker.measure(view).covered.tolist() == [4]
    table[1, :4] = torch.tensor([20, 24, 28, 2])
    tracker.moved(view.rows)
    assert tracker.measure(view).covered.tolist() == [0]


def test_case_65_a_count_that_drifted_is_told(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    view = view_of(table, [1, 2], [10, 6])
    tracker.observe(view)
    tracker.check_integrity(view)
    tracker.check_integrity(view_of(table, [], []))
    table[2, 1] = 3

    with pytest.raises(IntegrityError, match="row 2: runs tracked 3, recounted 4"):
        tracker.check_integrity(view)


def test_case_65_a_request_whose_tail_was_cut_is_counted_right(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    for length in (10, 3, 7, 10):
        view = view_of(table, [1, 2], [length, 6])
        tracker.observe(view)
        tracker.check_integrity(view)


def test_case_48_memory_follows_the_rows_and_not_the_context():
    # One row under 4,096 strides: as wide as 2,800,000 columns without their 46 GB.
    narrow = torch.zeros(2_800_000, dtype=torch.int32)
    narrow[:200] = torch.arange(64, 264)
    table = narrow.expand(4096, 2_800_000)
    tracker = Tracker(4096, page=64)
    view = view_of(table, list(range(1, 65)), [200] * 64)
    tracker.observe(view)
    own = [a for a in vars(tracker).values() if isinstance(a, np.ndarray)]
    own += [a for a in vars(tracker._counter).values() if isinstance(a, np.ndarray)]

    assert tracker.nbytes == sum(a.nbytes for a in own) == 13 * 8 * 4096
    assert tracker.nbytes >= sum(sys.getsizeof(a) for a in own) - 13 * 256


def test_what_no_layout_can_cover_does_not_count_against_a_request():
    # 7 tokens in pages of 4: one page can be whole, and is.
    table = torch.tensor([[4, 5, 6, 7, 20, 30, 40]], dtype=torch.int32)
    tracker, view = Tracker(table.shape[0], page=4), view_of(table, [0], [7])
    tracker.observe(view)
    assert tracker.packed(view) is None

    tracker.measure(view)

    assert tracker.coverage(view) == 4 / 7
    assert tracker.packed(view) == 1.0
    short = view_of(table, [0], [3])
    tracker.measure(short)
    assert (tracker.coverage(short), tracker.packed(short)) == (0.0, 1.0)


def test_news_of_a_request_that_has_left_are_not_those_of_its_row(table: torch.Tensor):
    tracker = Tracker(4, page=4)
    before = view_of(table, [1, 2], [10, 6], generations=[0, 0])
    tracker.observe(before)
    after = view_of(table, [1, 2], [10, 6], generations=[1, 0])
    tracker.observe(after)

    tracker.learn_late(before, torch.tensor([[3, 3], [8, 4]]))

    # Row 1 is another request's: only row 2 counts.
    assert tracker.coverage(after) == 4 / 6
