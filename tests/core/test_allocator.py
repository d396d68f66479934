"""The slot allocator: SGLang's contract, placement, reservation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.readback import Readback
from kvdefrag.core.room import make_room, wants
from kvdefrag.errors import ConfigError, IntegrityError, SlotError

DISCIPLINES = ["fifo", "sorted", "two_ended"]
every_discipline = pytest.mark.parametrize("discipline", DISCIPLINES)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def want(kind: Kind, *wanted: tuple[int, int, int]) -> Demand:
    """(row, start, count) of each request."""
    columns = [np.array([w[i] for w in wanted], dtype=np.int64) for i in range(3)]
    return Demand(kind, *columns)


def state(alloc: SlotAllocator) -> tuple[int, list[int], int]:
    return alloc.available_size(), alloc.free_slots().tolist(), alloc.reserved_size()


class Engine:
    """Table rows that follow what the allocator hands out, as an engine's do."""

    def __init__(self, size: int, *, page: int = 4, width: int = 64, rows: int = 5, **other: Any):
        self.table = torch.zeros((rows, width), dtype=torch.int32)
        self.length = [0] * rows
        self.alloc = SlotAllocator(
            size, table=self.table, page=page, **{"reservation": True, **other}
        )

    def take(self, kind: Kind, *wanted: tuple[int, int]) -> list[int] | None:
        demand = want(kind, *((row, self.length[row], n) for row, n in wanted))
        slots = self.alloc.alloc_for(demand)
        if slots is None:
            return None
        pieces = slots.split(demand.counts.tolist())
        for (row, count), piece in zip(wanted, pieces, strict=True):
            self.table[row, self.length[row] : self.length[row] + count] = piece
            self.length[row] += count
        return slots.tolist()

    def finish(self, row: int) -> None:
        self.alloc.release(row, self.length[row])
        self.alloc.free(self.table[row, : self.length[row]])
        self.length[row] = 0

    def slots(self, row: int) -> list[int]:
        return self.table[row, : self.length[row]].tolist()

    def check(self) -> None:
        self.alloc.check_integrity()
        book = self.alloc.reservations
        held = book.held.tolist() if book else self.length
        named = [self.table[row, : held[row]].tolist() for row in range(1, len(held))]
        owned = [slot for row in named for slot in row]
        assert sorted(owned + self.alloc.free_slots().tolist()) == list(
            range(1, self.alloc.size + 1)
        )
        assert self.alloc.reserved_size() == sum(held) - sum(self.length)
        assert self.alloc.available_size() + len(owned) == self.alloc.size


# SGLang's contract


@every_discipline
def test_case_42_a_failed_allocation_returns_none_and_changes_nothing(discipline: str):
    alloc = SlotAllocator(100, page=4, discipline=discipline)
    before = state(alloc)

    assert alloc.alloc(101) is None
    assert alloc.alloc_for(want(Kind.DECODE, (1, 0, 60), (2, 0, 41))) is None
    assert alloc.alloc_for(want(Kind.EXTEND, (1, 0, 60), (2, 0, 41))) is None
    assert state(alloc) == before


@every_discipline
def test_case_42_nothing_is_an_empty_tensor_and_less_is_an_error(discipline: str):
    alloc = SlotAllocator(10, page=4, discipline=discipline)
    before = state(alloc)

    taken = alloc.alloc(0)

    assert taken is not None
    assert (taken.tolist(), taken.dtype) == ([], torch.int64)
    with pytest.raises(SlotError, match="-1"):
        alloc.alloc(-1)
    assert state(alloc) == before


@pytest.mark.parametrize(
    ("discipline", "reservation"),
    [("fifo", False), ("sorted", False), ("two_ended", False), ("two_ended", True)],
)
@pytest.mark.parametrize("kind", list(Kind))
def test_a_demand_of_nobody_or_of_nothing_is_an_empty_tensor(
    discipline: str, reservation: bool, kind: Kind
):
    table = torch.zeros((3, 16), dtype=torch.int32)
    alloc = SlotAllocator(10, table=table, page=4, discipline=discipline, reservation=reservation)

    assert alloc.alloc_for(want(kind)).tolist() == []
    if kind is not Kind.DECODE:
        assert alloc.alloc_for(want(kind, (1, 0, 0), (2, 3, 0))).tolist() == []
    assert wants(alloc, want(kind)).slots == 0
    assert alloc.available_size() == 10


@every_discipline
def test_the_whole_pool_can_be_taken_and_given_back(discipline: str):
    alloc = SlotAllocator(10, page=4, discipline=discipline)

    taken = alloc.alloc(10)

    assert sorted(taken.tolist()) == list(range(1, 11))
    assert alloc.alloc(1) is None
    alloc.free(taken)
    assert alloc.available_size() == 10
    assert sorted(alloc.alloc(10).tolist()) == list(range(1, 11))


@pytest.mark.parametrize("discipline", ["fifo", "sorted"])
def test_the_stock_orders_serve_every_kind_from_the_front(discipline: str):
    alloc = SlotAllocator(20, page=4, discipline=discipline)

    assert alloc.alloc_for(want(Kind.EXTEND, (1, 0, 3), (2, 0, 2))).tolist() == [1, 2, 3, 4, 5]
    assert alloc.alloc_for(want(Kind.DECODE, (1, 3, 1), (2, 2, 1))).tolist() == [6, 7]
    assert alloc.alloc(2).tolist() == [8, 9]
    assert wants(alloc, want(Kind.EXTEND, (1, 0, 3), (2, 0, 2))).slots == 5


@pytest.mark.parametrize("discipline", ["fifo", "sorted"])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
@settings(max_examples=60)
def test_the_stock_orders_are_sglangs_slot_for_slot(discipline: str, ops):
    alloc = SlotAllocator(24, page=4, discipline=discipline)
    free, released, live = list(range(1, 25)), [], []
    for take, count in ops:
        if take:
            got = alloc.alloc(count)
            if count > len(free) + len(released):
                assert got is None
                continue
            if discipline == "sorted" and count > len(free):
                free, released = sorted(free + released), []
            expected, free = free[:count], free[count:]
            assert got.tolist() == expected
            live += expected
        else:
            alloc.free(ints(*live[:count]))
            (released if discipline == "sorted" else free).extend(live[:count])
            live = live[count:]
        assert alloc.available_size() == len(free) + len(released)


@every_discipline
def test_case_43_at_page_size_one_scattered_slots_serve_any_request(discipline: str):
    alloc = SlotAllocator(4096, discipline=discipline)
    taken = alloc.alloc(4096)
    alloc.free(taken[::2])

    assert alloc.available_size() == 2048
    assert len(set(alloc.alloc(148).tolist())) == 148


@every_discipline
def test_frees_of_a_group_are_held_back_and_cloned(discipline: str):
    alloc = SlotAllocator(10, page=4, discipline=discipline)
    row = alloc.alloc(4).to(torch.int32)
    slots = row.tolist()

    alloc.free_group_begin()
    assert alloc.in_free_group
    alloc.free(row[:2])
    alloc.free(row[2:])
    row.fill_(9)
    assert alloc.available_size() == 6
    alloc.free_group_end()

    assert not alloc.in_free_group
    assert alloc.available_size() == 10
    assert set(slots) <= set(alloc.free_slots().tolist())
    alloc.check_integrity()


def test_a_group_that_is_empty_or_was_never_begun_ends_quietly():
    alloc = SlotAllocator(10, page=4)
    alloc.free_group_end()
    alloc.free_group_begin()
    alloc.free(ints())
    alloc.free_group_end()

    assert alloc.available_size() == 10


def test_a_second_group_would_lose_the_slots_of_the_first_and_is_refused():
    alloc = SlotAllocator(10, page=4)
    taken = alloc.alloc(2)
    alloc.free_group_begin()
    alloc.free(taken)

    with pytest.raises(IntegrityError, match="group"):
        alloc.free_group_begin()
    alloc.free_group_end()

    assert alloc.available_size() == 10


@pytest.mark.parametrize(
    "freed", [[5, 6, 6], [5, 5], [0], [17], [-1], [5, 16]], ids=lambda f: str(f)
)
@every_discipline
def test_case_38_double_and_wild_frees_are_named(discipline: str, freed: list[int]):
    alloc = SlotAllocator(16, page=4, discipline=discipline)
    alloc.free(alloc.alloc(16)[-1:])
    free = alloc.free_slots().tolist()
    assert len(free) == 1
    freed = [free[0] if s == 16 else s for s in freed]
    before = state(alloc)

    with pytest.raises(SlotError) as caught:
        alloc.free(ints(*freed))

    assert str(caught.value.slots[0]) in str(caught.value)
    assert state(alloc) == before


@every_discipline
def test_case_38_lenient_ignores_and_counts_them(discipline: str):
    alloc = SlotAllocator(16, page=4, discipline=discipline, checks="lenient")
    alloc.alloc(16)
    alloc.free(ints(5, 6))
    alloc.free(ints(6, 7))
    alloc.free(ints(5, 5, 0, 17, 8, 8))

    assert alloc.available_size() == 4
    assert sorted(alloc.free_slots().tolist()) == [5, 6, 7, 8]
    assert alloc.checks.violations == 6
    alloc.check_integrity()


@pytest.mark.parametrize("freed", [[6, 6], [0], [17]])
@every_discipline
def test_case_38_without_checks_the_integrity_check_finds_them(discipline: str, freed: list[int]):
    alloc = SlotAllocator(18, page=4, discipline=discipline, checks="off")
    alloc.alloc(18)
    alloc.free(ints(*(19 if s == 17 else s for s in freed)))

    with pytest.raises(IntegrityError, match="free list"):
        alloc.check_integrity()


def test_case_39_a_range_freed_in_two_parts_is_as_freed_in_one():
    parts, whole = SlotAllocator(16, page=4), SlotAllocator(16, page=4)
    for alloc in (parts, whole):
        alloc.alloc(16)
    parts.free(ints(4, 5, 6))
    parts.free(ints(7, 8))
    whole.free(ints(4, 5, 6, 7, 8))
    for alloc in (parts, whole):
        alloc.alloc(5)
        alloc.free(ints(4))

    assert state(parts) == state(whole)


@every_discipline
def test_case_41_clear_and_resize_make_every_slot_free(discipline: str):
    alloc = SlotAllocator(10, page=4, discipline=discipline)
    first = alloc.alloc(7)
    alloc.free_group_begin()
    alloc.free(first[:2])
    alloc.clear()

    assert not alloc.in_free_group
    assert alloc.available_size() == 10
    assert alloc.alloc(7).tolist() == first.tolist()
    alloc.resize(21)
    assert (alloc.size, alloc.available_size()) == (21, 21)
    assert sorted(alloc.alloc(21).tolist()) == list(range(1, 22))


@every_discipline
def test_the_free_slots_are_a_copy(discipline: str):
    alloc = SlotAllocator(10, page=4, discipline=discipline)
    alloc.free_slots().fill_(3)

    alloc.check_integrity()


def test_moved_rows_may_be_freed_where_they_are_now():
    alloc = SlotAllocator(8, page=4)
    taken = alloc.alloc_for(want(Kind.EXTEND, (1, 0, 4)))
    assert taken.tolist() == [4, 5, 6, 7]
    alloc.two_ended.substitute(ints(1, 0), ints(7, 0))
    alloc.commit_moves(ints(7, 0), ints(1, 0))

    alloc.free(ints(4, 5, 6, 1))

    assert alloc.available_size() == 8
    with pytest.raises(SlotError):
        alloc.free(ints(7))


@pytest.mark.parametrize("page", [0, 1, 3, 48, -64])
def test_a_page_that_is_no_power_of_two_is_refused(page: int):
    with pytest.raises(ConfigError, match=f"page: {page}"):
        SlotAllocator(100, page=page)


def test_reservation_needs_a_table_and_two_ends():
    table = torch.zeros((2, 8), dtype=torch.int32)

    with pytest.raises(ConfigError, match="reservation"):
        SlotAllocator(100, reservation=True)
    with pytest.raises(ConfigError, match="fifo"):
        SlotAllocator(100, table=table, discipline="fifo", reservation=True)


# Placement


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_prompts_start_on_page_boundaries_and_leave_the_rest_of_their_last_page(page: int):
    alloc = SlotAllocator(10 * page - 1, page=page)

    taken = alloc.alloc_for(want(Kind.EXTEND, (1, 0, page + 3), (2, 0, 5), (3, 0, page)))

    assert taken.tolist() == [
        *range(page, 2 * page + 3),
        *range(3 * page, 3 * page + 5),
        *range(4 * page, 5 * page),
    ]
    assert alloc.available_size() == 10 * page - 1 - (2 * page + 8)
    alloc.check_integrity()


def test_decode_fills_the_densest_partly_used_page():
    alloc = SlotAllocator(15, page=4)
    alloc.alloc_for(want(Kind.EXTEND, (1, 0, 3)))
    alloc.two_ended.reorder()

    # Slot 7 is the rest of the prompt's page; page 0 holds 1, 2, 3.
    assert alloc.alloc_for(want(Kind.DECODE, (1, 3, 1))).tolist() == [7]
    assert alloc.alloc_for(want(Kind.SPECULATIVE, (1, 4, 2))).tolist() == [2, 3]
    assert alloc.alloc(1).tolist() == [1]


def test_a_prompt_takes_what_there_is_when_whole_pages_are_short():
    alloc = SlotAllocator(9, page=4)

    taken = alloc.alloc_for(want(Kind.EXTEND, (1, 0, 5), (2, 0, 4)))

    assert taken.tolist() == [4, 5, 6, 7, 1, 2, 3, 8, 9]


def test_an_engine_makes_room_for_whole_pages():
    alloc = SlotAllocator(40, page=4)

    assert wants(alloc, want(Kind.EXTEND, (1, 0, 5), (2, 0, 4), (3, 0, 0))).slots == 12
    assert wants(alloc, want(Kind.DECODE, (1, 5, 1), (2, 4, 1))).slots == 2


def test_freed_slots_are_sorted_in_every_so_many_decode_steps():
    alloc = SlotAllocator(15, page=4, reorder_interval=3)
    alloc.alloc_for(want(Kind.EXTEND, (1, 0, 8)))
    alloc.free(ints(4))

    seen = [alloc.alloc_for(want(Kind.DECODE, (1, 8, 1))).tolist() for _ in range(3)]

    assert seen == [[3], [2], [4]]


def test_a_prompt_sees_freed_slots_at_once():
    alloc = SlotAllocator(15, page=4)
    alloc.alloc_for(want(Kind.EXTEND, (1, 0, 8)))
    alloc.free(ints(4, 5, 6, 7))

    assert alloc.alloc_for(want(Kind.EXTEND, (2, 0, 4))).tolist() == [4, 5, 6, 7]


# Reservation


def test_a_running_request_continues_in_its_own_page():
    engine = Engine(31)

    assert engine.take(Kind.EXTEND, (1, 5), (2, 2)) == [4, 5, 6, 7, 8, 12, 13]
    assert engine.alloc.reserved_size() == 5
    assert engine.alloc.available_size() == 31 - 12
    for _ in range(3):
        engine.take(Kind.DECODE, (1, 1), (2, 1))
        engine.check()

    assert engine.slots(1) == [4, 5, 6, 7, 8, 9, 10, 11]
    # Row 2 filled its page and took the next whole one.
    assert engine.slots(2) == [12, 13, 14, 15, 16]
    assert engine.alloc.reserved_size() == 3


def test_reserved_slots_are_not_handed_to_others_while_there_are_free_ones():
    engine = Engine(15)
    engine.take(Kind.EXTEND, (1, 1))
    assert engine.alloc.available_size() == 11

    others = engine.alloc.alloc(11).tolist()

    assert set(others).isdisjoint({4, 5, 6, 7})
    assert engine.alloc.reserved_size() == 3


def test_under_pressure_reserved_slots_go_back_first():
    engine = Engine(15)
    engine.take(Kind.EXTEND, (1, 1), (2, 1), (3, 1))
    assert (engine.alloc.available_size(), engine.alloc.reserved_size()) == (3, 9)

    assert sorted(engine.alloc.alloc(5).tolist()) == [2, 3, 5, 6, 7]
    # Row 1 gave back its page; the others keep theirs.
    assert engine.alloc.reserved_size() == 6
    assert engine.alloc.available_size() == 1
    assert engine.take(Kind.DECODE, (2, 1), (3, 1)) == [9, 13]


def test_slots_that_are_asked_for_now_are_not_given_back():
    engine = Engine(15)
    engine.take(Kind.EXTEND, (1, 1), (2, 1), (3, 1))
    engine.alloc.alloc(3)
    assert engine.alloc.available_size() == 0

    # Rows 1 and 2 have theirs; row 3 wants more than its page, from whom can spare most: row 2.
    taken = engine.take(Kind.SPECULATIVE, (1, 2), (2, 1), (3, 5))

    assert taken == [5, 6, 9, 13, 14, 15, 10, 11]
    assert engine.alloc.free_slots().tolist() == []
    assert engine.alloc.reserved_size() == 1


def test_a_demand_that_cannot_be_met_keeps_what_rows_have_allocated():
    engine = Engine(15)
    engine.take(Kind.EXTEND, (1, 1), (2, 1), (3, 1))
    engine.alloc.alloc(3)

    assert engine.take(Kind.EXTEND, (4, 10)) is None

    assert engine.alloc.available_size() + engine.alloc.reserved_size() == 9
    assert [engine.slots(row) for row in (1, 2, 3)] == [[4], [8], [12]]
    assert engine.take(Kind.EXTEND, (4, 9)) is not None
    assert engine.alloc.available_size() == engine.alloc.reserved_size() == 0


def test_a_request_that_leaves_gives_back_what_it_reserved():
    engine = Engine(31)
    engine.take(Kind.EXTEND, (1, 5), (2, 2))
    engine.alloc.release(1, 5)

    assert engine.alloc.reserved_size() == 2
    assert engine.alloc.available_size() == 31 - 5 - 4
    # The next request in that row starts from nothing.
    engine.alloc.free(engine.table[1, :5])
    engine.length[1] = 0
    engine.take(Kind.EXTEND, (1, 3))
    engine.check()


def test_a_release_within_a_free_group_is_held_back():
    engine = Engine(31)
    engine.take(Kind.EXTEND, (1, 5))
    engine.alloc.free_group_begin()
    engine.alloc.release(1, 5)
    engine.table.zero_()
    assert engine.alloc.available_size() == 31 - 8
    engine.alloc.free_group_end()

    assert engine.alloc.available_size() == 31 - 5


def test_a_release_without_reservation_does_nothing():
    alloc = SlotAllocator(8, page=4)
    alloc.alloc(3)
    alloc.release(1, 3)

    assert alloc.available_size() == 5


def test_a_row_near_the_tables_width_takes_no_page_that_would_stick_out():
    engine = Engine(31, width=7)

    engine.take(Kind.EXTEND, (1, 5), (2, 3))
    assert engine.alloc.reservations.held.tolist() == [0, 5, 4, 0, 0]
    engine.take(Kind.DECODE, (1, 1), (2, 1))
    engine.take(Kind.DECODE, (1, 1), (2, 1))

    assert engine.length[1:3] == [7, 5]
    # A page would end at position 8 of 7.
    assert engine.alloc.reservations.held.tolist() == [0, 7, 5, 0, 0]
    assert (engine.table[3:] == 0).all()
    engine.check()


def test_a_shared_prefix_is_not_taken_again():
    engine = Engine(31)
    engine.table[1, :3] = torch.tensor([29, 30, 31])
    engine.length[1] = 3

    assert wants(engine.alloc, want(Kind.EXTEND, (1, 3, 5))).slots == 8
    assert engine.take(Kind.EXTEND, (1, 5)) == [4, 5, 6, 7, 8]
    assert engine.table[1, :11].tolist() == [29, 30, 31, 4, 5, 6, 7, 8, 9, 10, 11]
    assert wants(engine.alloc, want(Kind.DECODE, (1, 8, 1))).slots == 0
    assert wants(engine.alloc, want(Kind.SPECULATIVE, (1, 8, 4))).slots == 4


def test_decode_takes_single_slots_when_no_whole_page_is_left():
    engine = Engine(11)
    engine.take(Kind.EXTEND, (1, 4))
    engine.take(Kind.EXTEND, (2, 4))

    assert engine.take(Kind.DECODE, (1, 1), (2, 1)) == [2, 3]
    assert engine.alloc.reserved_size() == 0
    assert engine.alloc.available_size() == 1


@pytest.mark.parametrize(
    ("whole_groups", "slots"), [(True, [3, 2, 1, 15, 8, 9]), (False, [3, 8, 9, 10, 11, 12])]
)
def test_a_row_of_single_slots_begins_no_page_amid_a_group_if_so_asked(
    whole_groups: bool, slots: list[int]
):
    engine = Engine(15)
    engine.alloc.whole_groups = whole_groups
    engine.take(Kind.EXTEND, (1, 4), (2, 4), (3, 4))
    # No whole page is left: the fifth token takes a single slot.
    engine.take(Kind.DECODE, (1, 1))
    engine.finish(2)
    engine.finish(3)
    engine.alloc.two_ended.reorder()

    for _ in range(5):
        engine.take(Kind.DECODE, (1, 1))
        engine.check()

    assert engine.slots(1) == [4, 5, 6, 7, *slots]


def test_clear_forgets_every_reservation():
    engine = Engine(31)
    engine.take(Kind.EXTEND, (1, 5))
    engine.alloc.clear()

    assert (engine.alloc.reserved_size(), engine.alloc.available_size()) == (0, 31)
    assert engine.alloc.reservations.held.tolist() == [0] * 5


@pytest.mark.parametrize("form", ["host", "device", "late"])
@pytest.mark.parametrize("reservation", [False, True])
@given(
    ops=st.lists(
        st.tuples(
            st.sampled_from(["extend", "decode", "speculate", "finish", "plain", "cut"]),
            st.integers(1, 4),
            st.integers(1, 14),
        ),
        max_size=40,
    ),
    size=st.integers(1, 60),
    groups=st.booleans(),
)
@settings(max_examples=40)
def test_case_37_every_slot_has_one_owner_at_every_step(
    form: str, reservation: bool, ops, size: int, groups: bool
):
    readback = {"host": None, "device": Readback(0), "late": Readback(2)}[form]
    engine = Engine(size, width=40, reservation=reservation, readback=readback, reorder_interval=3)
    engine.alloc.whole_groups = groups
    for op, row, count in ops:
        running = [r for r in range(1, 5) if engine.length[r]]
        before = state(engine.alloc)
        lengths = list(engine.length)
        if op == "extend":
            taken = engine.take(Kind.EXTEND, (row, min(count, 40 - engine.length[row])))
        elif op == "decode":
            taken = engine.take(Kind.DECODE, *((r, 1) for r in running if engine.length[r] < 40))
        elif op == "speculate":
            taken = engine.take(
                Kind.SPECULATIVE, *((r, min(count, 40 - engine.length[r])) for r in running)
            )
        elif op == "finish":
            engine.finish(row)
            taken = []
        elif op == "plain":
            taken = engine.alloc.alloc(count)
            if taken is not None:
                engine.alloc.free(taken)
        else:
            engine.alloc.free_group_begin()
            engine.finish(row)
            engine.alloc.free_group_end()
            taken = []
        if taken is None:
            assert engine.length == lengths
            assert before[0] + before[2] == engine.alloc.available_size() + (
                engine.alloc.reserved_size()
            )
        if readback is not None:
            readback.advance()
        engine.check()


# --- a list that hears late ----------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_late_news_do_not_drain_the_cache(delay: int):
    # Eight rows decode while cached text fills the rest of the pool.
    readback, rows = Readback(delay), np.arange(1, 9)
    table = torch.zeros((9, 256), dtype=torch.int32)
    alloc = SlotAllocator(
        4095, page=16, table=table, reservation=True, evict_for_pages=True, readback=readback
    )
    cached = []
    while alloc.available_size() >= 16:
        cached.append(alloc.alloc(min(75, alloc.available_size())))
    texts = len(cached)

    def evict_until(count: int) -> None:
        while cached and alloc.available_size() < count:
            alloc.free(cached.pop(0))

    for step in range(100):
        readback.advance()
        demand = Demand(Kind.DECODE, rows, np.full(8, step), np.ones(8, dtype=np.int64))
        make_room(alloc, demand, evict_until)
        slots = alloc.alloc_for(demand)
        assert slots is not None
        table[1:, step] = slots.int()

    # 800 tokens were decoded; each text has 75 and more.
    assert texts > 50
    assert texts - len(cached) <= 800 // 75 + 5


@pytest.mark.parametrize(("pages", "sorts"), [(2, 0), (1, 1)])
def test_decode_sorts_the_list_only_while_rows_may_lack_pages(pages: int, sorts: int):
    # Two rows decode; one slot has come back, and so many whole pages are known to be free.
    table = torch.zeros((3, 32), dtype=torch.int32)
    alloc = SlotAllocator(31, page=4, table=table, reservation=True, reorder_interval=1)
    wanted = want(Kind.DECODE, (1, 0, 1), (2, 0, 1))
    slots = alloc.alloc_for(wanted)
    assert slots is not None
    table[1:, 0] = slots.int()
    rest = alloc.alloc(alloc.available_size())
    assert rest is not None
    whole = rest[rest % 4 == 0][-pages:]
    alloc.free((whole[:, None] + torch.arange(4)).flatten())
    assert alloc.count_whole_pages() == pages
    alloc.free(torch.tensor([1]))
    assert alloc.two_ended is not None
    calls, reorder = [], alloc.two_ended.reorder
    alloc.two_ended.reorder = lambda: (calls.append(1), reorder())[1]

    assert alloc.alloc_for(want(Kind.DECODE, (1, 1, 1), (2, 1, 1))) is not None

    assert len(calls) == sorts
