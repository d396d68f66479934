"""The prefill pass: admit, allocate once for the whole batch, keep prompts in the tree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvdefrag.core.demand import Demand, Kind
from kvdefrag.errors import IntegrityError
from kvdefrag.sim.admission import Admission, Extend, Verdict
from kvdefrag.sim.engine_state import EngineState
from kvdefrag.sim.request import Job


class PrefillResult(NamedTuple):
    """What a prefill pass did."""

    demand: Demand
    admission: Admission
    new_rows: tuple[int, ...]
    finished_rows: tuple[int, ...]
    output_tokens: int


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
                state.merge(kept)
            self._last = []

    def run(self) -> PrefillResult | None:
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
        return self._process(demand, admission, new_rows)

    def _admit(self, room: int) -> Admission:
        state = self._state
        rows = state.rows
        admission = Admission(
            state.cache.tree,
            state.allocator,
            state.remaining(),
            state.ratio.current,
            state.options,
        )
        if self.chunked is not None:
            start = int(rows.protected_len[self.chunked.row])
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

    def _process(
        self, demand: Demand, admission: Admission, new_rows: tuple[int, ...]
    ) -> PrefillResult:
        # The pass yields the first output token of every request whose prompt is complete. One
        # that asked for none finishes here too, and its token counts for nothing.
        state = self._state
        finished: list[int] = []
        outputs = 0
        for job, _, _ in admission.extends:
            if job is self.chunked:
                continue
            outputs += job.limit > 0
            generated = job.generated + 1
            state.rows.generated[job.row] = generated
            if generated >= job.limit:
                finished.append(job.row)
                state.cache.leave(job, keep=True)
            else:
                state.cache.keep_unfinished(job)
        return PrefillResult(demand, admission, new_rows, tuple(finished), outputs)
