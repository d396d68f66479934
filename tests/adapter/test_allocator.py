"""The allocator keeps the contract of the class it replaces, whoever places the slots."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch

from kvdefrag.core.allocator import SlotAllocator

PLACED = ["stock", "fifo", "sorted", "two_ended", "two_ended with reservation"]


def make(size: int, placed: str = "two_ended", *, need_sort: bool = False) -> Any:
    """Return an allocator of ours, taken over or still stock."""
    from kvdefrag.sglang.allocator import KvdefragAllocator

    made = KvdefragAllocator(size, torch.float32, "cpu", MagicMock(), need_sort)
    if placed != "stock":
        discipline, _, reservation = placed.partition(" ")
        table = torch.zeros((9, 64), dtype=torch.int32)
        core = SlotAllocator(
            size, table=table, page=16, discipline=discipline, reservation=bool(reservation)
        )
        made.take_over(core)
    return made


def original(size: int, *, need_sort: bool = False) -> Any:
    """Return SGLang's own."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    return TokenToKVPoolAllocator(size, torch.float32, "cpu", MagicMock(), need_sort)


@pytest.fixture(params=PLACED)
def placed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# The names of SGLang's own tests say what each of these is about.


def test_alloc_returns_as_many_distinct_slots_as_asked_for(placed: str) -> None:
    allocator = make(40, placed)

    first, second = allocator.alloc(8), allocator.alloc(8)

    assert first.dtype == torch.int64
    assert len({*first.tolist(), *second.tolist()}) == 16
    assert allocator.available_size() == 24


def test_the_whole_pool_can_be_handed_out_and_slot_0_is_never_in_it(placed: str) -> None:
    allocator = make(40, placed)

    assert sorted(allocator.alloc(40).tolist()) == list(range(1, 41))
    assert allocator.available_size() == 0


@pytest.mark.parametrize("need_sort", [False, True])
def test_more_than_there_is_gives_none_and_changes_nothing(placed: str, need_sort: bool) -> None:
    allocator = make(8, placed, need_sort=need_sort)
    allocator.alloc(3)
    before = allocator.get_all_free_pages().tolist()

    assert allocator.alloc(6) is None
    assert sorted(allocator.get_all_free_pages().tolist()) == sorted(before)


def test_alloc_of_nothing_is_an_empty_tensor(placed: str) -> None:
    allocator = make(8, placed)

    assert allocator.alloc(0).tolist() == []
    assert allocator.available_size() == 8


def test_freed_slots_can_be_handed_out_again(placed: str) -> None:
    allocator = make(8, placed)

    allocator.free(allocator.alloc(8))

    assert allocator.available_size() == 8
    assert sorted(allocator.alloc(8).tolist()) == list(range(1, 9))


def test_free_of_nothing_changes_nothing(placed: str) -> None:
    allocator = make(8, placed)

    allocator.free(torch.tensor([], dtype=torch.int64))

    assert allocator.available_size() == 8


def test_a_table_row_may_be_freed_as_int32(placed: str) -> None:
    allocator = make(8, placed)
    slots = allocator.alloc(4).to(torch.int32)

    allocator.free(slots)

    assert allocator.available_size() == 8
    assert allocator.get_all_free_pages().dtype == torch.int64


def test_frees_of_a_group_take_effect_at_its_end(placed: str) -> None:
    allocator = make(16, placed)
    first, second = allocator.alloc(4), allocator.alloc(4)

    allocator.free_group_begin()
    allocator.free(first)
    allocator.free(second)
    during = allocator.available_size()
    allocator.free_group_end()

    assert (during, allocator.available_size()) == (8, 16)


def test_a_group_without_frees_changes_nothing(placed: str) -> None:
    allocator = make(8, placed)
    allocator.alloc(4)

    allocator.free_group_begin()
    allocator.free_group_end()

    assert allocator.available_size() == 4


@pytest.mark.parametrize("discipline", PLACED[1:])
def test_a_group_keeps_what_was_freed_though_the_row_is_rewritten(discipline: str) -> None:
    allocator = make(16, discipline)
    row = allocator.alloc(4).clone()
    freed = row.tolist()

    allocator.free_group_begin()
    allocator.free(row[:2])
    row.zero_()
    allocator.free_group_end()

    assert set(freed[:2]) <= set(allocator.get_all_free_pages().tolist())
    assert 0 not in allocator.get_all_free_pages().tolist()


def test_clear_makes_every_slot_free(placed: str) -> None:
    allocator = make(16, placed)
    allocator.alloc(9)
    allocator.free_group_begin()

    allocator.clear()

    assert sorted(allocator.get_all_free_pages().tolist()) == list(range(1, 17))
    allocator.free(allocator.alloc(3))
    assert allocator.available_size() == 16


def test_resize_holds_the_new_size_and_no_more(placed: str) -> None:
    allocator = make(32, placed)

    allocator.resize(SimpleNamespace(max_total_num_tokens=20))

    assert allocator.size == 20
    assert allocator.size_full == 20
    assert sorted(allocator.alloc(20).tolist()) == list(range(1, 21))
    assert allocator.alloc(1) is None


def test_the_free_slots_are_told_truthfully(placed: str) -> None:
    allocator = make(16, placed)
    taken = allocator.alloc(6).tolist()
    allocator.free(torch.tensor(taken[:2]))

    told = torch.cat([allocator.free_pages, allocator.release_pages]).tolist()

    assert sorted(told) == sorted(set(range(1, 17)) - set(taken[2:]))
    assert sorted(allocator.get_all_free_pages().tolist()) == sorted(told)
    assert len(told) == allocator.available_size()


def test_segments_of_a_row_are_freed(placed: str) -> None:
    allocator = make(16, placed)
    slots = allocator.alloc(9)

    allocator.free_segment(slots[:3], start_pos=0)
    allocator.free_segments([(slots[3:5], 3), (slots[5:5], 5), (slots[5:], 5)])

    assert allocator.available_size() == 16


def test_copies_to_the_host_are_left_to_the_pool(placed: str) -> None:
    allocator = make(16, placed)
    pool = allocator.get_kvcache()
    pool.get_cpu_copy.return_value = "copy"

    assert allocator.get_cpu_copy(torch.tensor([1, 2])) == "copy"
    allocator.load_cpu_copy("copy", torch.tensor([3, 4]))

    pool.load_cpu_copy.assert_called_once()


def test_paged_allocation_is_refused_as_before(placed: str) -> None:
    allocator = make(16, placed)

    for name in ("alloc_extend", "alloc_decode"):
        with pytest.raises(NotImplementedError):
            getattr(allocator, name)()


def test_take_over_is_refused_once_slots_are_out() -> None:
    allocator = make(16, "stock")
    allocator.alloc(1)

    with pytest.raises(ValueError, match="15 of 16 slots are free"):
        allocator.take_over(SlotAllocator(16, page=16))


@pytest.mark.parametrize("discipline", PLACED[1:])
def test_hand_back_makes_it_stock_with_the_same_free_slots(discipline: str) -> None:
    allocator = make(40, discipline)
    taken = allocator.alloc(11).tolist()

    allocator.hand_back()

    assert allocator.core is None
    assert sorted(allocator.free_pages.tolist()) == sorted(set(range(1, 41)) - set(taken))
    allocator.free(torch.tensor(taken))
    assert allocator.available_size() == 40


@pytest.mark.parametrize(
    ("discipline", "need_sort"),
    [("stock", False), ("stock", True), ("fifo", False), ("sorted", True)],
)
def test_sglangs_own_orders_are_kept_slot_for_slot(discipline: str, need_sort: bool) -> None:
    theirs, ours = original(300, need_sort=need_sort), make(300, discipline, need_sort=need_sort)
    draw, live = random.Random(3), []

    for _ in range(2_000):
        if live and draw.random() < 0.5:
            slots = live.pop(draw.randrange(len(live)))
            group = draw.random() < 0.3
            for allocator in (theirs, ours):
                if group:
                    allocator.free_group_begin()
                allocator.free(slots[: len(slots) // 2])
                allocator.free(slots[len(slots) // 2 :])
                if group:
                    allocator.free_group_end()
        else:
            # A shortage makes SGLang sort although nothing is handed out; a failed call of ours
            # changes nothing, so only the first order is compared through shortages.
            most = 40 if not need_sort else min(40, theirs.available_size() + 1)
            count = draw.randrange(0, most)
            wanted, found = theirs.alloc(count), ours.alloc(count)
            assert (wanted is None) == (found is None)
            if wanted is not None:
                assert wanted.tolist() == found.tolist()
                live.append(wanted.clone())
        assert theirs.available_size() == ours.available_size()


def test_sub_allocators_of_hybrid_windows_stay_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.allocator import swa

    from kvdefrag.sglang.allocator import KvdefragAllocator

    monkeypatch.setattr(swa, "TokenToKVPoolAllocator", KvdefragAllocator)
    pool = MagicMock(spec=swa.BaseSWAKVPool, swa_req_ring_size=None)
    both = swa.SWATokenToKVPoolAllocator(24, 12, 1, torch.float32, "cpu", pool, False)

    for sub in (both.full_attn_allocator, both.swa_attn_allocator):
        assert type(sub) is KvdefragAllocator
        assert sub.core is None
    slots = both.alloc(5)
    assert slots.tolist() == [1, 2, 3, 4, 5]
    both.free(slots)
    assert both.full_attn_allocator.available_size() == 24
    assert both.swa_attn_allocator.available_size() == 12


class Mark:
    """Somebody with rows, lengths and a number of slots wanted for each row."""

    def __init__(self, kind: str, *wanted: tuple[int, int, int]) -> None:
        self._kind, self._wanted = kind, wanted
        self.made_room: list[int] = []

    def demand(self) -> Any:
        from kvdefrag.core.demand import Demand, Kind

        columns = (np.array(c, dtype=np.int64) for c in zip(*self._wanted, strict=True))
        return Demand(Kind(self._kind), *columns)

    def make_room(self, count: int) -> None:
        self.made_room.append(count)


def marked(allocator: Any, kind: str, *wanted: tuple[int, int, int]) -> list[int]:
    """Return the slots that are given to `wanted`, and write them into the table as SGLang does."""
    allocator.mark = Mark(kind, *wanted)
    slots = allocator.alloc(sum(count for _, _, count in wanted))
    table, at = allocator.core.reservations.table, 0
    for row, start, count in wanted:
        table[row, start : start + count] = slots[at : at + count]
        at += count
    return list(slots.tolist())


def test_a_mark_is_used_once_and_not_for_another_count() -> None:
    allocator = make(64, "two_ended with reservation")
    allocator.mark = mark = Mark("extend", (1, 0, 4), (2, 0, 4))
    slots = allocator.alloc(8)

    assert allocator.mark is None
    assert len(slots) == 8
    assert allocator.available_size() == 64 - 32
    assert allocator.core.reserved_size() == 24
    # A mark that is not about this allocation: the rows behind it are not known.
    allocator.mark = mark
    assert len(allocator.alloc(3)) == 3
    assert allocator.core.reserved_size() == 0


def test_room_is_made_for_whole_pages() -> None:
    allocator = make(64, "two_ended with reservation")
    allocator.alloc(40)
    allocator.mark = mark = Mark("extend", (1, 0, 4), (2, 0, 4))
    allocator.alloc(8)

    assert mark.made_room[0] == 32


def crowded() -> Any:
    """Return an allocator of 63 slots, all out: three rows of 3, 1 and 16 tokens hold a page each.

    All other slots are somebody else's.
    """
    allocator = make(63, "two_ended with reservation")
    marked(allocator, "extend", (1, 0, 3), (2, 0, 1), (3, 0, 16))
    allocator.alloc(allocator.available_size())
    return allocator


def test_a_decode_step_that_fits_by_what_is_reserved_gives_nothing_back() -> None:
    allocator = crowded()
    tree = MagicMock(**{"supports_prefix_sharing.return_value": False})
    assert (allocator.available_size(), allocator.core.reserved_size()) == (0, 28)

    for count, fits in ((3, True), (28, True), (29, False)):
        assert allocator.fits(count) is fits
        if hasattr(allocator, "evict_to_free_tokens"):  # 0.5.23
            asked = allocator.check_decode_capacity(num_tokens=count, tree_cache=tree)
            assert asked is fits
    assert allocator.core.reserved_size() == 28


def test_under_pressure_only_the_row_with_most_in_reserve_gives_back() -> None:
    allocator = crowded()
    first, second = (allocator.core.reservations.table[row, 0].item() for row in (1, 2))

    taken = marked(allocator, "decode", (1, 3, 1), (2, 1, 1), (3, 16, 1))

    # Rows 1 and 2 go on in their pages; row 3 gets a slot from the end of row 2's.
    assert taken[:2] == [first + 3, second + 1]
    assert second + 2 <= taken[2] < second + 16
    assert allocator.core.reserved_size() == 12
    assert allocator.available_size() == 13
    for position in range(17, 22):
        more = marked(allocator, "decode", (3, position, 1))
        assert second + 2 <= more[0] < second + 16
    assert allocator.core.reserved_size() == 12


def test_without_reservation_only_free_slots_count() -> None:
    allocator = make(16, "two_ended")
    allocator.alloc(14)

    assert [allocator.fits(n) for n in (2, 3)] == [True, False]
    assert not make(16, "stock").fits(1)


def test_a_fault_while_placing_makes_it_stock_and_is_told() -> None:
    allocator = make(64, "two_ended with reservation")
    told: list[Exception] = []
    allocator.on_fault = told.append
    allocator.mark = SimpleNamespace(demand=lambda: 1 / 0)
    taken = allocator.alloc(4)

    assert allocator.core is None
    assert len(taken) == 4
    assert allocator.available_size() == 60
    assert isinstance(told[0], ZeroDivisionError)


def _break(owner: Any, name: str, *, after: bool) -> Any:
    """Have `owner.name` raise, before or after it has done its work."""
    original = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if after:
            original(*args, **kwargs)
        raise RuntimeError("planted")

    return patch.object(owner, name, broken)


# Parts of the core that an allocation goes through, and whether its demand takes new slots.
STATIONS = [
    ("checks", "taken", "extend"),
    ("reservations", "write", "extend"),
    ("reservations", "note_singles", "extend"),
    ("reservations", "commit", "extend"),
    ("reservations", "read", "extend"),
    ("_filler", "fill", "extend"),
    ("reservations", "commit", "decode"),
    ("reservations", "read", "decode"),
    ("", "alloc_for", "decode"),
    ("", "alloc_for", "extend"),
    ("reservations", "give_back", "pressed"),
    ("checks", "admit", "pressed"),
    ("free_list", "put", "pressed"),
]
# What `give_back` returns is nowhere else: it does nothing that could fail after its work.
AMID = [
    (*station, after) for station in STATIONS for after in (False, True) if "give" not in station[1]
]


@pytest.mark.parametrize(("part", "name", "kind", "after"), AMID)
def test_a_fault_amid_an_allocation_loses_no_slot_and_gives_none_twice(
    part: str, name: str, kind: str, after: bool
) -> None:
    allocator = crowded() if kind == "pressed" else make(63, "two_ended with reservation")
    wanted = {"extend": [(4, 0, 5), (5, 0, 6)], "decode": [(1, 3, 1), (2, 1, 1)]}
    wanted["pressed"] = [(1, 3, 1), (2, 1, 1), (3, 16, 1)]
    if kind == "extend":
        marked(allocator, "extend", (3, 0, 16))
    elif kind == "decode":
        marked(allocator, "extend", (1, 0, 3), (2, 0, 1))
    out = set(range(1, 64)) - owned(allocator)
    allocator.mark = Mark("extend" if kind == "extend" else "decode", *wanted[kind])

    with _break(getattr(allocator.core, part) if part else allocator.core, name, after=after):
        taken = allocator.alloc(sum(count for _, _, count in wanted[kind]))

    assert allocator.core is None
    free = allocator.free_pages.tolist()
    assert len(set(free)) == len(free) == allocator.available_size()
    assert set(free) | set(taken.tolist()) | out == set(range(1, 64))
    assert not set(free) & set(taken.tolist())
    assert not (set(free) | set(taken.tolist())) & out


def owned(allocator: Any) -> set[int]:
    """Return the slots that are free or in reserve."""
    reserved = allocator.core.reservations.reserved()
    return {*allocator.free_pages.tolist(), *reserved.tolist()}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["free", "put"])
def test_a_fault_amid_a_free_loses_no_slot(name: str, after: bool) -> None:
    allocator = make(63, "two_ended with reservation")
    row = marked(allocator, "extend", (1, 0, 3))
    owner = allocator.core if name == "free" else allocator.core.free_list

    with _break(owner, name, after=after):
        allocator.free(torch.tensor(row))

    assert allocator.core is None
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 64))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["free", "put"])
def test_a_fault_at_the_end_of_a_free_group_loses_no_slot(name: str, after: bool) -> None:
    allocator = make(63, "two_ended with reservation")
    row = torch.tensor(marked(allocator, "extend", (1, 0, 3)))
    owner = allocator.core if name == "free" else allocator.core.free_list

    allocator.free_group_begin()
    allocator.free(row[:2])
    allocator.free(row[2:])
    with _break(owner, name, after=after):
        allocator.free_group_end()

    assert allocator.core is None
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 64))


@pytest.mark.parametrize("name", ["clear", "resize"])
def test_a_fault_amid_a_new_start_leaves_every_slot_free(name: str) -> None:
    allocator = make(63, "two_ended with reservation")
    told: list[Exception] = []
    allocator.on_fault = told.append
    allocator.alloc(9)

    with _break(allocator.core, name, after=False):
        if name == "clear":
            allocator.clear()
        else:
            allocator.resize(SimpleNamespace(max_total_num_tokens=63))

    assert allocator.core is None
    assert len(told) == 1
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 64))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["free", "put", "admit"])
def test_a_fault_amid_a_release_loses_no_slot(name: str, after: bool) -> None:
    from kvdefrag.sglang.compat import KvLengths
    from kvdefrag.sglang.marks import Marks

    allocator = make(63, "two_ended with reservation")
    row = marked(allocator, "extend", (1, 0, 3))
    core = allocator.core
    owner = {"free": core, "put": core.free_list, "admit": core.checks}[name]
    marks = Marks(SimpleNamespace(lengths=lambda request: KvLengths(1, 0, 3, 3)))
    tree = SimpleNamespace(token_to_kv_pool_allocator=allocator)

    with _break(owner, name, after=after):
        marks.around_release(lambda *args: allocator.free(torch.tensor(row)), None, tree)

    assert allocator.core is None
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 64))


def test_a_fault_while_room_is_made_does_not_place_any_more() -> None:
    allocator = make(64, "two_ended with reservation")
    held = allocator.alloc(40)
    mark = Mark("extend", (1, 0, 4), (2, 0, 4))
    mark.make_room = lambda count: allocator.free(held[:20])
    allocator.mark = mark

    with _break(allocator.core.free_list, "put", after=False):
        taken = allocator.alloc(8)

    assert allocator.core is None
    names = [*allocator.free_pages.tolist(), *taken.tolist(), *held[20:].tolist()]
    assert sorted(names) == list(range(1, 65))


def test_a_fault_before_an_allocation_leaves_the_one_before_alone() -> None:
    allocator = make(63, "two_ended with reservation")
    row = marked(allocator, "extend", (1, 0, 3))
    allocator.mark = SimpleNamespace(demand=lambda: 1 / 0)

    taken = allocator.alloc(4).tolist()

    assert sorted([*allocator.free_pages.tolist(), *taken, *row]) == list(range(1, 64))


def test_a_wrong_count_is_the_callers_fault_and_not_ours() -> None:
    from kvdefrag.errors import SlotError

    allocator = make(16)

    with pytest.raises(SlotError, match="cannot allocate -1 slots"):
        allocator.alloc(-1)
    assert allocator.core is not None


def test_a_fault_amid_a_free_group_loses_no_slot() -> None:
    allocator = make(64, "two_ended")
    taken = allocator.alloc(10)

    allocator.free_group_begin()
    allocator.free(taken[:4])
    allocator.give_up(RuntimeError("planted"))
    allocator.free(taken[4:])
    allocator.free_group_end()

    assert allocator.available_size() == 64


def test_clear_is_told() -> None:
    allocator, told = make(16), []
    allocator.on_clear = lambda: told.append(True)

    allocator.clear()

    assert told == [True]
