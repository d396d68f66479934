"""Who holds table rows, found in one pass over a scheduler's requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvdefrag.sglang.compat import Compat, KvLengths, requests_of


class Census(NamedTuple):
    """Holders of rows, each row once.

    Attributes:
        holders: Row and lengths of each, its request, and for a session between two turns, which
            has no request, the deepest tree node that it has locked.
        at_work: Requests that run or wait; sessions between turns do neither.
        beams: Whether a group of beams runs: its rows share slots that no request names.
    """

    holders: list[tuple[KvLengths, Any, Any]]
    at_work: int
    beams: bool

    def end_nodes(self, names: Compat) -> Iterator[Any]:
        """Yield the deepest locked tree node of each holder, or None."""
        for _, request, node in self.holders:
            yield node if request is None else names.end_node(request)


def census(scheduler: Any, names: Compat) -> Census:
    """Return everybody who holds a row."""
    lengths_of = names.lengths
    found: dict[int, tuple[KvLengths, Any, Any]] = {}
    running, beams = 0, False
    for request in requests_of(scheduler):
        beams = beams or getattr(request, "beam_group", None) is not None
        held = lengths_of(request)
        if held is not None:
            running += 1
            found[held[0]] = held, request, None
    for held, node in names.sessions(scheduler.tree_cache):
        found.setdefault(held[0], (held, None, node))
    return Census(list(found.values()), running + len(scheduler.waiting_queue), beams)


def owners_of(scheduler: Any, names: Compat) -> list[tuple[KvLengths, Any]]:
    """Return row, lengths and deepest locked node of everybody who holds a row, each row once."""
    found = census(scheduler, names)
    lengths = [held for held, _, _ in found.holders]
    return list(zip(lengths, found.end_nodes(names), strict=True))
