"""How far each row holds slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.reservation import Reservations


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def demand(*wanted: tuple[int, int, int], kind: Kind = Kind.EXTEND) -> Demand:
    rows, starts, counts = (ints(*(w[i] for w in wanted)) for i in range(3))
    return Demand(kind, rows, starts, counts)


def hold(book: Reservations, row: int, start: int, *slots: int) -> None:
    book.write(ints(row), ints(start), ints(len(slots)), torch.tensor(slots))


@pytest.fixture
def book() -> Reservations:
    return Reservations(torch.zeros((4, 10), dtype=torch.int32), 4)


def test_a_fresh_book_holds_nothing(book: Reservations):
    assert book.size() == 0
    assert book.lacking(demand((1, 0, 3), (2, 5, 2))).tolist() == [3, 2]


def test_a_row_lacks_what_it_does_not_hold_yet(book: Reservations):
    hold(book, 1, 0, 11, 12, 13, 14)
    book.commit(demand((1, 0, 1)))

    assert book.size() == 3
    assert book.lacking(demand((1, 1, 1))).tolist() == [0]
    assert book.lacking(demand((1, 1, 3))).tolist() == [0]
    assert book.lacking(demand((1, 1, 6))).tolist() == [3]
    # The shared prefix of a new row is the tree's: only what is wanted is lacking.
    assert book.lacking(demand((2, 7, 2))).tolist() == [2]


def test_whole_pages_cover_the_lack_as_far_as_the_row_is_wide(book: Reservations):
    assert book.pages_for(ints(0, 0, 6, 7, 2), ints(1, 5, 1, 1, 5)).tolist() == [1, 2, 1, 0, 2]
    assert book.pages_for(ints(0), ints(0)).tolist() == [0]


def test_slots_are_written_in_order_into_several_rows(book: Reservations):
    book.write(ints(3, 1), ints(8, 0), ints(2, 3), torch.tensor([5, 6, 7, 8, 9]))

    assert book.table.tolist() == [
        [0] * 10,
        [7, 8, 9, 0, 0, 0, 0, 0, 0, 0],
        [0] * 10,
        [0, 0, 0, 0, 0, 0, 0, 0, 5, 6],
    ]
    assert book.held.tolist() == [0, 3, 0, 10]


def test_wanted_positions_are_read_in_request_order(book: Reservations):
    hold(book, 1, 0, 11, 12, 13, 14)
    hold(book, 2, 4, 21, 22, 23, 24)

    read = book.read(demand((2, 5, 2), (1, 0, 1), (3, 0, 0), (1, 2, 2), kind=Kind.SPECULATIVE))
    assert (read.tolist(), read.dtype) == ([22, 23, 11, 13, 14], torch.int64)
    assert book.read(demand((2, 7, 1), (1, 0, 1), kind=Kind.DECODE)).tolist() == [24, 11]
    none = Demand(Kind.EXTEND, ints(), ints(), ints())
    assert book.read(none).tolist() == []


def test_slots_are_given_back_from_the_end_and_as_a_copy(book: Reservations):
    hold(book, 1, 0, 11, 12, 13, 14)
    book.commit(demand((1, 0, 1)))

    back = book.give_back(1, 2)
    book.table.zero_()

    assert back.tolist() == [13, 14]
    assert back.dtype == torch.int64
    assert book.size() == 1
    assert book.give_back(1, 2).tolist() == []
    assert book.give_back(1, 9).tolist() == []


def test_a_forgotten_row_holds_nothing(book: Reservations):
    hold(book, 1, 0, 11, 12)
    hold(book, 2, 0, 21, 22)
    book.forget(1)

    assert book.held.tolist() == [0, 0, 2, 0]
    book.clear()
    assert (book.size(), book.held.tolist()) == (0, [0, 0, 0, 0])


def test_a_row_is_amid_a_group_until_a_page_of_single_slots_is_full(book: Reservations):
    rows = ints(1)
    book.note_singles(rows, ints(3), np.array([True]))
    book.note_singles(rows, ints(4), np.array([True]))

    amid = [bool(book.mid_group(rows, ints(at))[0]) for at in (3, 4, 5, 6, 7, 8, 11)]
    assert amid == [False, True, True, True, False, True, False]
    book.note_singles(rows, ints(7), np.array([False]))
    assert book.mid_group(rows, ints(8)).tolist() == [False]


def test_those_that_hold_most_give_first_and_equals_by_number(book: Reservations):
    for row, count in ((1, 3), (2, 4), (3, 3)):
        hold(book, row, 0, *range(10 * row, 10 * row + count))
    book.commit(demand((1, 0, 1), (2, 0, 1), (3, 0, 1)))

    assert book.givers(book.allocated).tolist() == [2, 1, 3]
    # Row 2 keeps all it holds, row 1 all but one.
    assert book.givers(ints(0, 2, 4, 1)).tolist() == [3, 1]
    assert book.givers(book.held).tolist() == []


def test_what_is_reserved_is_read_from_all_rows(book: Reservations):
    hold(book, 1, 0, 11, 12, 13, 14)
    hold(book, 3, 2, 31, 32)
    book.commit(demand((1, 0, 1), (3, 2, 1)))

    assert book.reserved().tolist() == [12, 13, 14, 32]


def test_a_demand_that_is_withdrawn_leaves_its_slots_reserved(book: Reservations):
    hold(book, 1, 0, 11, 12, 13, 14)
    book.commit(demand((1, 0, 2)))
    again = demand((1, 2, 1), (2, 0, 0))
    book.commit(again)
    book.withdraw(again)

    assert book.allocated.tolist() == [0, 2, 0, 0]
    assert book.reserved().tolist() == [13, 14]


def test_a_row_whose_tokens_the_engine_cut_is_estranged_though_nothing_is_reserved(
    book: Reservations,
):
    hold(book, 1, 0, 11, 12, 13, 14)
    book.commit(demand((1, 0, 4)))

    # Positions 2 and 3 were freed: the row names slots there that are somebody else's.
    assert book.estranged(demand((1, 2, 1))).tolist() == [1]
    assert book.estranged(demand((1, 4, 1))).tolist() == []
    assert book.estranged(demand((2, 5, 1))).tolist() == []


def test_a_group_is_not_finished_beyond_the_end_of_its_row():
    # A group that began at 7 ends at 23.
    for width, rest in ((22, 0), (23, 2)):
        book = Reservations(torch.zeros((4, width), dtype=torch.int32), 16)
        book.note_singles(ints(1), ints(7), np.array([True]))
        assert book.to_group_end(ints(1), ints(21)).tolist() == [rest]


@pytest.mark.parametrize("met", [False, True])
def test_a_prompt_that_is_withdrawn_keeps_its_cached_prefix(book: Reservations, met: bool):
    book.table[1, :3] = torch.tensor([31, 32, 33])  # the tree's
    wanted = demand((1, 3, 2))
    hold(book, 1, 3, 11, 12, 13)
    if met:
        book.commit(wanted)

    book.withdraw(wanted)

    assert book.reserved().tolist() == [11, 12, 13]
