"""The engine model: SGLang's scheduler over simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.errors import IntegrityError
from kvdefrag.sim.admission import TokenRatio
from kvdefrag.sim.engine_cache import PrefixCache
from kvdefrag.sim.engine_decode import DecodePass, DecodeResult
from kvdefrag.sim.engine_prefill import PrefillPass, PrefillResult
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

    The model is the scheduler's non-overlapped loop at page size 1, with first come first served,
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
        before_step: Called where `get_next_batch_to_run` begins, with nothing in flight.
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
                self._state.ratio.reset()
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
        busy = state.waiting or state.running.shape[0]
        return not (busy or self._prefill.chunked or self._prefill.pending)

    def _pass(self) -> StepInfo | None:
        if self.before_step is not None:
            self.before_step()
        evicted = self._state.cache.evicted
        self._prefill.settle()
        prefill = self._prefill.run()
        if prefill is not None:
            info = self._prefill_info(prefill, evicted)
        else:
            decode = self._decode.run()
            if decode is None:
                return None
            info = self._decode_info(decode, evicted)
        if info.kind is not StepKind.IDLE:
            self.now += self._cost(info)
        return info

    def _idle(self) -> StepInfo | None:
        if self._next is None:
            return None
        start, self.now = self.now, max(self.now, self._next.arrival_s)
        return StepInfo(
            self.totals.steps, StepKind.IDLE, start, _NONE, _NONE, _NONE, idle_s=self.now - start
        )

    def _prefill_info(self, result: PrefillResult, evicted: int) -> StepInfo:
        demand, admission = result.demand, result.admission
        return StepInfo(
            self.totals.steps,
            StepKind.PREFILL,
            self.now,
            demand.rows,
            demand.starts,
            demand.counts,
            hit_tokens=admission.hit_tokens,
            prompt_tokens=admission.prompt_tokens,
            redone_tokens=admission.redone_tokens,
            output_tokens=result.output_tokens,
            new_rows=result.new_rows,
            finished_rows=result.finished_rows,
            evicted_tokens=self._state.cache.evicted - evicted,
            running=self._state.running.shape[0],
            waiting=self.waiting,
        )

    def _decode_info(self, result: DecodeResult, evicted: int) -> StepInfo:
        ran = result.rows.shape[0] > 0
        return StepInfo(
            self.totals.steps,
            StepKind.DECODE if ran else StepKind.IDLE,
            self.now,
            result.rows,
            result.starts,
            np.full(result.rows.shape[0], self.options.spec_window or 1, dtype=np.int64),
            output_tokens=result.output_tokens,
            finished_rows=result.finished_rows,
            retracted_rows=result.retracted_rows,
            aborted_rows=result.aborted_rows,
            evicted_tokens=self._state.cache.evicted - evicted,
            running=self._state.running.shape[0],
            waiting=self.waiting,
        )
