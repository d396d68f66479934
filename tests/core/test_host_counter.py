"""Incremental counts of runs and aligned pages, against the definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.host_counter import Counts, HostCounter
from kvdefrag.core.layout import layout_stats


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def table_of(*rows: list[int], width: int = 40) -> torch.Tensor:
    table = torch.full((len(rows) + 1, width), 7, dtype=torch.int32)
    for i, slots in enumerate(rows, start=1):
        table[i, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return table


def figures(counts: Counts) -> list[list[int]]:
    return [column.tolist() for column in counts]


def private_covered(slots: list[int], protected: int, page: int) -> int:
    covered = 0
    for i in range(len(slots) - page + 1):
        first = slots[i]
        in_order = all(slots[i + k] == first + k for k in range(page))
        if first % page == 0 and first >= page and in_order:
            covered += sum(i + k >= protected for k in range(page))
    return covered


def test_a_row_is_counted_as_it_grows():
    table = table_of([8, 9, 10, 11, 30, 16, 17, 18, 19])
    counter = HostCounter(2, 4)
    one, zero = ints(1), ints(0)

    seen = [figures(counter.count(table, one, zero, zero, ints(n))) for n in (0, 3, 4, 5, 8, 9)]

    assert seen == [
        [[0], [0], [0], [0], [0]],
        [[3], [1], [0], [3], [0]],
        [[4], [1], [4], [4], [4]],
        [[5], [2], [4], [5], [4]],
        [[8], [3], [4], [8], [4]],
        [[9], [3], [8], [9], [8]],
    ]


def test_a_page_that_the_shared_prefix_begins_counts_for_its_private_tokens_only():
    table = table_of([8, 9, 10, 11, 12, 13, 14, 15])
    counter = HostCounter(2, 4)

    counts = counter.count(table, ints(1), ints(0), ints(6), ints(8))

    assert figures(counts) == [[8], [1], [8], [2], [2]]


def test_no_rows_are_fine():
    none = ints()

    assert figures(HostCounter(2, 4).count(table_of([1]), none, none, none, none)) == [[]] * 5


def test_what_was_counted_is_not_read_again_until_told():
    table = table_of([8, 9, 10, 11, 20])
    counter = HostCounter(2, 4)
    counter.count(table, ints(1), ints(0), ints(0), ints(5))
    table[1, :4] = torch.tensor([3, 1, 3, 1])

    assert counter.count(table, ints(1), ints(0), ints(0), ints(5)).covered.tolist() == [4]
    counter.invalidate(ints(1))
    after = counter.count(table, ints(1), ints(0), ints(0), ints(5))
    assert (after.covered.tolist(), after.runs.tolist()) == ([0], [5])


def test_private_moves_are_counted_anew_behind_the_prefix():
    table = table_of([8, 9, 10, 11, 30, 28, 33, 35])
    counter = HostCounter(2, 4)
    assert counter.count(table, ints(1), ints(0), ints(5), ints(8)).runs.tolist() == [5]
    table[1, 5:8] = torch.tensor([31, 32, 33])
    counter.invalidate_private(ints(1))

    counts = counter.count(table, ints(1), ints(0), ints(5), ints(8))

    assert figures(counts) == [[8], [2], [4], [3], [0]]


def test_a_row_that_changed_hands_starts_anew():
    table = table_of([8, 9, 10, 11])
    counter = HostCounter(2, 4)
    counter.count(table, ints(1), ints(0), ints(0), ints(4))
    table[1, :4] = torch.tensor([5, 9, 2, 6])

    assert counter.count(table, ints(1), ints(1), ints(0), ints(4)).covered.tolist() == [0]


def test_a_row_that_got_shorter_or_another_prefix_is_counted_anew():
    table = table_of([8, 9, 10, 11, 12, 13, 14, 15])
    counter = HostCounter(2, 4)
    counter.count(table, ints(1), ints(0), ints(0), ints(8))

    assert figures(counter.count(table, ints(1), ints(0), ints(0), ints(5))) == [
        [5],
        [1],
        [4],
        [5],
        [4],
    ]
    assert figures(counter.count(table, ints(1), ints(0), ints(4), ints(8))) == [
        [8],
        [1],
        [8],
        [4],
        [4],
    ]


def test_a_row_as_wide_as_the_table_is_counted_to_its_end():
    slots = list(range(64, 64 + 40))
    counter = HostCounter(2, 16)
    table = table_of(slots)

    for length in range(41):
        counts = counter.count(table, ints(1), ints(0), ints(0), ints(length))

    assert figures(counts) == [[40], [1], [32], [40], [32]]


def test_the_callers_lengths_are_not_the_counters_own():
    table = table_of([8, 9, 10, 11])
    counter = HostCounter(2, 4)
    committed = ints(2)
    counter.count(table, ints(1), ints(0), ints(0), committed)
    committed += 2

    assert counter.count(table, ints(1), ints(0), ints(0), committed).covered.tolist() == [4]


def test_case_48_memory_follows_the_rows():
    assert HostCounter(4096, 64).nbytes == 8 * 8 * 4096


@st.composite
def row_slots(draw: st.DrawFn, page: int, length: int) -> list[int]:
    slots: list[int] = []
    while len(slots) < length:
        first = draw(st.one_of(st.integers(1, 400), st.integers(1, 8).map(lambda k: k * page)))
        slots += range(first, first + draw(st.integers(1, 3 * page)))
    return slots[:length]


@given(st.data())
@settings(max_examples=40)
def test_growing_moving_and_recycling_rows_agree_with_a_full_count(data: st.DataObject):
    page = data.draw(st.sampled_from([2, 4, 16, 64]))
    width, rows = 2 * page + 70, ints(3, 1, 2)
    table = torch.zeros((4, width), dtype=torch.int32)
    for row in range(1, 4):
        table[row] = torch.tensor(data.draw(row_slots(page, width)))
    counter = HostCounter(4, page)
    generations, protected, committed = ints(0, 0, 0), ints(0, 0, 0), ints(0, 0, 0)
    for _ in range(data.draw(st.integers(1, 8))):
        i = data.draw(st.integers(0, 2))
        what = data.draw(st.sampled_from(["grow", "shrink", "move", "move private", "new", "tree"]))
        if what == "grow":
            committed[i] = data.draw(st.integers(int(committed[i]), width))
        elif what == "shrink":
            committed[i] = data.draw(st.integers(int(protected[i]), int(committed[i])))
        elif what == "move":
            table[rows[i]] = torch.tensor(data.draw(row_slots(page, width)))
            counter.invalidate(rows[i : i + 1])
        elif what == "move private":
            tail = data.draw(row_slots(page, width - int(protected[i])))
            table[rows[i], int(protected[i]) :] = torch.tensor(tail, dtype=torch.int32)
            counter.invalidate_private(rows[i : i + 1])
        elif what == "new":
            table[rows[i]] = torch.tensor(data.draw(row_slots(page, width)))
            generations[i] += 1
            protected[i] = committed[i] = 0
        else:
            protected[i] = data.draw(st.integers(0, int(committed[i])))
        some = np.array(data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))])
        counts = counter.count(
            table, rows[some], generations[some], protected[some], committed[some].copy()
        )
        stats = layout_stats(
            table,
            torch.from_numpy(rows[some]),
            torch.from_numpy(committed[some]),
            page_sizes=(page,),
        )
        assert counts.tokens.tolist() == stats.tokens.tolist()
        assert counts.runs.tolist() == stats.runs.tolist()
        assert counts.covered.tolist() == stats.covered[page].tolist()
        assert counts.private.tolist() == (committed - protected)[some].tolist()
        assert counts.private_covered.tolist() == [
            private_covered(table[r, :n].tolist(), p, page)
            for r, n, p in zip(rows[some], committed[some], protected[some], strict=True)
        ]
