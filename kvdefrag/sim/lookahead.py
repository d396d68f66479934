"""Events that a replay has read ahead, and the evictions among them.

A policy that takes whole pages makes more room than the recorded one did: it evicts a little
earlier. What it would evict is what the recorded run evicts next, unless somebody uses that before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvdefrag.core import events as ev
from kvdefrag.core.demand import IntArray
from kvdefrag.core.events import Event

MOST = 2048


class Lookahead:
    """Yields events in order and shows, up to `most` events ahead, what will be freed.

    Args:
        events: The log.
        most: Events to read ahead at most.
    """

    def __init__(self, events: Iterable[Event], *, most: int = MOST) -> None:
        self._source = iter(events)
        self._coming: deque[Event] = deque()
        self._most = most

    def __iter__(self) -> Iterator[Event]:
        while True:
            if self._coming:
                yield self._coming.popleft()
                continue
            event = next(self._source, None)
            if event is None:
                return
            yield event

    def frees(self, used: npt.NDArray[np.bool_]) -> Iterator[IntArray]:
        """Yield the slots that each coming event frees and that nobody uses before.

        Args:
            used: bool [size + 1], slots that somebody uses now; written to.
        """
        for event in self._ahead():
            if isinstance(event, ev.Freed):
                unused = event.slots[~used[event.slots]]
                used[event.slots] = True
                if unused.shape[0]:
                    yield unused
            elif isinstance(event, ev.Allocated | ev.Shared):
                used[event.slots] = True
            elif isinstance(event, ev.Moved | ev.Cleared | ev.Resized | ev.Opened):
                return

    def _ahead(self) -> Iterator[Event]:
        for place in range(self._most):
            if place == len(self._coming):
                event = next(self._source, None)
                if event is None:
                    return
                self._coming.append(event)
            yield self._coming[place]
