"""Logs of events: files of one JSON object a line, written up to a bound and read as a stream."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import numpy as np

from kvdefrag.core.demand import IntArray
from kvdefrag.core.events import (
    Allocated,
    Ended,
    Event,
    Header,
    Refused,
    Released,
    Resized,
    Shared,
    Step,
)
from kvdefrag.core.host_event_codec import read_event, read_header, write_event, write_header
from kvdefrag.errors import ConfigError, TraceError

MOST_BYTES = 4 << 30
_BUFFER = 1 << 20


class EventWriter:
    """Writes events into a file, at most `max_bytes` of text; what comes after is counted.

    Writing fills a buffer of 1 MiB and leaves the rest to the operating system.

    Args:
        path: The file; compressed if its name ends in .gz.
        header: What the events speak of.
        max_bytes: Bound of the text, before compression.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path, header: Header, *, max_bytes: int = MOST_BYTES) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path, "wb")
        except OSError as error:
            raise ConfigError(f"record: {path} cannot be written: {error.strerror}") from error
        self.dropped = 0
        self._left = max_bytes
        self._write(write_header(header))

    def record(self, event: Event) -> None:
        """Write an event; once one does not fit, none is written any more."""
        line = "" if self.dropped else write_event(event)
        if self.dropped or len(line) > self._left:
            self.dropped += 1
        else:
            self._write(line)

    def flush(self) -> None:
        """Hand what is buffered to the operating system; a compressed log keeps some of it."""
        self._file.flush()

    def close(self) -> None:
        """Write the closing line and close the file."""
        if not self._file.closed:
            self._write(write_event(Ended(self.dropped)))
            self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: str) -> None:
        # All text is ASCII, so characters are bytes.
        self._left -= len(line)
        self._file.write(line.encode("ascii"))


class EventLog:
    """Reads a log; iterating yields its events one by one, each time from the beginning.

    Args:
        path: The file; decompressed if its name ends in .gz.

    Attributes:
        header: What the events speak of.
        line: Number of the line read last.
        position: Bytes of text read so far.
        cut: Why the log is not whole, in words; None if it is. Known once it has been read.

    Raises:
        TraceError: The file cannot be read or a line is wrong; names the line and the field.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.line = self.position = 0
        self.cut: str | None = None
        with self._opened() as file:
            self.header = read_header(next(self._lines(file), b""))

    def __iter__(self) -> Iterator[Event]:
        size = self.header.size
        self.line, self.position, self.cut = 0, 0, "the log has no closing line"
        with self._opened() as file:
            for text in self._lines(file):
                self.line, self.position = self.line + 1, self.position + len(text)
                if self.line == 1:
                    continue
                if not text.endswith(b"\n"):
                    self.cut = f"the log breaks off in line {self.line}"
                    return
                event = read_event(text, self.line, size)
                if isinstance(event, Ended):
                    self.cut = f"{event.dropped} events found no room" if event.dropped else None
                    return
                if isinstance(event, Resized):
                    size = event.size
                self._check(event)
                yield event

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        try:
            yield from file
        except EOFError:
            self.cut = f"the compressed log breaks off after line {self.line}"
        except OSError as error:
            raise TraceError(f"cannot read {self._path}: {error}") from error

    def _opened(self) -> IO[bytes]:
        try:
            return _open(self._path, "rb")
        except OSError as error:
            raise TraceError(f"cannot read {self._path}: {error.strerror}") from error

    def _check(self, event: Event) -> None:
        header = self.header
        for name, rows in _rows_of(event):
            if rows.shape[0] and int(rows.max()) >= header.rows:
                row = int(rows.max())
                raise self._wrong(name, f"row {row} is not in 0..{header.rows - 1}")
        for name, ends in _ends_of(event):
            if ends.shape[0] and int(ends.max()) > header.context:
                raise self._wrong(
                    name, f"position {int(ends.max())} is beyond the context of {header.context}"
                )

    def _wrong(self, name: str, message: str) -> TraceError:
        return TraceError(message, row=self.line, field=name)


def _open(path: Path, mode: str) -> IO[bytes]:
    if path.suffix == ".gz":
        # A fixed time stamp: equal runs give equal bytes.
        return cast("IO[bytes]", gzip.GzipFile(path, mode, compresslevel=3, mtime=0))
    return cast("IO[bytes]", path.open(mode, buffering=_BUFFER))


def _rows_of(event: Event) -> Iterator[tuple[str, IntArray]]:
    if isinstance(event, Allocated | Refused):
        yield "rows", event.rows
    elif isinstance(event, Step):
        yield "rows", event.rows
        yield "left", event.left
    elif isinstance(event, Shared | Released):
        yield "row", np.array([event.row], dtype=np.int64)


def _ends_of(event: Event) -> Iterator[tuple[str, IntArray]]:
    if isinstance(event, Allocated | Refused):
        yield "counts", event.starts + event.counts
    elif isinstance(event, Step):
        yield "committed", event.committed
        yield "protected", event.protected
        yield "allocated", event.allocated
    elif isinstance(event, Shared):
        yield "slots", np.array([event.start + event.slots.shape[0]], dtype=np.int64)
    elif isinstance(event, Released):
        yield "length", np.array([event.length], dtype=np.int64)
