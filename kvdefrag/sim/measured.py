"""What can be measured: an engine model, or the replay of a recorded engine."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdefrag.core.demand import IntArray
from kvdefrag.sim.engine_types import Totals


class MeasuredRows(Protocol):
    """The table's rows; see `Rows`."""

    @property
    def table(self) -> npt.NDArray[np.int32]: ...

    @property
    def protected_len(self) -> IntArray: ...

    @property
    def allocated_len(self) -> IntArray: ...

    def live_rows(self) -> IntArray: ...


class MeasuredTree(Protocol):
    """The prefix tree, as far as its size goes."""

    @property
    def evictable_size(self) -> int: ...


class Measured(Protocol):
    """The engine; see `Engine`."""

    @property
    def now(self) -> float: ...

    @property
    def totals(self) -> Totals: ...

    @property
    def rows(self) -> MeasuredRows: ...

    @property
    def tree(self) -> MeasuredTree: ...
