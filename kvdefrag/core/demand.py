"""Who asks for slots, and for which token positions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Kind(enum.Enum):
    """What a request for slots is for; placement treats the four differently."""

    PLAIN = "plain"
    EXTEND = "extend"
    DECODE = "decode"
    SPECULATIVE = "speculative"


@dataclass(frozen=True)
class Demand:
    """Slots wanted by several requests at once, in request order.

    Attributes:
        kind: Which of the engine's allocation callers asks.
        rows: int64 [n], table row of each request; distinct.
        starts: int64 [n], token positions already allocated in that row.
        counts: int64 [n], slots wanted for positions `[starts, starts + counts)`; 1 each for
            `DECODE`.
    """

    kind: Kind
    rows: IntArray
    starts: IntArray
    counts: IntArray

    @property
    def total(self) -> int:
        """Slots wanted by all requests together."""
        return int(self.counts.sum())


def ragged(starts: IntArray, counts: IntArray) -> IntArray:
    """Return the numbers of all ranges `[starts, starts + counts)`, one range after the other."""
    ends = counts.cumsum()
    total = int(ends[-1]) if ends.size else 0
    numbers: IntArray = np.repeat(starts - ends + counts, counts) + np.arange(total)
    return numbers
