"""SGLang's two orders, slot for slot, against a plain model of what it documents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.free_list import FifoFreeList, SortedFreeList

CPU = torch.device("cpu")
Op = tuple[str, int]


class Model:
    """What SGLang's token allocator does at page size 1, with Python lists."""

    def __init__(self, size: int, *, need_sort: bool) -> None:
        self.free = list(range(1, size + 1))
        self.released: list[int] = []
        self.need_sort = need_sort

    def available(self) -> int:
        return len(self.free) + len(self.released)

    def take(self, count: int) -> list[int]:
        if self.need_sort and count > len(self.free):
            self.free, self.released = sorted(self.free + self.released), []
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def put(self, slots: list[int]) -> None:
        (self.released if self.need_sort else self.free).extend(slots)


def make(kind: type[FifoFreeList] | type[SortedFreeList], size: int):
    return kind(size, device=CPU)


KINDS = [FifoFreeList, SortedFreeList]


def test_fifo_takes_from_the_front_and_appends_what_is_freed():
    free = make(FifoFreeList, 6)

    assert free.take_front(2).tolist() == [1, 2]
    free.put(torch.tensor([2]))
    free.put(torch.tensor([1]))
    assert free.take_back(3).tolist() == [3, 4, 5]
    assert free.slots().tolist() == [6, 2, 1]
    assert free.take_front(2).tolist() == [6, 2]


def test_sorted_sets_freed_slots_aside_until_a_shortage():
    free = make(SortedFreeList, 6)
    free.take_front(4)
    free.put(torch.tensor([3]))
    free.put(torch.tensor([1]))

    assert free.available() == 4
    assert free.slots().tolist() == [5, 6, 3, 1]
    assert free.take_front(2).tolist() == [5, 6]
    assert free.take_front(1).tolist() == [1]
    assert free.slots().tolist() == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_taking_nothing_returns_an_empty_tensor_of_slots(kind):
    free = make(kind, 3)

    taken = free.take_front(0)

    assert (taken.tolist(), taken.dtype) == ([], torch.int64)
    assert free.slots().tolist() == [1, 2, 3]
    free.take_front(3)
    assert free.take_front(0).tolist() == []
    assert (free.available(), free.slots().tolist()) == (0, [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_of_one_slot_and_of_none(kind):
    assert make(kind, 0).available() == 0
    assert make(kind, 0).slots().tolist() == []
    one = make(kind, 1)
    assert one.take_front(1).tolist() == [1]
    one.put(torch.tensor([1]))
    assert one.take_back(1).tolist() == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_clear_holds_all_slots_of_the_new_size(kind):
    free = make(kind, 5)
    free.take_front(4)
    free.put(torch.tensor([2]))
    free.clear(3)

    assert free.available() == 3
    assert free.slots().tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_may_be_overwritten_by_the_caller(kind):
    free = make(kind, 4)
    slots = free.take_front(2).clone()
    free.put(slots)
    slots.fill_(99)

    assert sorted(free.slots().tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_the_slots_are_a_copy(kind):
    free = make(kind, 3)
    free.slots().fill_(99)

    assert free.slots().tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
@given(
    size=st.integers(1, 40),
    ops=st.lists(st.tuples(st.sampled_from(["front", "back", "put"]), st.integers(0, 40))),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_the_model_gives_the_same_slots(kind, size: int, ops: list[Op], seed):
    free = make(kind, size)
    model = Model(size, need_sort=kind is SortedFreeList)
    live: list[int] = []
    returned: list[tuple[torch.Tensor, list[int]]] = []
    for op, count in ops:
        if op == "put":
            seed.shuffle(live)
            given_back, live = live[:count], live[count:]
            free.put(torch.tensor(given_back, dtype=torch.int64))
            model.put(given_back)
        elif count <= model.available():
            taken = free.take_front(count) if op == "front" else free.take_back(count)
            expected = model.take(count)
            assert taken.tolist() == expected
            returned.append((taken, expected))
            live += expected
        assert free.available() == model.available()
        assert free.slots().tolist() == model.free + model.released
    # A forward in flight may still read what was returned long ago.
    assert all(tensor.tolist() == then for tensor, then in returned)
