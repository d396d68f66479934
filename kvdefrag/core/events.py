"""What happens to slots, in words that any allocator can be asked to repeat.

A log of these events says who wanted slots for which token positions, and which slots the
recorded run gave. Another allocator that is asked the same gives other slots; a replay keeps the
map from the recorded ones to its own. Slots reserved ahead of need are a matter of the recorded
policy and in no event: to the log they are free.

Arrays are int64 on the host. Numbers of table rows and token positions are the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvdefrag.core.demand import Demand, IntArray, Kind

VERSION = 1


def _none() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Header:
    """The pool and the table that the events speak of.

    Attributes:
        size: Slots 1..size.
        page: Slots to an aligned page in the recorded run.
        rows, context: Shape of the engine's table: rows, and token positions of each.
        window: Draft tokens verified per request and step; 0 without speculation.
        evicts_for_pages: Whether the recorded run evicted for whole pages, so that its evictions
            are enough for an arm that does.
        policy: Name of the policy that the recorded run followed.
        kvdefrag: Version that wrote the log.
    """

    size: int
    page: int
    rows: int
    context: int
    window: int
    evicts_for_pages: bool
    policy: str
    kvdefrag: str


@dataclass(frozen=True, eq=False)
class Opened:
    """The log begins on a pool in use: `free` [n] are its free slots in list order, all of them.

    The rows that live then follow as `Shared`, with all their slots, and `Step`.
    """

    free: IntArray


@dataclass(frozen=True, eq=False)
class Allocated:
    """A demand (see `Demand`) was met with `slots` [sum(counts)], in request order.

    Of kind PLAIN nobody is known who asked: `rows`, `starts` and `counts` are empty then.
    """

    kind: Kind
    rows: IntArray
    starts: IntArray
    counts: IntArray
    slots: IntArray

    @property
    def demand(self) -> Demand:
        """What was asked for."""
        return Demand(self.kind, self.rows, self.starts, self.counts)


@dataclass(frozen=True, eq=False)
class Refused:
    """A demand could not be met, not even with what other rows had reserved."""

    kind: Kind
    rows: IntArray
    starts: IntArray
    counts: IntArray

    @property
    def demand(self) -> Demand:
        """What was asked for."""
        return Demand(self.kind, self.rows, self.starts, self.counts)


@dataclass(frozen=True, eq=False)
class Freed:
    """`slots` [n] were freed in one call."""

    slots: IntArray


@dataclass(frozen=True, eq=False)
class Shared:
    """From position `start` on, `row` names `slots` [n], which were handed out before.

    Told at the next `Step`: slots of a shared prefix, or the prefix tree's in place of duplicates.
    """

    row: int
    start: int
    slots: IntArray


@dataclass(frozen=True, eq=False)
class Moved:
    """The recorded run relocated rows from `src` [n] to `dst` [n]: the slots' names change."""

    src: IntArray
    dst: IntArray


@dataclass(frozen=True, eq=False)
class Released:
    """A request left `row`, where `length` positions had slots on the engine's account."""

    row: int
    length: int


@dataclass(frozen=True, eq=False)
class Step:
    """The engine stands between two steps, where relocation may run.

    Arrays list only the rows that are new or of which the events so far say something else; see
    `LoggedRows`.

    Attributes:
        step: Number of the step to come.
        time_s: The engine's clock in seconds.
        ran: What the step before this one launched: `prefill`, `decode` or nothing.
        tokens: Prompt tokens it computed, or tokens that its decoding read and wrote.
        cached: Slots that only the prefix tree holds.
        rows, generations, protected, committed, allocated: [n], as in `EngineView`.
        left: Rows that no request has any more.
        counts: Counters of the engine since its start, those that changed.
    """

    step: int
    time_s: float
    ran: str = ""
    tokens: int = 0
    cached: int = 0
    rows: IntArray = field(default_factory=_none)
    generations: IntArray = field(default_factory=_none)
    protected: IntArray = field(default_factory=_none)
    committed: IntArray = field(default_factory=_none)
    allocated: IntArray = field(default_factory=_none)
    left: IntArray = field(default_factory=_none)
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cleared:
    """Every slot became free at once."""


@dataclass(frozen=True)
class Resized:
    """The pool holds slots 1..size from now on, all free."""

    size: int


@dataclass(frozen=True)
class Ended:
    """The log ends; `dropped` events did not find room in it."""

    dropped: int


Event = (
    Opened
    | Allocated
    | Refused
    | Freed
    | Shared
    | Moved
    | Released
    | Step
    | Cleared
    | Resized
    | Ended
)


class Recorder(Protocol):
    """Takes events as they happen; must not make the engine wait."""

    def record(self, event: Event) -> None:
        """Keep an event, or drop it and all that follow."""
        ...
