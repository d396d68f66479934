"""The prefix tree on its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.core.demand import IntArray
from kvdefrag.errors import IntegrityError
from kvdefrag.sim.radix import RadixTree
from kvdefrag.sim.radix_node import Node, path, path_slots


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_an_empty_tree_matches_nothing():
    tree = RadixTree()

    found = tree.match(ints(1, 2, 3))

    assert found == (tree.root, 0)
    assert path_slots(found.node).tolist() == []
    assert tree.total_size == 0


def test_an_empty_sequence_matches_the_root_and_inserts_nothing():
    tree = RadixTree()
    tree.insert(ints(1, 2), ints(10, 11))

    assert tree.match(ints()) == (tree.root, 0)
    assert tree.insert(ints(), ints()) == (tree.root, 0)
    assert tree.total_size == 2


def test_a_match_inside_a_node_splits_it_there():
    tree = RadixTree()
    leaf, shared = tree.insert(ints(1, 2, 3, 4), ints(10, 11, 12, 13))

    found = tree.match(ints(1, 2, 9))

    assert shared == 0
    assert found.length == 2
    assert found.node.slots.tolist() == [10, 11]
    assert leaf.slots.tolist() == [12, 13]
    assert leaf.parent is found.node
    assert path_slots(leaf).tolist() == [10, 11, 12, 13]
    tree.check_integrity()


def test_an_insertion_keeps_what_is_there_and_says_how_much():
    tree = RadixTree()
    tree.insert(ints(1, 2, 3), ints(10, 11, 12))

    node, shared = tree.insert(ints(1, 2, 7, 8), ints(20, 21, 22, 23))

    assert shared == 2
    assert path_slots(node).tolist() == [10, 11, 22, 23]
    assert tree.total_size == 5


def test_an_insertion_below_a_node_continues_its_path():
    tree = RadixTree()
    node, _ = tree.insert(ints(1, 2, 3), ints(10, 11, 12))

    end, shared = tree.insert(ints(4, 5), ints(13, 14), node)

    assert shared == 0
    assert path_slots(end).tolist() == [10, 11, 12, 13, 14]
    assert tree.match(ints(1, 2, 3, 4, 5)) == (end, 5)


def test_a_split_below_a_locked_end_leaves_the_end_where_it_was():
    tree = RadixTree()
    leaf, _ = tree.insert(ints(1, 2, 3, 4), ints(10, 11, 12, 13))
    tree.lock(leaf)

    upper = tree.match(ints(1, 2)).node

    assert [node.locks for node in path(leaf)] == [1, 1]
    assert upper.locks == 1
    assert tree.protected_size == 4
    tree.check_integrity([leaf])


def test_inserted_slots_are_copies():
    slots = np.array([5, 6], dtype=np.int32)
    tree = RadixTree()
    node, _ = tree.insert(ints(1, 2), slots)

    slots[:] = 0

    assert node.slots.tolist() == [5, 6]
    assert node.slots.dtype == np.int64


def test_leaves_are_evicted_whole_and_least_recently_used_first():
    tree = RadixTree()
    for first in (1, 2, 3):
        tree.insert(ints(first, 0), ints(10 * first, 10 * first + 1))
    tree.match(ints(1, 0))

    assert tree.evict(3).tolist() == [20, 21, 30, 31]
    assert tree.evict(1).tolist() == [10, 11]
    assert tree.evict(1).tolist() == []
    assert tree.total_size == 0


def test_a_parent_is_evicted_in_turn_once_its_children_are_gone():
    # Access order: branch (1, 2), branch (1, 3), then 5; the shared 1 was used with (1, 3).
    tree = RadixTree()
    tree.insert(ints(1, 2), ints(10, 12))
    tree.insert(ints(1, 3), ints(10, 13))
    tree.insert(ints(5), ints(15))

    assert tree.evict(4).tolist() == [12, 13, 10, 15]


def test_a_parent_used_later_than_another_leaf_outlives_it():
    tree = RadixTree()
    tree.insert(ints(1, 2), ints(10, 12))
    tree.insert(ints(1, 3), ints(10, 13))
    tree.insert(ints(5), ints(15))
    tree.match(ints(1))

    assert tree.evict(4).tolist() == [12, 13, 15, 10]


def test_locked_paths_survive_eviction():
    tree = RadixTree()
    node, _ = tree.insert(ints(1, 2), ints(10, 11))
    tree.insert(ints(1, 2, 3), ints(10, 11, 12))
    tree.lock(node)

    assert (tree.evictable_size, tree.protected_size) == (1, 2)
    assert tree.evict(3).tolist() == [12]

    tree.unlock(node)

    assert tree.evict(3).tolist() == [10, 11]


def test_values_of_locked_paths_name_each_node_once_and_share_memory():
    tree = RadixTree()
    tree.insert(ints(1, 2, 3), ints(10, 11, 12))
    left, _ = tree.insert(ints(1, 2, 4), ints(10, 11, 14))
    right, _ = tree.insert(ints(1, 2, 5), ints(10, 11, 15))

    values = tree.locked_path_values([left, right, tree.root])
    for value in values:
        value.add_(100)

    assert sorted(slot for value in values for slot in value.tolist()) == [110, 111, 114, 115]
    assert path_slots(right).tolist() == [110, 111, 115]


def test_a_lock_too_many_is_noticed():
    tree = RadixTree()
    node, _ = tree.insert(ints(1), ints(10))
    tree.lock(node)

    with pytest.raises(IntegrityError, match="1 locks where 0 are held"):
        tree.check_integrity([])


def test_long_sequences_are_compared_past_the_first_piece():
    tree = RadixTree()
    long = np.arange(20_000, dtype=np.int64)
    tree.insert(long, long)
    other = long.copy()
    other[17_000] = -1

    assert tree.match(other).length == 17_000


class ReferenceTree:
    """SGLang's rules written the slow way: one token a step, all leaves sorted at each eviction."""

    def __init__(self) -> None:
        self.clock = 0
        self.slots: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.cuts: set[tuple[int, ...]] = set()

    def insert(self, tokens: tuple[int, ...], slots: list[int]) -> int:
        self.clock += 1
        have = self._walk(tokens)
        if have < len(tokens):
            self.cuts.add(tokens)
            self.clock += 1
        for at in range(have, len(tokens)):
            self.slots[tokens[: at + 1]] = slots[at]
            self.used[tokens[: at + 1]] = self.clock
        return have

    def match(self, tokens: tuple[int, ...]) -> int:
        self.clock += 1
        return self._walk(tokens)

    def _walk(self, tokens: tuple[int, ...]) -> int:
        have = 0
        while have < len(tokens) and tokens[: have + 1] in self.slots:
            have += 1
        path = tokens[:have]
        for end in range(1, have + 1):
            self.used[tokens[:end]] = self.clock
        if have and path not in self.cuts:
            # The node in which the walk ends was used as a whole; then it is cut, and the
            # upper part is a node of its own, newer than the walk.
            below = path
            while below not in self.cuts:
                below = next(key for key in self.slots if key[:-1] == below)
                self.used[below] = self.clock
            self.clock += 1
            self.cuts.add(path)
            for end in range(self._top(path), have + 1):
                self.used[tokens[:end]] = self.clock
        return have

    def _top(self, end: tuple[int, ...]) -> int:
        top = len(end)
        while top > 1 and end[: top - 1] not in self.cuts:
            top -= 1
        return top

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            inner = {key[:-1] for key in self.slots}
            leaves = [key for key in self.slots if key not in inner]
            if not leaves:
                break
            oldest = min(leaves, key=lambda key: self.used[key])
            node = [oldest[:end] for end in range(self._top(oldest), len(oldest) + 1)]
            freed += [self.slots.pop(key) for key in node]
            self.cuts.discard(oldest)
        return freed


TOKENS = st.lists(st.integers(0, 2), min_size=0, max_size=7).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), TOKENS),
        st.tuples(st.just("match"), TOKENS),
        st.tuples(st.just("evict"), st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_matches_insertions_and_evictions_are_those_of_the_slow_reference(steps):
    tree, slow, fresh = RadixTree(), ReferenceTree(), 0
    for what, argument in steps:
        if what == "evict":
            assert tree.evict(argument).tolist() == slow.evict(argument)
        elif what == "match":
            assert tree.match(ints(*argument)).length == slow.match(argument)
        else:
            slots = list(range(fresh, fresh + len(argument)))
            fresh += len(argument)
            end, shared = tree.insert(ints(*argument), ints(*slots))
            assert shared == slow.insert(argument, slots)
            assert path_slots(end).tolist() == [
                slow.slots[argument[: i + 1]] for i in range(len(argument))
            ]
        tree.check_integrity()
        assert tree.total_size == len(slow.slots)


def test_nodes_lists_parents_before_children():
    tree = RadixTree()
    tree.insert(ints(1, 2, 3), ints(1, 2, 3))
    tree.insert(ints(1, 2, 4), ints(1, 2, 4))
    seen: list[Node] = [tree.root]
    for node in tree.nodes():
        assert node.parent in seen
        seen.append(node)

    assert len(seen) == 4
