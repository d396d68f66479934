"""The two-ended order on any device, and its twin for CPU tensors, slot for slot."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.core.readback import Readback
from kvdefrag.core.two_ended import TwoEndedFreeList

CPU = torch.device("cpu")


def host(size: int, page: int) -> HostTwoEndedFreeList:
    return HostTwoEndedFreeList(size, page=page)


def device(size: int, page: int, readback: Readback | None = None) -> TwoEndedFreeList:
    return TwoEndedFreeList(size, page=page, device=CPU, readback=readback or Readback(0))


def true_whole(slots: list[int], page: int) -> int:
    free = set(slots)
    return sum(all(k * page + i in free for i in range(page)) for k in {s // page for s in free})


both = pytest.mark.parametrize("make", [host, device])


@both
def test_an_untouched_list_has_whole_pages_first_then_the_last_page_then_that_of_the_sink(make):
    # Pages of 4 in 1..9: page 0 holds 1..3, page 1 and nothing but it is whole, page 2 is 8, 9.
    free = make(9, 4)

    assert free.slots().tolist() == [4, 5, 6, 7, 1, 2, 3, 8, 9]
    assert free.available() == 9
    assert free.whole_pages() == 1
    assert free.free_per_page().tolist() == [3, 4, 2]


@both
def test_size_and_one_that_is_a_multiple_of_the_page_makes_the_last_page_whole(make):
    free = make(11, 4)

    assert free.slots().tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3]
    assert free.whole_pages() == 2


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_a_pool_too_small_for_a_page_has_no_whole_page(make, size: int):
    free = make(size, 4)

    assert free.whole_pages() == 0
    assert sorted(free.slots().tolist()) == list(range(1, size + 1))
    assert sorted(free.take_back(size).tolist()) == list(range(1, size + 1))
    assert (free.available(), free.slots().tolist()) == (0, [])


@both
def test_prompts_take_whole_pages_ascending_and_decode_the_densest_page(make):
    free = make(15, 4)

    assert free.take_front(4).tolist() == [4, 5, 6, 7]
    assert free.take_back(1).tolist() == [3]
    assert free.take_back(2).tolist() == [1, 2]
    # Nothing loose is left: decode breaks the last whole page.
    assert free.take_back(1).tolist() == [15]
    assert free.take_front(8).tolist() == [8, 9, 10, 11, 12, 13, 14]


@both
def test_freed_slots_wait_until_the_order_is_renewed(make):
    free = make(15, 4)
    free.take_front(12)
    assert not free.dirty

    free.put(torch.tensor([9, 4, 5]))

    assert free.dirty
    assert free.available() == 6
    assert free.take_back(1).tolist() == [3]
    free.reorder()
    assert not free.dirty
    # Free: 1, 2 of page 0; 4, 5 of page 1; 9 of page 2: most free first, densest last.
    assert free.slots().tolist() == [1, 2, 4, 5, 9]


@both
def test_a_shortage_renews_the_order_by_itself(make):
    free = make(7, 4)
    free.take_front(7)
    free.put(torch.tensor([6, 1]))
    free.put(torch.tensor([5]))

    assert free.take_front(3).tolist() == [5, 6, 1]


@both
def test_slots_freed_in_turn_merge_into_whole_pages(make):
    free = make(15, 4)
    free.take_front(15)
    free.put(torch.tensor([8, 10, 12, 14]))
    free.put(torch.tensor([9, 11, 13, 15]))
    free.reorder()

    assert free.whole_pages() == 2
    assert free.slots().tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


@both
def test_taking_nothing_changes_nothing(make):
    free = make(9, 4)
    before = free.slots().tolist()

    assert free.take_front(0).tolist() == []
    assert free.take_back(0).tolist() == []
    assert free.take_back(0).dtype == torch.int64
    assert (free.slots().tolist(), free.available()) == (before, 9)


@both
def test_an_unaligned_front_promises_no_whole_page(make):
    free = make(15, 4)
    free.take_front(3)

    assert free.whole_pages() == 0
    assert free.front_pages(2)[1].tolist() == [False, False]


@both
def test_front_pages_are_the_lowest_whole_pages(make):
    free = make(15, 4)

    pages, whole = free.front_pages(4)

    assert pages[:3].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert whole.tolist() == [True, True, True, False]
    assert pages.shape == (4, 4)


@both
def test_pages_that_were_used_are_replaced_by_what_became_free(make):
    free = make(15, 4)
    live = free.take_front(4)
    free.reorder()
    given = torch.zeros((2, 4), dtype=torch.int64)
    given[0] = live

    free.substitute_front(torch.tensor([True, False]), given)

    assert free.available() == 11
    assert free.whole_pages() == 0
    free.reorder()
    assert free.slots().tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 1, 2, 3]


@both
def test_single_slots_are_replaced_pairwise_and_the_sink_onto_itself_is_nothing(make):
    free = make(15, 4)
    live = free.take_front(8).tolist()
    assert live == [4, 5, 6, 7, 8, 9, 10, 11]
    free.reorder()

    free.substitute(torch.tensor([2, 0, 13, 5]), torch.tensor([8, 0, 4, 5]))

    assert free.substituted
    assert free.available() == 7
    free.reorder()
    # Page 3 lost 13; pages 0, 1 and 2 hold 1 3, 4 and 8.
    assert free.slots().tolist() == [12, 14, 15, 1, 3, 4, 8]


@both
def test_what_is_taken_after_a_substitution_comes_from_the_new_order(make):
    free = make(15, 4)
    free.take_front(4)
    free.reorder()
    free.substitute(torch.tensor([8]), torch.tensor([6]))

    assert free.take_front(4).tolist() == [12, 13, 14, 15]


@both
def test_clear_forgets_everything_and_takes_the_new_size(make):
    free = make(15, 4)
    free.take_front(5)
    free.put(torch.tensor([4]))
    free.clear(9)

    assert free.slots().tolist() == [4, 5, 6, 7, 1, 2, 3, 8, 9]
    assert (free.available(), free.whole_pages(), free.dirty) == (9, 1, False)


@both
def test_what_was_put_may_be_overwritten_by_the_caller(make):
    free = make(9, 4)
    slots = free.take_front(4).clone()
    free.put(slots)
    slots.fill_(1)
    free.reorder()

    assert sorted(free.slots().tolist()) == list(range(1, 10))


@pytest.mark.parametrize("page", [256, 512, 1024])
def test_pages_beyond_a_byte_keep_their_order(page: int):
    # Page 1 lacks one slot, page 2 lacks `page - 1`, page 3 half of its slots.
    size = 4 * page - 1
    lists = host(size, page), device(size, page)
    for free in lists:
        live = free.take_front(size)
        gone = {page, *range(2 * page + 1, 3 * page), *range(3 * page, 3 * page + page // 2)}
        free.put(torch.tensor([s for s in live.tolist() if s not in gone and s >= page]))
        free.reorder()

    assert lists[0].slots().tolist() == lists[1].slots().tolist()
    assert lists[0].slots()[0] == page + 1
    assert lists[0].slots()[-1] == 2 * page


def test_a_device_list_never_promises_fewer_than_no_pages():
    assert [device(size, 4, Readback(2)).whole_pages() for size in (1, 2, 3, 6, 7)] == [
        0,
        0,
        0,
        0,
        1,
    ]


def test_case_38_a_device_list_flags_a_slot_that_was_freed_twice():
    free = device(15, 4)
    live = free.take_front(4)
    free.put(live)
    free.reorder()
    assert not bool(free.violation)

    free.put(live[:1])
    free.reorder()

    assert bool(free.violation)


@pytest.mark.parametrize("slot", [0, 13, 15, 16, 1_000_000, -1, -1_000_000])
def test_case_38_a_device_list_flags_a_slot_out_of_range_without_a_fault(slot: int):
    free = device(12, 4)
    free.take_front(4)
    free.put(torch.tensor([slot]))
    free.reorder()

    assert bool(free.violation)
    # Whoever is given it writes into the sink, not into somebody's row.
    assert free.slots().tolist().count(0) == 1
    assert max(free.slots().tolist()) <= 12


def test_late_news_count_for_later_orders_too():
    readback = Readback(2)
    free = device(15, 4, readback)
    free.take_front(12)
    free.put(torch.tensor([4, 5, 6, 7]))
    free.reorder()
    assert free.whole_pages() == 0

    readback.advance()
    free.put(torch.tensor([8]))
    free.reorder()
    readback.advance()
    # The first order's news: the second has lost nothing since. Its own are still under way.
    assert free.whole_pages() == 1
    readback.advance()
    assert free.whole_pages() == 1


def test_late_news_know_what_was_taken_from_both_ends_meanwhile():
    # Whole pages 1 and 2 and nothing else: three from the front and one from the back break both.
    readback = Readback(2)
    free = device(11, 4, readback)
    free.take_back(3)
    free.take_front(8)
    free.put(torch.tensor([4, 5, 6, 7, 8, 9, 10, 11]))
    free.reorder()
    free.take_front(3)
    free.take_back(1)
    readback.advance()
    readback.advance()
    free.put(torch.tensor([1]))
    free.reorder()

    assert true_whole(free.slots().tolist(), 4) == 0
    assert free.whole_pages() == 0


class Pair:
    """Both forms under the same operations, and who holds the other slots."""

    def __init__(self, size: int, page: int, delay: int) -> None:
        self.size, self.page, self.delay = size, page, delay
        self.readback = Readback(delay)
        self.host = host(size, page)
        self.device = device(size, page, self.readback)
        self.live: list[int] = []
        self.returned: list[tuple[torch.Tensor, list[int]]] = []

    def take(self, end: str, count: int) -> None:
        count = min(count, self.host.available())
        taken = [getattr(free, f"take_{end}")(count) for free in (self.host, self.device)]
        assert taken[0].tolist() == taken[1].tolist()
        self.live += taken[0].tolist()
        self.returned += [(t, t.tolist()) for t in taken]

    def put(self, count: int, rng: random.Random) -> None:
        rng.shuffle(self.live)
        slots, self.live = self.live[:count], self.live[count:]
        for free in (self.host, self.device):
            free.put(torch.tensor(slots, dtype=torch.int64))

    def reorder(self) -> None:
        self.host.reorder()
        self.device.reorder()
        slots = self.host.slots().tolist()
        assert slots == self.device.slots().tolist()
        assert self.host.whole_pages() == true_whole(slots, self.page)
        if self.delay == 0:
            assert self.device.whole_pages() == self.host.whole_pages()

    def substitute(self, count: int, rng: random.Random) -> None:
        self.reorder()
        free = self.host.slots().tolist()
        rng.shuffle(free)
        rng.shuffle(self.live)
        count = min(count, len(free), len(self.live))
        taken, given_back = [*free[:count], 0, 0], [*self.live[:count], 0, 0]
        for form in (self.host, self.device):
            form.substitute(torch.tensor(taken), torch.tensor(given_back))
        self.live[:count] = free[:count]

    def substitute_front(self, count: int, rng: random.Random) -> None:
        self.reorder()
        lanes = count + 1
        ours, whole = self.host.front_pages(lanes)
        theirs, also_whole = self.device.front_pages(lanes)
        assert whole.tolist() == also_whole.tolist()
        assert ours[whole].tolist() == theirs[whole].tolist()
        used = min(count, int(whole.sum()), len(self.live) // self.page)
        moved = torch.arange(lanes) < used
        rng.shuffle(self.live)
        slots = torch.zeros((lanes, self.page), dtype=torch.int64)
        slots[:used] = torch.tensor(self.live[: used * self.page]).view(used, self.page)
        for form in (self.host, self.device):
            form.substitute_front(moved, slots.clone())
        self.live[: used * self.page] = ours[:used].flatten().tolist()

    def check(self) -> None:
        free = self.host.slots().tolist()
        assert sorted(free + self.live) == list(range(1, self.size + 1))
        assert sorted(self.device.slots().tolist()) == sorted(free)
        assert self.host.available() == self.device.available() == len(free)
        whole = true_whole(free, self.page)
        assert 0 <= self.host.whole_pages() <= whole
        assert 0 <= self.device.whole_pages() <= whole
        counts = self.host.free_per_page().tolist()
        assert counts == self.device.free_per_page().tolist()
        assert sum(counts) == len(free)
        assert not bool(self.device.violation)


OPS = ["front", "pages", "back", "put", "reorder", "substitute", "substitute_front", "advance"]


@pytest.mark.parametrize("delay", [0, 2])
@given(
    size=st.integers(1, 150),
    page=st.sampled_from([2, 4, 16]),
    ops=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 40)), max_size=40),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=80)
def test_both_forms_give_the_same_slots_and_never_promise_too_many_pages(
    delay: int, size: int, page: int, ops: list[tuple[str, int]], rng: random.Random
):
    pair = Pair(size, page, delay)
    for op, count in ops:
        if op == "pages":
            pair.take("front", count // 8 * page)
        elif op in ("front", "back"):
            pair.take(op, count)
        elif op == "put":
            pair.put(count, rng)
        elif op == "reorder":
            pair.reorder()
        elif op == "substitute":
            pair.substitute(count // 4, rng)
        elif op == "substitute_front":
            pair.substitute_front(count // 8, rng)
        else:
            pair.readback.advance()
        pair.check()
    # A forward in flight may still read what was returned long ago.
    assert all(tensor.tolist() == then for tensor, then in pair.returned)


def test_news_of_whole_pages_count_though_the_list_was_sorted_since():
    # While pages are short the list is sorted at every step, before the news of any order arrive.
    readback = Readback(2)
    free = device(63, 4, readback)
    held = free.take_front(60)
    free.put(held[:20])  # five whole pages
    free.reorder()
    for _ in range(3):
        free.put(free.take_back(1))
        readback.advance()
        free.reorder()

    assert free.whole_pages() == true_whole(free.slots().tolist(), 4) == 5


def test_late_news_are_less_what_later_orders_have_lost():
    readback = Readback(3)
    free = device(63, 4, readback)
    held = free.take_front(60)
    free.put(held[:20])
    free.reorder()
    taken = free.take_front(8)
    free.put(held[20:21])
    free.reorder()
    free.substitute(free.slots()[:1], taken[:1])
    free.reorder()
    for _ in range(3):
        readback.advance()

    assert 0 < free.whole_pages() <= true_whole(free.slots().tolist(), 4)


def test_news_that_nobody_hears_take_no_memory():
    readback = Readback(2)
    free = device(15, 4, readback)
    for _ in range(300):
        free.put(free.take_back(1))
        free.reorder()
        readback.clear()

    assert len(free._since) <= 64
