"""Nodes of the prefix tree, and walks along them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvdefrag.core.demand import IntArray
from kvdefrag.errors import IntegrityError

EMPTY: IntArray = np.empty(0, dtype=np.int64)
_CHUNK = 8192


class Node:
    """A stretch of tokens below its parent.

    Attributes:
        key: int64 [n], token identities.
        slots: int64 [n], where their KV rows lie. Rewritten in place by relocation.
        children: By first token.
        locks: Running requests whose prefix passes through here.
        used: Logical time of the latest access.
    """

    __slots__ = ("children", "key", "locks", "parent", "queued", "serial", "slots", "used")

    def __init__(
        self, key: IntArray, slots: IntArray, parent: Node | None, used: int, serial: int
    ) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.used = used
        self.serial = serial
        self.queued = False


def path(node: Node) -> Iterator[Node]:
    """Go from `node` up to the child of the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def path_slots(node: Node) -> IntArray:
    """Return the slots from the root down to `node`, int64, as one array."""
    parts = [step.slots for step in path(node)]
    return np.concatenate(parts[::-1]) if parts else EMPTY


def common_length(key: IntArray, tokens: IntArray, at: int) -> int:
    """Return how far `key` and `tokens[at:]` agree."""
    length: int = min(key.shape[0], tokens.shape[0] - at)
    for start in range(0, length, _CHUNK):
        end = min(start + _CHUNK, length)
        differ = key[start:end] != tokens[at + start : at + end]
        first = int(differ.argmax())
        if differ[first]:
            return start + first
    return length


def check_node(node: Node, locks: int) -> None:
    """Raise `IntegrityError` unless `node` is well linked and has `locks` locks."""
    parent = node.parent
    linked = parent is not None and parent.children.get(int(node.key[0])) is node
    if not linked or node.key.shape != node.slots.shape or node.locks != locks:
        raise IntegrityError(
            f"node {node.serial}: linked {linked}, {node.key.shape[0]} tokens, "
            f"{node.slots.shape[0]} slots, {node.locks} locks where {locks} are held"
        )
    if parent is not None and parent.parent is not None and parent.locks < node.locks:
        raise IntegrityError(f"node {node.serial} has more locks than its parent")
