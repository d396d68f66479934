"""Table rows: who has which, and the lengths that go with it."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvdefrag.core.demand import IntArray, ragged
from kvdefrag.errors import ConfigError
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.request import Job


class Rows:
    """The table's rows as a pool, first in first out, with per-row state as arrays.

    A row of a live request names its slots in this order:

        [0, protected)          the prefix tree's (shared)
        [protected, committed)  its own, holding tokens that count
        [committed, allocated)  its own, over-allocated for speculation
        beyond                  the allocator's reservation, then stale numbers

    Attributes:
        table: int32 [rows, width]; shares memory with the tensor given.
        committed_len, allocated_len, protected_len: int64 [rows].
        generated: int64 [rows], output tokens so far.
        limit: int64 [rows], output tokens at which the request finishes.
        request_index, turn: int64 [rows], of the request that has the row.
        generation: int64 [rows], times the row was given out.
        live: bool [rows], whether a request has the row.
    """

    def __init__(self, table: Tensor, options: EngineOptions) -> None:
        need = options.table_shape
        if table.shape[0] < need[0] or table.shape[1] < need[1]:
            raise ConfigError(f"table: {tuple(table.shape)} is too small; it needs {need}")
        rows = table.shape[0]
        self.table: npt.NDArray[np.int32] = table.numpy()
        self.flat = self.table.reshape(-1)
        self.width = table.shape[1]
        self.committed_len = np.zeros(rows, dtype=np.int64)
        self.allocated_len = np.zeros(rows, dtype=np.int64)
        self.protected_len = np.zeros(rows, dtype=np.int64)
        self.generated = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.request_index = np.zeros(rows, dtype=np.int64)
        self.turn = np.zeros(rows, dtype=np.int64)
        self.generation = np.zeros(rows, dtype=np.int64)
        self.live = np.zeros(rows, dtype=np.bool_)
        self.jobs: list[Job | None] = [None] * rows
        self._free = deque(range(1, options.max_running + 1))

    @property
    def free_count(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def job(self, row: int) -> Job:
        """Return the request that has `row`, or had it last."""
        job = self.jobs[row]
        assert job is not None, f"row {row} was never given out"
        return job

    def live_rows(self) -> IntArray:
        """Return the rows that requests have, ascending, int64 [n]."""
        return np.flatnonzero(self.live)

    def take(self, job: Job) -> int:
        """Give `job` the row that has been free for longest."""
        row = self._free.popleft()
        job.row = row
        self.jobs[row] = job
        self.live[row] = True
        self.generation[row] += 1
        self.request_index[row] = job.request.index
        self.turn[row] = job.request.turn
        self.generated[row] = job.generated
        self.limit[row] = job.limit
        self.protected_len[row] = job.matched
        self.committed_len[row] = self.allocated_len[row] = job.matched
        return row

    def give_back(self, job: Job) -> None:
        """Take the row back; its numbers stay readable until it is given out again."""
        self.live[job.row] = False
        self._free.append(job.row)
        job.row = 0

    def slots(self, row: int, start: int, end: int) -> IntArray:
        """Return a copy of `table[row, start:end]` as int64."""
        return self.table[row, start:end].astype(np.int64)

    def write_each(
        self, rows: IntArray, starts: IntArray, counts: IntArray, slots: IntArray
    ) -> None:
        """Write `slots` into positions `[starts, starts + counts)` of `rows`, in order."""
        self.flat[ragged(rows * self.width + starts, counts)] = slots
