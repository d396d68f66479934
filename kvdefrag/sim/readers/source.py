"""Open a trace and stream its requests in order of arrival, as often as wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvdefrag.data import CONVERSATION_TRACE, open_data
from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.sim.readers.formats import Columns, declare
from kvdefrag.sim.readers.index import MAX_LINE, TraceIndex, build_index
from kvdefrag.sim.readers.request import NANOSECONDS, TraceRequest
from kvdefrag.sim.readers.rows import RowParser, decode_line, row_parser


class TraceSource:
    """A checked trace; iterating reads its file again, so it can be iterated once per arm.

    Attributes:
        name: File name, without its folder.
        format: Name of the format it was read with.
        block: Tokens per hash id.
        sha256: Hex digest of the file's bytes.
        rows: Requests in the file.
        unsorted: Rows that stand behind a row with a later arrival; they are sorted, ties stable.
        duplicates: Rows equal to an earlier one; they are kept.
        blank: Blank lines; they are skipped.
        zero_inputs, zero_outputs: Rows with an empty prompt or nothing to generate; kept.
    """

    def __init__(
        self,
        name: str,
        format: str,
        block: int,
        *,
        open_file: Callable[[], IO[bytes]],
        parser: RowParser,
        index: TraceIndex,
    ) -> None:
        self.name = name
        self.format = format
        self.block = block
        self.sha256 = index.sha256
        self.rows = len(index.arrivals)
        self.unsorted = index.unsorted
        self.duplicates = index.duplicates
        self.blank = index.blank
        self.zero_inputs = index.zero_inputs
        self.zero_outputs = index.zero_outputs
        self._open_file = open_file
        self._parser = parser
        self._index = index

    def __len__(self) -> int:
        return self.rows

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return int(self._index.arrivals[-1] - self._index.arrivals[0]) / NANOSECONDS

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests by arrival, reading one line at a time.

        Raises:
            TraceError: The file has changed since it was opened.
        """
        index = self._index
        first = int(index.arrivals[0])
        with self._open_file() as file:
            position = 0
            for number in range(self.rows):
                offset, line_number = int(index.offsets[number]), int(index.lines[number])
                if offset != position:
                    file.seek(offset)
                line = file.readline(MAX_LINE)
                position = offset + len(line)
                row = self._parser.parse(decode_line(line, line_number), line_number)
                if row.arrival_ns != index.arrivals[number]:
                    raise TraceError("the file has changed while it was read", row=line_number)
                yield TraceRequest(
                    index=number,
                    arrival_s=(row.arrival_ns - first) / NANOSECONDS,
                    input_tokens=row.input_tokens,
                    output_tokens=row.output_tokens,
                    blocks=row.blocks,
                    row=line_number,
                )


def open_trace(
    path: str | Path | None = None,
    format: str = "mooncake",
    *,
    block: int = 512,
    columns: Columns | None = None,
    unit: str | None = None,
) -> TraceSource:
    """Check a whole trace and return a source to stream it from.

    Args:
        path: The file, which must be seekable; None for the slice shipped with the package.
        format: mooncake, azure, vidur, csv or jsonl. A date without an offset is taken as UTC.
        block: Tokens that one hash id stands for; the last id of a prompt may stand for fewer.
        columns: What csv or jsonl call the fields; required there.
        unit: Unit of the arrivals in csv or jsonl: s, ms, us, ns or iso; required there.

    Raises:
        ConfigError: A declaration is missing or wrong; names the option.
        TraceError: The file cannot be read, holds no request, or a row is refused; names the row
            and the field.
    """
    if block < 1:
        raise ConfigError(f"--block {block} must be at least 1")
    if path is None and format != "mooncake":
        raise ConfigError(f"--format {format} needs --trace: the embedded slice is mooncake")
    parser = row_parser(declare(format, columns=columns, unit=unit), block)
    name = CONVERSATION_TRACE if path is None else Path(path).name

    def open_file() -> IO[bytes]:
        return open_data(CONVERSATION_TRACE) if path is None else Path(path).open("rb")

    try:
        with open_file() as file:
            index = build_index(file, parser)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    return TraceSource(name, format, block, open_file=open_file, parser=parser, index=index)
