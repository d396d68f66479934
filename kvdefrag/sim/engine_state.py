"""What the passes of one scheduler share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.sim.admission import TokenRatio
from kvdefrag.sim.engine_cache import PrefixCache
from kvdefrag.sim.engine_rows import Rows
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.request import Job


@dataclass(eq=False)
class EngineState:
    """The running batch, the queue, and what they draw on.

    Attributes:
        running: int64 [n], rows of the running batch in batch order, never written in place.
            Requests that finished stay in it until the next decode pass filters them, as row 0,
            and count as running until then.
        full: Whether prefill waits until the batch has shrunk.
        prefill_only: Whether all of `running` want no output, and so did what was prefilled with
            them; such a batch does not decode.
        waiting: Requests in the queue; retracted ones join its end.
    """

    options: EngineOptions
    allocator: SlotAllocator
    rows: Rows
    cache: PrefixCache
    ratio: TokenRatio
    running: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    full: bool = False
    prefill_only: bool = False
    waiting: deque[Job] = field(default_factory=deque)
    _left: dict[int, int] = field(default_factory=dict)

    def remaining(self) -> IntArray:
        """Return the output tokens that each of `running` has left, int64 [n].

        A verification may have given a finished one more than it was to have: less than 0.
        """
        left = self.rows.limit[self.running] - self.rows.generated[self.running]
        for at, value in self._left.items():
            left[at] = value
        return left

    def finish(self, row: int) -> int:
        """Let the request in `row`, which has all its tokens, leave it; returns the row."""
        places = np.flatnonzero(self.running == row)
        if places.shape[0]:
            self.running = self.running.copy()
            self.running[places] = 0
            self._left[int(places[0])] = int(self.rows.limit[row] - self.rows.generated[row])
        self.cache.leave(self.rows.job(row), keep=True)
        return row

    def merge(self, rows: list[int], *, prefill_only: bool) -> None:
        """Append a prefilled batch to the running one."""
        if self.running.shape[0] == 0:
            self.full = False
            self.prefill_only = prefill_only
        self.running = np.concatenate([self.running, np.array(rows, dtype=np.int64)])
        self.prefill_only = self.prefill_only and prefill_only

    def filter_finished(self) -> None:
        """Drop finished requests from the running batch; the order stays."""
        if self._left:
            self.running = self.running[self.running > 0]
            self._left = {}
