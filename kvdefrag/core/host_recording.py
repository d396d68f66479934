"""Records what an allocator is asked and gives, and how the rows stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import Demand, IntArray, Kind
from kvdefrag.core.events import (
    Allocated,
    Cleared,
    Freed,
    Moved,
    Recorder,
    Refused,
    Released,
    Resized,
    Shared,
    Step,
)
from kvdefrag.core.logged_rows import LoggedRows
from kvdefrag.core.view import EngineView

_NOBODY: IntArray = np.empty(0, dtype=np.int64)
ReadRow = Callable[[int, int, int], IntArray]


class RecordingAllocator(SlotAllocator):
    """A `SlotAllocator` that tells a recorder what it was asked and what it gave.

    For tables on the CPU, unless `_host` and what follows it are written anew.

    Args:
        size: Number of slots.
        recorder: Told of everything from the first allocation on.
        options: As for `SlotAllocator`.
    """

    def __init__(self, size: int, *, recorder: Recorder, **options: Any) -> None:
        super().__init__(size, **options)
        self._recorder = recorder
        self._quiet = False
        self._deferred: list[IntArray] = []

    def alloc(self, count: int) -> Tensor | None:
        slots = super().alloc(count)
        if slots is not None and count:
            none = Demand(Kind.PLAIN, _NOBODY, _NOBODY, _NOBODY)
            self._recorder.record(self._allocated(none, slots))
        return slots

    def alloc_for(self, demand: Demand) -> Tensor | None:
        slots = super().alloc_for(demand)
        if slots is None:
            self._recorder.record(Refused(demand.kind, demand.rows, demand.starts, demand.counts))
        else:
            self._recorder.record(self._allocated(demand, slots))
        return slots

    def free(self, slots: Tensor) -> None:
        if not self._quiet and slots.shape[0]:
            named = self._host(slots)
            if self.in_free_group:
                self._deferred.append(named)
            else:
                self._recorder.record(Freed(named))
        super().free(slots)

    def free_group_end(self) -> None:
        deferred, self._deferred = self._deferred, []
        if deferred:
            self._record_group(deferred)
        with self._silence():
            super().free_group_end()

    def release(self, row: int, length: int) -> None:
        self._recorder.record(Released(row, length))
        with self._silence():
            super().release(row, length)

    def clear(self) -> None:
        if not self._quiet:
            self._recorder.record(Cleared())
        self._deferred = []
        super().clear()

    def resize(self, size: int) -> None:
        self._recorder.record(Resized(size))
        with self._silence():
            super().resize(size)

    def commit_moves(self, src: Tensor, dst: Tensor) -> None:
        self._record_moves(src, dst)
        super().commit_moves(src, dst)

    def _host(self, slots: Tensor) -> IntArray:
        # A copy: the engine may reuse the array, the allocator the storage.
        named: IntArray = slots.long().numpy().copy()
        return named

    def _record_group(self, freed: list[IntArray]) -> None:
        self._recorder.record(Freed(np.concatenate(freed)))

    def _record_moves(self, src: Tensor, dst: Tensor) -> None:
        real = src != dst
        if real.any():
            self._recorder.record(Moved(src[real].numpy(), dst[real].numpy()))

    def _allocated(self, demand: Demand, slots: Tensor) -> Allocated:
        rows, starts, counts = demand.rows.copy(), demand.starts.copy(), demand.counts.copy()
        return Allocated(demand.kind, rows, starts, counts, self._host(slots))

    @contextmanager
    def _silence(self) -> Iterator[None]:
        # The base class frees through its own methods: that is told already.
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False


class _Piece(NamedTuple):
    start: int
    slots: IntArray


class StepRecorder:
    """Records the state of the rows between two steps, as far as it is news.

    It is told of all other events on their way to the log, so it knows what a reader knows.

    Args:
        log: Where events go.
        rows: Rows of the table.
    """

    def __init__(self, log: Recorder, rows: int) -> None:
        self._log = log
        self._known = LoggedRows(rows)
        self._pieces: dict[int, list[_Piece]] = {}
        self._counts: dict[str, int] = {}

    def record(self, event: Any) -> None:
        """Pass an event on."""
        if isinstance(event, Allocated):
            self._known.allocated(event)
            if event.kind is Kind.EXTEND:
                self._remember(event)
        elif isinstance(event, Released):
            self._pieces.pop(event.row, None)
        elif isinstance(event, Moved | Cleared | Resized):
            self._pieces.clear()
            if not isinstance(event, Moved):
                self._known.forget()
        self._log.record(event)

    def step(
        self,
        view: EngineView,
        *,
        time_s: float,
        ran: str,
        tokens: int,
        cached: int,
        counts: Mapping[str, int],
        read: ReadRow | None = None,
    ) -> None:
        """Record that the engine stands between two steps; arguments as for `Step`.

        Args:
            read: Returns the slots of a row from one position to another; by default they are
                read from the view's table, on the CPU.
        """
        read = read or _reader(view)
        for row, start, end in self._prefixes(view):
            for shared in self._unknown(read(row, start, end), row, start, end):
                self._log.record(shared)
        new = self._known.news(view)
        event = Step(
            step=view.step,
            time_s=time_s,
            ran=ran,
            tokens=tokens,
            cached=cached,
            rows=view.rows[new],
            generations=view.generations[new],
            protected=view.protected[new],
            committed=view.committed[new],
            allocated=view.allocated[new],
            left=self._known.gone(view),
            counts={k: v for k, v in counts.items() if self._counts.get(k, 0) != v},
        )
        self._counts.update(event.counts)
        self._known.stepped(event)
        self._log.record(event)

    def _remember(self, event: Allocated) -> None:
        ends = np.cumsum(event.counts)
        for row, start, end, count in zip(
            event.rows.tolist(), event.starts.tolist(), ends.tolist(), event.counts.tolist(),
            strict=True,
        ):  # fmt: skip
            piece = _Piece(start, event.slots[end - count : end])
            self._pieces.setdefault(row, []).append(piece)

    def _prefixes(self, view: EngineView) -> Iterator[tuple[int, int, int]]:
        # Positions whose slots the tree has come to own since the step before.
        same = self._known.generation[view.rows] == view.generations
        starts = np.where(same, self._known.protected_len[view.rows], 0)
        grown = view.protected > starts
        yield from zip(
            view.rows[grown].tolist(),
            starts[grown].tolist(),
            view.protected[grown].tolist(),
            strict=True,
        )

    def _unknown(self, slots: IntArray, row: int, start: int, end: int) -> Iterator[Shared]:
        # What the row names there that its own allocations do not tell.
        told = np.zeros(end - start, dtype=np.int64)
        for piece in self._pieces.get(row, ()):
            low, high = max(start, piece.start), min(end, piece.start + piece.slots.shape[0])
            if low < high:
                told[low - start : high - start] = piece.slots[low - piece.start :][: high - low]
        left = [p for p in self._pieces.get(row, ()) if p.start + p.slots.shape[0] > end]
        self._pieces[row] = left
        differ = np.flatnonzero(slots != told)
        for part in np.split(differ, np.flatnonzero(np.diff(differ) != 1) + 1):
            if part.shape[0]:
                first, last = int(part[0]), int(part[-1]) + 1
                yield Shared(row, start + first, slots[first:last])


def _reader(view: EngineView) -> ReadRow:
    table = view.table.numpy()

    def read(row: int, start: int, end: int) -> IntArray:
        slots: IntArray = table[row, start:end].astype(np.int64)
        return slots

    return read
