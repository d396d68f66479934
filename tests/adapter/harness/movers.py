"""Stands between the plugin and its mover: keeps account of every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvdefrag.core.mover import Mover
from kvdefrag.core.plan import MovePlan


class RecordingMover:
    """Copies as the mover inside does.

    Attributes:
        hash: Over the sources and destinations of every plan, in order.
        rows: Rows that were really moved.
        latest: Rows that the latest plan really moved.
    """

    def __init__(self, inner: Mover) -> None:
        self._inner = inner
        self.hash = hashlib.sha256()
        self.rows = self.latest = 0

    @property
    def row_bytes(self) -> int:
        return self._inner.row_bytes

    def copy(self, plan: MovePlan) -> None:
        self.latest = int((plan.src != plan.dst).sum())
        self.rows += self.latest
        self.hash.update(plan.src.numpy().tobytes() + plan.dst.numpy().tobytes())
        self._inner.copy(plan)


@contextmanager
def recording(
    choose: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda buffers: buffers,
) -> Iterator[list[RecordingMover]]:
    """Record what the schedulers made inside move.

    Args:
        choose: Returns the buffers that are moved, of all that should be.
    """
    from kvdefrag.sglang import attachment

    made: list[RecordingMover] = []
    original: Any = attachment._mover

    def recorded(buffers: Sequence[Tensor]) -> RecordingMover:
        made.append(RecordingMover(original(choose(buffers))))
        return made[-1]

    attachment._mover = recorded
    try:
        yield made
    finally:
        attachment._mover = original
