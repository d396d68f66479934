"""Read a trace once, from end to end, and keep where each row is instead of the rows.

Thirty-two bytes a row stay in memory (arrival, offset, line number and, until the end, a digest),
so a file of a million rows fits wherever this package does. Every row is checked in this pass: a
trace with a bad row is refused before anything is simulated.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt

from kvdefrag.errors import TraceError
from kvdefrag.sim.readers.request import Row
from kvdefrag.sim.readers.rows import RowParser, decode_line

Int64Array = npt.NDArray[np.int64]

MAX_LINE = 1 << 24
"""Longest line in bytes; a longer one is not a trace, and must not fill the memory."""


@dataclass(frozen=True)
class TraceIndex:
    """Where the rows of a file are, in order of arrival, and what was counted on the way.

    Attributes:
        arrivals: int64 [rows], nanoseconds, ascending; ties keep the order of the file.
        offsets: int64 [rows], byte offset of each line.
        lines: int64 [rows], line numbers from 1.
        sha256: Hex digest of the whole file.
        blank: Lines that hold nothing but blanks.
        unsorted: Rows that arrive earlier than a row before them in the file.
        duplicates: Rows equal to an earlier one in arrival, lengths and blocks.
        zero_inputs, zero_outputs: Rows with an empty prompt, or with nothing to generate.
    """

    arrivals: Int64Array
    offsets: Int64Array
    lines: Int64Array
    sha256: str
    blank: int
    unsorted: int
    duplicates: int
    zero_inputs: int
    zero_outputs: int


class _Collected:
    def __init__(self) -> None:
        self.arrivals = array("q")
        self.offsets = array("q")
        self.lines = array("q")
        self.digests = array("Q")
        self.latest = -(2**63)
        self.unsorted = self.zero_inputs = self.zero_outputs = 0

    def add(self, row: Row, offset: int, line: int) -> None:
        self.arrivals.append(row.arrival_ns)
        self.offsets.append(offset)
        self.lines.append(line)
        self.digests.append(_digest(row))
        self.unsorted += row.arrival_ns < self.latest
        self.latest = max(self.latest, row.arrival_ns)
        self.zero_inputs += row.input_tokens == 0
        self.zero_outputs += row.output_tokens == 0


def build_index(file: IO[bytes], parser: RowParser) -> TraceIndex:
    """Read `file` from its start and return its index; the parser learns the header.

    Raises:
        TraceError: A row is refused, or there is none.
    """
    sha256 = hashlib.sha256()
    found = _Collected()
    header_due = parser.has_header
    offset = number = blank = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise TraceError(f"longer than {MAX_LINE} bytes", row=number)
        sha256.update(line)
        text = decode_line(line, number)
        if not text:
            blank += 1
        elif header_due:
            parser.read_header(text, number)
            header_due = False
        else:
            found.add(parser.parse(text, number), offset, number)
        offset += len(line)
    if not found.arrivals:
        raise TraceError("the trace holds no request")
    return _sorted_index(found, sha256.hexdigest(), blank)


def _sorted_index(found: _Collected, sha256: str, blank: int) -> TraceIndex:
    arrivals = np.frombuffer(found.arrivals, dtype=np.int64)
    offsets = np.frombuffer(found.offsets, dtype=np.int64)
    lines = np.frombuffer(found.lines, dtype=np.int64)
    if found.unsorted:
        order = np.argsort(arrivals, kind="stable")
        arrivals, offsets, lines = arrivals[order], offsets[order], lines[order]
    digests = np.sort(np.frombuffer(found.digests, dtype=np.uint64))
    return TraceIndex(
        arrivals=arrivals,
        offsets=offsets,
        lines=lines,
        sha256=sha256,
        blank=blank,
        unsorted=found.unsorted,
        duplicates=int(np.count_nonzero(digests[1:] == digests[:-1])),
        zero_inputs=found.zero_inputs,
        zero_outputs=found.zero_outputs,
    )


def _digest(row: Row) -> int:
    # 64 bits: among a million rows two different ones collide once in 37 million files.
    return int.from_bytes(hashlib.blake2b(repr(row).encode(), digest_size=8).digest(), "big")
