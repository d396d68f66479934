"""The prefix tree: which token sequences the pool holds, at token granularity.

Same matches, splits, locks and evictions as SGLang's `RadixCache` with page_size 1 and LRU
eviction (read in 0.5.17, `mem_cache/radix_cache.py`), with two shortcuts that change no outcome:
an insertion starts below the node that the request has locked, since the path to it spells the
request's own prefix; and evictable leaves stay in a heap instead of being heapified anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvdefrag.core.demand import IntArray
from kvdefrag.errors import IntegrityError
from kvdefrag.sim.radix_node import EMPTY, Node, check_node, common_length, path

AnyInts = npt.NDArray[np.integer[Any]]


class Match(NamedTuple):
    """How much of a sequence is in the tree, and the node where that ends."""

    node: Node
    length: int


class RadixTree:
    """Prefix tree over token identities with locks and LRU eviction of unlocked leaves.

    Logical time stands in for SGLang's clock: it moves on at every walk and every new node, as
    `time.monotonic()` does, so the order of evictions is that of unique access times.
    """

    def __init__(self) -> None:
        self._now = 0
        self._serial = 0
        self._heap: list[tuple[int, int, Node]] = []
        self.root = self._node(EMPTY, EMPTY, None)
        self.root.locks = 1
        self.evictable_size = 0
        self.protected_size = 0

    @property
    def total_size(self) -> int:
        """Slots that the tree holds."""
        return self.evictable_size + self.protected_size

    def match(self, tokens: IntArray) -> Match:
        """Find the longest prefix of `tokens`; splits the node in which it ends."""
        now = self._tick()
        node, at = self.root, 0
        while at < tokens.shape[0]:
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            child.used = now
            same = common_length(child.key, tokens, at)
            at += same
            if same < child.key.shape[0]:
                return Match(self._split(child, same), at)
            node = child
        return Match(node, at)

    def insert(self, tokens: IntArray, slots: AnyInts, below: Node | None = None) -> Match:
        """Put `tokens` with their `slots` into the tree, as far as it does not have them.

        Args:
            tokens: int64 [n], what follows after `below`.
            slots: [n], of any integer type, taken over by copy for the part that is new.
            below: Node that the sequence passes through; the root by default.

        Returns:
            The node where the sequence ends, and how many of `tokens` the tree had before.
        """
        now = self._tick()
        node = below or self.root
        self._touch(node, now)
        at = 0
        while at < tokens.shape[0]:
            child = node.children.get(int(tokens[at]))
            if child is None:
                return Match(self._add_leaf(node, tokens[at:], slots[at:]), at)
            child.used = now
            same = common_length(child.key, tokens, at)
            at += same
            node = child if same == child.key.shape[0] else self._split(child, same)
        return Match(node, at)

    def refresh(self, node: Node) -> None:
        """Mark the path to `node` as used now, as a match that ends there would."""
        self._touch(node, self._tick())

    def lock(self, node: Node) -> None:
        """Protect the path to `node` from eviction."""
        for step in path(node):
            if step.locks == 0:
                size = step.key.shape[0]
                self.evictable_size -= size
                self.protected_size += size
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Take one lock off the path to `node`."""
        for step in path(node):
            step.locks -= 1
            if step.locks == 0:
                size = step.key.shape[0]
                self.evictable_size += size
                self.protected_size -= size
                self._offer(step)

    def evict(self, count: int) -> IntArray:
        """Remove least recently used unlocked leaves until `count` slots or all are gone.

        Returns:
            int64 [>= count if there were as many], the slots in order of eviction; whole nodes.
        """
        freed: list[IntArray] = []
        while count > 0 and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.children or node.parent is None:
                continue
            if node.used != used:
                self._offer(node)
                continue
            freed.append(node.slots)
            count -= node.slots.shape[0]
            self._remove(node)
        if len(freed) == 1:
            return freed[0]
        return np.concatenate(freed) if freed else EMPTY

    def nodes(self) -> Iterator[Node]:
        """Go through all nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def locked_path_values(self, nodes: Iterable[Node]) -> list[Tensor]:
        """Return the slots of every node on the paths to `nodes`, each node once.

        Returns:
            int64 tensors that share memory with the tree: writing into them moves its rows.
        """
        seen: set[int] = set()
        values: list[Tensor] = []
        for end in nodes:
            for node in path(end):
                if node.serial in seen:
                    break
                seen.add(node.serial)
                values.append(torch.from_numpy(node.slots))
        return values

    def check_integrity(self, ends: Iterable[Node] = ()) -> None:
        """Raise `IntegrityError` unless sizes, links and the locks held at `ends` agree."""
        locks: dict[int, int] = {}
        for end in ends:
            for node in path(end):
                locks[node.serial] = locks.get(node.serial, 0) + 1
        sizes = [0, 0]
        for node in self.nodes():
            check_node(node, locks.get(node.serial, 0))
            sizes[node.locks > 0] += node.key.shape[0]
            if not (node.locks or node.children or node.queued):
                raise IntegrityError(f"node {node.serial} is an evictable leaf but not queued")
        if sizes != [self.evictable_size, self.protected_size]:
            raise IntegrityError(
                f"tree: {sizes} slots evictable and protected, counted as "
                f"{[self.evictable_size, self.protected_size]}"
            )

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _node(self, key: IntArray, slots: IntArray, parent: Node | None) -> Node:
        self._serial += 1
        return Node(key, slots, parent, self._tick(), self._serial)

    def _touch(self, node: Node, now: int) -> None:
        for step in path(node):
            step.used = now

    def _add_leaf(self, parent: Node, key: IntArray, slots: AnyInts) -> Node:
        leaf = self._node(key.copy(), slots.astype(np.int64), parent)
        parent.children[int(key[0])] = leaf
        self.evictable_size += key.shape[0]
        self._offer(leaf)
        return leaf

    def _split(self, child: Node, at: int) -> Node:
        # The upper half is the new node, so whoever holds `child` still holds the end of its path.
        parent = child.parent
        assert parent is not None, "the root is never split"
        upper = self._node(child.key[:at].copy(), child.slots[:at].copy(), parent)
        upper.locks = child.locks
        parent.children[int(upper.key[0])] = upper
        child.key, child.slots = child.key[at:].copy(), child.slots[at:].copy()
        child.parent = upper
        upper.children[int(child.key[0])] = child
        return upper

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "the root is never removed"
        del parent.children[int(leaf.key[0])]
        leaf.parent = None
        self.evictable_size -= leaf.key.shape[0]
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        # At most one entry a node; one whose `used` is older is renewed when it comes up.
        if node.queued or node.locks or node.children:
            return
        node.queued = True
        heapq.heappush(self._heap, (node.used, node.serial, node))
