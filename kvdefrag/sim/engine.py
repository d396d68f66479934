"""The engine model: SGLang's scheduler over simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.errors import IntegrityError
from kvdefrag.sim.admission import TokenRatio
from kvdefrag.sim.engine_cache import PrefixCache
from kvdefrag.sim.engine_decode import DecodeLaunch, DecodePass
from kvdefrag.sim.engine_prefill import PrefillLaunch, PrefillPass
from kvdefrag.sim.engine_rows import Rows
from kvdefrag.sim.engine_state import EngineState
from kvdefrag.sim.engine_types import (
    AcceptanceSource,
    EngineOptions,
    StepCost,
    StepInfo,
    StepKind,
    Totals,
)
from kvdefrag.sim.radix import RadixTree
from kvdefrag.sim.radix_node import Node
from kvdefrag.sim.request import Job, SimRequest

_NONE: IntArray = np.empty(0, dtype=np.int64)


class Engine:
    """Serves requests step by step, with SGLang 0.5.17's decisions and slot numbers.

    The model is the scheduler at page size 1, overlapped or not, with first come first served,
    prefill before decode, chunked prefill and the radix cache. With a `fifo` allocator every slot
    is the one that SGLang would hand out.

    Requests whose prompt is empty or does not fit pool and context are rejected on arrival; a
    longer output than fits is clipped, as SGLang does. A request for zero tokens is prefilled, as
    every request is, and finishes with that.

    Args:
        options: Sizes and limits.
        allocator: Holds `options.pool_slots` slots, all free.
        table: int32 tensor on the CPU of at least `options.table_shape`.
        requests: In order of arrival; read one ahead.
        cost: Gives a step's duration; a compaction in `before_step` may add to the next one.
        accepted: Accepted lengths, if and only if `options.spec_window` is set.

    Attributes:
        before_step: Called where `get_next_batch_to_run` begins. With overlap the step before is
            in flight then; in this model its writes are done.
        now: Simulated seconds.
        totals: Counts so far.
        rows: Table rows and their lengths.
    """

    def __init__(
        self,
        options: EngineOptions,
        allocator: SlotAllocator,
        table: Tensor,
        requests: Iterator[SimRequest],
        cost: StepCost,
        accepted: AcceptanceSource | None = None,
    ) -> None:
        self.options = options
        self.rows = Rows(table, options)
        self.before_step: Callable[[], None] | None = None
        self.now = 0.0
        self.totals = Totals()
        cache = PrefixCache(allocator, self.rows)
        ratio = TokenRatio(options.conservativeness)
        self._state = EngineState(options, allocator, self.rows, cache, ratio)
        self._prefill = PrefillPass(self._state)
        self._decode = DecodePass(self._state, accepted)
        self._in_flight: PrefillLaunch | DecodeLaunch | None = None
        self._requests = requests
        self._next = next(requests, None)
        self._cost = cost

    @property
    def running(self) -> IntArray:
        """Rows of the running batch in batch order, int64 [n], without those that finished.

        A batch that was just prefilled joins it at the next step; `rows.live_rows()` has it all.
        """
        return self._state.running[self._state.running > 0]

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._state.waiting)

    @property
    def tree(self) -> RadixTree:
        """The prefix tree."""
        return self._state.cache.tree

    @property
    def new_token_ratio(self) -> float:
        """Share of its output that a running request is expected to still need."""
        return self._state.ratio.current

    def locked_nodes(self) -> list[Node]:
        """Return the deepest tree node that each live row has locked, in order of rows."""
        return [self.rows.job(row).node for row in self.rows.live_rows().tolist()]

    def step(self) -> StepInfo | None:
        """Run one pass of the scheduler; None once every request is served.

        Raises:
            IntegrityError: Requests wait, but nothing can run and nothing will arrive.
        """
        for _ in range(3):
            self._receive()
            if self._next is None and self._is_idle():
                return None
            info = self._pass()
            if info is None and self._is_idle():
                info = self._idle()
            if info is not None:
                self.totals.add(info)
                return info
        raise IntegrityError(
            f"{self.waiting} requests wait, {self._state.running.shape[0]} run, and nothing can "
            f"proceed: {self._state.allocator.available_size()} slots free, "
            f"{self.tree.evictable_size} evictable"
        )

    def run(self) -> Totals:
        """Serve every request."""
        while self.step() is not None:
            pass
        return self.totals

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every slot has one owner and all counts agree."""
        self._state.cache.check_integrity()

    def _receive(self) -> None:
        while self._next is not None and self._next.arrival_s <= self.now:
            request, self._next = self._next, next(self._requests, None)
            self.totals.arrived += 1
            if not self.options.fits(request.prompt_len):
                self.totals.rejected += 1
                continue
            limit = self.options.clip_output(request.prompt_len, request.output_len)
            self.totals.clipped += limit < request.output_len
            self._state.waiting.append(Job(request, limit, self.tree.root))

    def _is_idle(self) -> bool:
        state = self._state
        busy = state.waiting or state.running.shape[0] or self._in_flight is not None
        return not (busy or self._prefill.chunked or self._prefill.pending)

    def _pass(self) -> StepInfo | None:
        if self.before_step is not None:
            self.before_step()
        evicted = self._state.cache.evicted
        self._prefill.settle()
        launch = self._prefill.launch() or self._decode.launch()
        done = ran = launch if launch is not None and launch.rows.shape[0] else None
        if self.options.overlap:
            done, self._in_flight = self._in_flight, ran
        if ran is None and done is None and self._is_idle():
            self._state.ratio.reset()
        if launch is None and done is None:
            return None
        outputs, finished = self._process(done)
        info = self._describe(
            launch,
            output_tokens=outputs,
            finished_rows=finished,
            evicted_tokens=self._state.cache.evicted - evicted,
            running=self._state.running.shape[0],
            waiting=self.waiting,
        )
        if ran is not None:
            self.now += self._cost(info)
        return info

    def _process(self, done: PrefillLaunch | DecodeLaunch | None) -> tuple[int, tuple[int, ...]]:
        if done is None:
            return 0, ()
        if isinstance(done, PrefillLaunch):
            return self._prefill.process(done)
        return self._decode.process(done)

    def _idle(self) -> StepInfo | None:
        if self._next is None:
            return None
        start, self.now = self.now, max(self.now, self._next.arrival_s)
        return StepInfo(
            self.totals.steps, StepKind.IDLE, start, _NONE, _NONE, _NONE, idle_s=self.now - start
        )

    def _describe(self, launch: PrefillLaunch | DecodeLaunch | None, **rest: Any) -> StepInfo:
        index, now = self.totals.steps, self.now
        if launch is None:
            return StepInfo(index, StepKind.IDLE, now, _NONE, _NONE, _NONE, **rest)
        if isinstance(launch, PrefillLaunch):
            demand, admission = launch.demand, launch.admission
            return StepInfo(
                index,
                StepKind.PREFILL,
                now,
                launch.rows,
                demand.starts,
                demand.counts,
                hit_tokens=admission.hit_tokens,
                prompt_tokens=admission.prompt_tokens,
                redone_tokens=admission.redone_tokens,
                new_rows=launch.new_rows,
                **rest,
            )
        size = launch.rows.shape[0]
        return StepInfo(
            index,
            StepKind.DECODE if size else StepKind.IDLE,
            now,
            launch.rows,
            launch.starts,
            np.full(size, self.options.spec_window or 1, dtype=np.int64),
            retracted_rows=launch.retracted_rows,
            aborted_rows=launch.aborted_rows,
            **rest,
        )
