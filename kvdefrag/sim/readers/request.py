"""One request of a trace, as every reader gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NANOSECONDS = 1_000_000_000

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as the trace states it; whether it fits a pool is not decided here.

    Attributes:
        index: Position in order of arrival, from 0, renumbered by a selection.
        arrival_s: Seconds since the earliest request, at nanosecond resolution.
        input_tokens: Prompt length; 0 is kept as the trace has it.
        output_tokens: Tokens to generate; 0 is kept as the trace has it.
        blocks: Hash ids of the prompt's blocks, exactly as written (-2**63 .. 2**64 - 1), or None
            if the trace does not say what prompts share.
        row: Line in the file, from 1, the header and blank lines counted.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: Blocks | None
    row: int


class Row(NamedTuple):
    """One parsed line: the arrival in whole nanoseconds since an origin that the file chooses."""

    arrival_ns: int
    input_tokens: int
    output_tokens: int
    blocks: Blocks | None
