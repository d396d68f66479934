"""The prefill pass: admit, allocate once for the whole batch, keep prompts in the tree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvdefrag.core.demand import Demand, IntArray, Kind
from kvdefrag.errors import IntegrityError
from kvdefrag.sim.admission import Admission, Extend, Verdict
from kvdefrag.sim.engine_state import EngineState
from kvdefrag.sim.request import Job


class PrefillLaunch(NamedTuple):
    """A prefill that the model computes; `unfinished` is the request it leaves in mid-prompt."""

    demand: Demand
    admission: Admission
    new_rows: tuple[int, ...]
    unfinished: Job | None

    @property
    def rows(self) -> IntArray:
        """Rows of the batch, int64 [n]."""
        return self.demand.rows


class PrefillPass:
    """Runs prefills; the request whose prompt is being computed in chunks is kept here.

    Attributes:
        chunked: That request, or None. It has a row but is in no batch between its chunks.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._last: list[Extend] = []
        self.chunked: Job | None = None

    @property
    def pending(self) -> bool:
        """Whether a prefilled batch has not joined the running one yet."""
        return bool(self._last)

    def settle(self) -> None:
        """Put the latest chunk into the tree and join the last prefill to the running batch."""
        state = self._state
        if self.chunked is not None:
            state.cache.keep_unfinished(self.chunked)
        if self._last:
            kept = [e.job.row for e in self._last if e.job.row and e.job is not self.chunked]
            if len(kept) < len(self._last):
                state.full = False
            if kept:
                no_output = not any(e.job.limit for e in self._last)
                state.merge(kept, prefill_only=no_output and not state.options.spec_window)
            self._last = []
        if state.prefill_only:
            state.filter_finished()
            if not state.running.shape[0]:
                state.full = False

    def launch(self) -> PrefillLaunch | None:
        """Prefill what can be admitted now; None if that is nothing."""
        state = self._state
        if (state.full or not state.waiting) and self.chunked is None:
            return None
        room = state.options.max_running - state.running.shape[0]
        room = min(room, state.rows.free_count)
        if room <= 0 and self.chunked is None:
            state.full = True
            return None
        admission = self._admit(room)
        if not admission.extends:
            return None
        new_rows = tuple(state.rows.take(e.job) for e in admission.extends if not e.job.row)
        demand = self._allocate(admission.extends)
        self._last = admission.extends
        return PrefillLaunch(demand, admission, new_rows, self.chunked)

    def process(self, launch: PrefillLaunch) -> tuple[int, tuple[int, ...]]:
        """Take in what the model computed; returns output tokens and rows that finished.

        The pass yields the first output token of every request whose prompt is complete. One that
        asked for none finishes here too, and its token counts for nothing.
        """
        state = self._state
        finished: list[int] = []
        outputs = 0
        for job, _, _ in launch.admission.extends:
            # With overlap, the pass launched since may have retracted it.
            if job is launch.unfinished or not job.row:
                continue
            outputs += job.limit > 0
            generated = job.generated + 1
            state.rows.generated[job.row] = generated
            if generated >= job.limit:
                finished.append(state.finish(job.row))
            else:
                state.cache.keep_unfinished(job)
        return outputs, tuple(finished)

    def _admit(self, room: int) -> Admission:
        state = self._state
        admission = Admission(
            state.cache.tree,
            state.allocator,
            state.remaining(),
            state.ratio.current,
            state.options,
        )
        if self.chunked is not None:
            start = int(state.rows.protected_len[self.chunked.row])
            admission.continue_chunked(self.chunked, start)
        continued = len(admission.extends)
        for job in state.waiting:
            if len(admission.extends) >= room:
                state.full = True
            if state.full:
                break
            state.cache.match(job)
            verdict = admission.add(job)
            if verdict is not Verdict.CONTINUE:
                state.full = state.full or verdict is Verdict.NO_SLOTS
                break
        for _ in range(len(admission.extends) - continued):
            state.waiting.popleft()
        self.chunked = admission.chunked
        return admission

    def _allocate(self, extends: list[Extend]) -> Demand:
        rows = self._state.rows
        starts = np.array([e.start for e in extends], dtype=np.int64)
        ends = np.array([e.end for e in extends], dtype=np.int64)
        at = np.array([e.job.row for e in extends], dtype=np.int64)
        for extend in extends:
            if not extend.job.end:
                self._state.cache.write_prefix(extend.job)
        demand = Demand(Kind.EXTEND, at, starts, ends - starts)
        slots = self._state.cache.allocate(demand)
        if slots is None:
            raise IntegrityError(
                f"prefill of {demand.total} tokens was admitted, but only "
                f"{self._state.allocator.available_size()} slots are free after eviction"
            )
        taken = 0
        for job, start, end in extends:
            rows.table[job.row, start:end] = slots[taken : taken + end - start]
            taken += end - start
            job.end = end
        rows.committed_len[at] = ends
        rows.allocated_len[at] = ends
        return demand
