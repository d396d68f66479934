"""Records a live server's allocator events into a file, without the scheduler ever waiting."""

from __future__ import annotations

import atexit
import dataclasses
import logging
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.core.events import Cleared, Event, Freed, Header, Moved, Recorder, Resized
from kvdefrag.core.host_event_log import EventWriter
from kvdefrag.core.host_recording import RecordingAllocator, StepRecorder
from kvdefrag.core.view import EngineView
from kvdefrag.sglang.late import Late, LateParts

logger = logging.getLogger(__name__)

MOST_WAITING = 8192
_FLUSH_S = 1.0


class Facts(NamedTuple):
    """What is told of a step beside its rows; as in `events.Step`."""

    time_s: float
    ran: str
    tokens: int
    cached: int
    counts: dict[str, int]


class _Stepped(NamedTuple):
    view: EngineView
    facts: Facts
    prefixes: dict[tuple[int, int, int], Late]


class LiveAllocator(RecordingAllocator):
    """A recording allocator that leaves the waiting for the device to the recorder's thread."""

    @classmethod
    def listen(cls, core: SlotAllocator, recorder: Recorder) -> None:
        """Let an allocator that is in use tell a recorder from now on; no free group is open."""
        # Not an object of its own: others hold this one, and while nobody records it pays nothing.
        core.__class__ = cls
        assert isinstance(core, LiveAllocator)
        core._recorder, core._quiet, core._deferred = recorder, False, []

    def leave(self) -> None:
        """Tell nobody from now on."""
        self.__class__ = SlotAllocator  # type: ignore[assignment]

    def _host(self, slots: Tensor) -> IntArray:
        return cast("IntArray", Late(slots))

    def _record_group(self, freed: list[IntArray]) -> None:
        self._recorder.record(Freed(cast("IntArray", LateParts(cast("list[Late]", freed)))))

    def _record_moves(self, src: Tensor, dst: Tensor) -> None:
        self._recorder.record(Moved(self._host(src), self._host(dst)))


class LiveRecorder:
    """Writes events from a thread of its own; drops and counts them when it cannot keep up.

    A log with a gap cannot be replayed: once an event is dropped, so are all that follow, and
    the log is whole up to there.

    Args:
        path: The file; compressed if its name ends in .gz.
        header: What the events speak of.
        max_bytes: Bound of the text.
        device: Where the table is.
        most_waiting: Events that may wait for the thread.

    Attributes:
        dropped: Events that were dropped.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        max_bytes: int,
        device: torch.device,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._writer = EventWriter(path, header, max_bytes=max_bytes)
        self._log = StepRecorder(self._writer, header.rows)
        self._queue: Queue[Event | _Stepped | None] = Queue(most_waiting)
        self._device = device
        self._generation = np.full(header.rows, -1, dtype=np.int64)
        self._protected = np.zeros(header.rows, dtype=np.int64)
        self.dropped = 0
        self._closed = False
        self._thread = Thread(target=self._run, name="kvdefrag-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def record(self, event: Event) -> None:
        """Pass an event to the thread, or drop it."""
        if isinstance(event, Cleared | Resized):
            # As the log's own rows: generations may start anew.
            self._generation[:] = -1
        self._put(event)

    def step(self, view: EngineView, facts: Facts) -> None:
        """Record that the engine stands between two steps; its table is read now."""
        if self.dropped or self._closed:
            self.dropped += not self._closed
            return
        rows = view.rows
        same = self._generation[rows] == view.generations
        starts = np.where(same, self._protected[rows], 0)
        grown = view.protected > starts
        self._generation[rows], self._protected[rows] = view.generations, view.protected
        news = zip(
            rows[grown].tolist(), starts[grown].tolist(), view.protected[grown].tolist(),
            strict=True,
        )  # fmt: skip
        prefixes = {(row, a, b): Late(view.table[row, a:b]) for row, a, b in news}
        self._put(_Stepped(view, facts, prefixes))

    @property
    def ended(self) -> bool:
        """Whether the file is complete."""
        return not self._thread.is_alive()

    def close(self, *, wait_s: float = 10.0) -> None:
        """End the log with what has been passed on so far."""
        atexit.unregister(self.close)
        self._closed = True
        with suppress(Full):  # without room the thread ends once it has caught up
            self._queue.put_nowait(None)
        self._thread.join(wait_s)

    def _put(self, item: Event | _Stepped) -> None:
        if self.dropped or self._closed:
            self.dropped += not self._closed
            return
        try:
            self._queue.put_nowait(item)
        except Full:
            self.dropped = 1

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._write_next():
                pass
        except Exception:
            self.dropped += 1
            logger.exception("kvdefrag: recording has ended after a fault; serving goes on")
        self._writer.dropped += self.dropped
        self._writer.close()

    def _write_next(self) -> bool:
        try:
            item = self._queue.get(timeout=_FLUSH_S)
        except Empty:
            self._writer.flush()
            return not (self.dropped or self._closed)
        if item is None:
            return False
        if isinstance(item, _Stepped):
            self._write_step(item)
        else:
            self._write_event(item)
        if self._writer.dropped and not self.dropped:
            self.dropped = 1
        return True

    def _write_step(self, stepped: _Stepped) -> None:
        def read(row: int, start: int, end: int) -> IntArray:
            return stepped.prefixes[row, start, end].wait()

        self._log.step(stepped.view, **stepped.facts._asdict(), read=read)

    def _write_event(self, event: Event) -> None:
        there: dict[str, Any] = {
            name: value.wait()
            for name, value in vars(event).items()
            if isinstance(value, Late | LateParts)
        }
        if isinstance(event, Moved):
            real = there["src"] != there["dst"]
            there = {name: slots[real] for name, slots in there.items()}
            if not real.any():
                return
        self._log.record(dataclasses.replace(event, **there))
