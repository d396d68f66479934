"""The decode pass: one allocation across the batch, retraction when it cannot be had."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvdefrag.core.demand import Demand, IntArray, Kind
from kvdefrag.errors import ConfigError
from kvdefrag.sim.engine_state import EngineState
from kvdefrag.sim.engine_types import AcceptanceSource

RETRACT_STEPS = 20
"""Decode steps for which a retraction makes room, per request that stays."""
_NONE: IntArray = np.empty(0, dtype=np.int64)


class DecodeLaunch(NamedTuple):
    """A decode step that the model computes; `rows` is empty if retraction left nobody.

    `generations` tells whether a row still has the request that it had at launch.
    """

    rows: IntArray
    starts: IntArray
    generations: IntArray
    retracted_rows: tuple[int, ...]
    aborted_rows: tuple[int, ...]


class DecodePass:
    """Runs decode steps, plain or speculative.

    With a window W a request's row holds slots for `committed + 2 W` tokens before each step, as
    in SGLang (its reserve is twice the window, to bridge the overlap of two steps). What a
    verification rejects stays in the row and is used by the next one.
    """

    def __init__(self, state: EngineState, accepted: AcceptanceSource | None) -> None:
        if (state.options.spec_window > 0) != (accepted is not None):
            raise ConfigError(
                f"spec_window {state.options.spec_window} and accepted lengths "
                f"{'given' if accepted else 'missing'} do not go together"
            )
        self._state = state
        self._accepted = accepted
        self._window = state.options.spec_window
        self._ones = np.ones(state.options.max_running, dtype=np.int64)

    def launch(self) -> DecodeLaunch | None:
        """Decode one step of the running batch; None if nobody is running."""
        state = self._state
        before = state.running.shape[0]
        if not before or state.prefill_only:
            return None
        state.filter_finished()
        if not state.running.shape[0]:
            state.full = False
            return None
        demand = self._demand(state.running)
        slots = state.cache.allocate(demand)
        retracted: list[int] = []
        aborted: list[int] = []
        if slots is None:
            demand, slots = self._retract(retracted, aborted)
        else:
            state.ratio.decay()
        if state.running.shape[0] < before:
            state.full = False
        starts = self._write(demand, slots)
        generations = state.rows.generation[demand.rows]
        return DecodeLaunch(demand.rows, starts, generations, tuple(retracted), tuple(aborted))

    def process(self, launch: DecodeLaunch) -> tuple[int, tuple[int, ...]]:
        """Take in what the model computed; returns output tokens and rows that finished.

        Requests that have left their rows since the launch are passed over.
        """
        rows, batch = self._state.rows, launch.rows
        there = rows.live[batch] & (rows.generation[batch] == launch.generations)
        if not there.all():
            batch = batch[there]
        left = rows.limit[batch] - rows.generated[batch]
        if self._accepted is None:
            kept = self._ones[: batch.shape[0]]
        else:
            kept = self._accepted.draw(rows.turn[batch])
            rows.committed_len[batch] += kept
        rows.generated[batch] += kept
        # The last verification may keep more than was asked for; that is not output.
        outputs = int(np.minimum(kept, left).sum())
        ended = batch[left <= kept].tolist()
        if not ended:
            return outputs, ()
        self._state.allocator.free_group_begin()
        finished = tuple(self._state.finish(row) for row in ended)
        self._state.allocator.free_group_end()
        return outputs, finished

    def _demand(self, batch: IntArray) -> Demand:
        rows = self._state.rows
        allocated = rows.allocated_len[batch]
        if not self._window:
            return Demand(Kind.DECODE, batch, allocated, self._ones[: batch.shape[0]])
        wanted = rows.committed_len[batch] + 2 * self._window
        return Demand(Kind.SPECULATIVE, batch, allocated, np.maximum(wanted - allocated, 0))

    def _write(self, demand: Demand, slots: IntArray) -> IntArray:
        rows, batch = self._state.rows, demand.rows
        starts = rows.committed_len[batch]
        if self._window:
            rows.write_each(batch, demand.starts, demand.counts, slots)
            rows.allocated_len[batch] = demand.starts + demand.counts
        else:
            rows.table[batch, starts] = slots
            rows.committed_len[batch] = rows.allocated_len[batch] = starts + 1
        return starts

    def _retract(self, retracted: list[int], aborted: list[int]) -> tuple[Demand, IntArray]:
        # Those with the fewest output tokens go first, of these the longest prompt; the batch
        # comes out in this order, as in SGLang.
        state = self._state
        keep = self._retraction_order()
        slots: IntArray | None = None
        while slots is None and len(keep) > 1:
            retracted.append(keep.pop())
            self._give_up(retracted[-1], staying=len(keep), requeue=True)
            slots = state.cache.allocate(self._demand(np.array(keep, dtype=np.int64)))
        if slots is None:
            aborted.append(keep.pop())
            self._give_up(aborted[0], staying=0, requeue=False)
            slots = _NONE
        state.running = np.array(keep, dtype=np.int64)
        limits = state.rows.limit[state.running]
        state.ratio.estimate(state.rows.generated[state.running], limits, RETRACT_STEPS)
        return self._demand(state.running), slots

    def _retraction_order(self) -> list[int]:
        rows = self._state.rows
        return sorted(
            self._state.running.tolist(),
            key=lambda row: (int(rows.generated[row]), -rows.job(row).request.prompt_len),
            reverse=True,
        )

    def _give_up(self, row: int, *, staying: int, requeue: bool) -> None:
        state = self._state
        job = state.rows.job(row)
        job.generated = int(state.rows.generated[row])
        job.retracted = True
        job.end = 0
        state.cache.leave(job, keep=False)
        state.cache.make_room(staying * RETRACT_STEPS)
        if requeue:
            state.waiting.append(job)
