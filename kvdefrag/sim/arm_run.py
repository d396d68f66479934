"""Runs one arm: the engine model, the allocator and the defragmenter of one policy."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from kvdefrag.core.mover import CountingMover
from kvdefrag.core.view import EngineView
from kvdefrag.profiles import profile_or_default
from kvdefrag.sim.arm_setup import make_allocator, make_defragmenter, relocates, tracker_of
from kvdefrag.sim.arms import Arm
from kvdefrag.sim.cost import StepTimer
from kvdefrag.sim.engine import Engine
from kvdefrag.sim.engine_types import StepInfo, StepKind
from kvdefrag.sim.meter import Meter
from kvdefrag.sim.options import RunOptions
from kvdefrag.sim.recording import Recording
from kvdefrag.sim.request import sim_requests
from kvdefrag.sim.results import ArmResult, Slice
from kvdefrag.sim.speculation import AcceptedLengths, load_eagle_mtbench
from kvdefrag.sim.workload import Workload

Progress = Callable[[int], None]


class ArmRun:
    """One arm from the first arrival to the last token.

    Args:
        arm: The policy.
        options: The run's.
    """

    def __init__(self, arm: Arm, options: RunOptions) -> None:
        self._arm, self._options = arm, options
        speculates = options.engine.spec_window > 0
        profile = profile_or_default(options.profile)
        self._timer = StepTimer(profile, verify=speculates)
        self._row_bytes = profile.bytes_per_slot
        table = torch.zeros(options.engine.table_shape, dtype=torch.int32)
        self._recording = Recording(options.record, arm, options.engine) if options.record else None
        log = self._recording.steps if self._recording else None
        self.allocator = make_allocator(arm, options.engine.pool_slots, table, log)
        self.engine = self._engine(table, speculates=speculates)
        self.defragmenter = make_defragmenter(
            arm,
            self.allocator,
            table,
            mover=CountingMover(self._row_bytes),
            profile=profile,
            verify=speculates,
        )
        self._table = table
        self._meter = Meter(
            self.engine,
            self.allocator,
            tracker_of(arm, self.defragmenter, table),
            self._timer,
            page=arm.config.page,
            packed=arm.packed,
        )
        self._moved_rows = 0
        self._slices: list[Slice] = []
        self._last: StepInfo | None = None
        self._relocates = relocates(arm)
        self.engine.before_step = self._between_steps

    def run(self, progress: Progress | None = None) -> ArmResult:
        """Serve every request and return what came of it.

        Args:
            progress: Called now and then with the number of requests done with.
        """
        began = time.perf_counter()
        decodes = 0
        while (step := self.engine.step()) is not None:
            self._last = step
            if self._options.slices:
                self._slices.append(self._slice(step))
            if step.kind is not StepKind.DECODE:
                continue
            decodes += 1
            if decodes % self._options.sample_every == 0 and self.engine.rows.live.any():
                self._meter.sample(self._view(), self._moved_rows)
                if progress is not None:
                    progress(self._done())
        if progress is not None:
            progress(self._done())
        if self._recording is not None:
            self._record_step()
            self._recording.close()
        return self._meter.result(
            self._arm.name,
            self._arm.description,
            self._moved_rows,
            self._slices,
            time.perf_counter() - began,
        )

    def _engine(self, table: torch.Tensor, *, speculates: bool) -> Engine:
        options = self._options
        accepted, turn = None, None
        if speculates:
            rng = np.random.default_rng(options.seed)
            lengths = AcceptedLengths(options.engine.spec_window, load_eagle_mtbench(), rng)
            # A generator of their own: arms that differ in timing still draw the same turns.
            turns = np.random.default_rng([options.seed, 1])
            accepted, turn = lengths, lambda: int(turns.integers(lengths.turns))
        trace = options.trace.open()
        workload = Workload(
            block=options.trace.block, prefix_jitter=options.prefix_jitter, seed=options.seed
        )
        requests = sim_requests(options.trace.selection.apply(trace), workload, turn)
        return Engine(options.engine, self.allocator, table, requests, self._timer.price, accepted)

    def _done(self) -> int:
        totals = self.engine.totals
        return totals.finished + totals.rejected + totals.aborted

    def _between_steps(self) -> None:
        if self._recording is not None:
            self._record_step()
        if self._relocates:
            self._compact()

    def _record_step(self) -> None:
        assert self._recording is not None
        self._recording.step(self._view(), self.engine, self._last)
        self._last = None

    def _compact(self) -> None:
        report = self.defragmenter.step(self.engine.totals.steps, self._view)
        if report.moved_rows and not report.dry_run:
            self._moved_rows += report.moved_rows
            self._timer.charge(report.moved_rows)

    def _view(self) -> EngineView:
        rows = self.engine.rows
        live = rows.live_rows()
        return EngineView(
            step=self.engine.totals.steps,
            table=self._table,
            rows=live,
            generations=rows.generation[live],
            protected=rows.protected_len[live],
            committed=rows.committed_len[live],
            allocated=rows.allocated_len[live],
            shared_values=lambda: self.engine.tree.locked_path_values(self.engine.locked_nodes()),
        )

    def _slice(self, step: StepInfo) -> Slice:
        duration = self.engine.now - step.start_s
        args = {"running": float(step.running), "tokens": float(step.counts.sum())}
        return Slice(step.kind.value, step.start_s * 1e6, duration * 1e6, args)
