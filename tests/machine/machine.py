"""A state machine over the real defragmenter: whatever happens, every slot has one owner, and
every request reads what it wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kvdefrag.core.policy import Gather, Lower
from kvdefrag.core.report import StepReport
from tests.machine.engine import Engine, Fault, Request, Shape, Snapshot, settings_for

BUSY = ("tenure", "evacuation", "gather", "lower")
IDLE = ("idle", "idle", "lower")
FAULTS = ("mover before", "mover midway", "holder before", "holder midway", "free list")
PAGES_A_STEP = (0, 1, 2, 8)

SHAPES = st.builds(
    Shape,
    size=st.sampled_from((3, 15, 37, 63, 64, 95, 130, 130)),
    page=st.sampled_from((2, 4, 4, 8)),
    rows=st.sampled_from((2, 5)),
    width=st.sampled_from((29, 64)),
    discipline=st.sampled_from(("two_ended",) * 6 + ("fifo", "sorted")),
    reservation=st.booleans(),
    device_form=st.booleans(),
    delay=st.sampled_from((0, 2)),
    latent=st.booleans(),
    interval=st.sampled_from((1, 3, 16)),
    checks=st.just("strict"),
).map(lambda s: s if s.discipline == "two_ended" else Shape(**{**vars(s), "reservation": False}))


class BrokenValue:
    """A tree value that fails once when it is rewritten, before or after part of it was."""

    def __init__(self, value: Tensor, *, midway: bool) -> None:
        self._value, self._midway, self._failed = value, midway, False

    def long(self) -> Tensor:
        return self._value.long()

    def copy_(self, fresh: Tensor) -> None:
        if not self._failed:
            self._failed = True
            half = fresh.shape[0] // 2 if self._midway else 0
            self._value[:half] = fresh[:half]
            raise Fault("a holder failed")
        self._value.copy_(fresh)


class DefragMachine(RuleBasedStateMachine):
    """Serving, sharing, leaving and compacting in any order, with parts that fail."""

    @initialize(shape=SHAPES, seed=st.integers(0, 1 << 16), rounds=st.integers(0, 12))
    def build(self, shape: Shape, seed: int, rounds: int) -> None:
        self.engine = Engine(shape)
        if rounds:
            self._serve(seed, rounds)

    # --- serving ---------------------------------------------------------------------------

    @precondition(lambda self: self.engine.free_rows())
    @rule(
        wanted=st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 14), st.integers(1, 9)),
            min_size=1,
            max_size=3,
        ),
        chunk=st.sampled_from((None, None, 3, 5)),
        share=st.booleans(),
    )
    def admit(self, wanted: list[tuple[int, int, int]], chunk: int | None, share: bool) -> None:
        engine = self.engine
        wanted = wanted[: len(engine.free_rows())]
        prompts = [
            [(family << 20) + at for at in range(shared)] + engine.fresh_tokens(own)
            for family, shared, own in wanted
        ]
        for row in engine.admit(prompts, chunk=chunk):
            if share:
                engine.share(engine.requests[row])

    def _serve(self, seed: int, rounds: int) -> None:
        # Several requests that decode in turns: their tokens lie scattered afterwards.
        engine, draw = self.engine, np.random.default_rng(seed)
        for _ in engine.free_rows():
            shared = [(3 << 20) + at for at in range(draw.integers(0, 12))]
            engine.admit([shared + engine.fresh_tokens(int(draw.integers(1, 8)))])
        for _ in range(rounds):
            for row in self._decodable(1):
                if draw.random() < 0.8 and not engine.decode([row]):
                    engine.finish(row, keep=bool(draw.integers(2)))
        for row in sorted(engine.requests):
            if draw.random() < 0.4:
                engine.finish(row, keep=bool(draw.integers(2)))

    @precondition(lambda self: self._in_prefill())
    @rule(chunk=st.integers(1, 6), share=st.booleans())
    def next_chunk(self, chunk: int, share: bool) -> None:
        batch = self._in_prefill()
        if self.engine.extend(batch, chunk=chunk) and share:
            for request in batch:
                self.engine.share(request)

    @precondition(lambda self: self._decodable(1))
    @rule(steps=st.integers(1, 6), data=st.data())
    def decode(self, steps: int, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self._decodable(1)), min_size=1, unique=True))
        for _ in range(steps):
            rows = [r for r in rows if r in self._decodable(1)]
            if rows and not self.engine.decode(rows):
                self.engine.finish(rows.pop(), keep=False)

    @precondition(lambda self: self._decodable(5))
    @rule(window=st.integers(1, 5), data=st.data())
    def speculate(self, window: int, data: st.DataObject) -> None:
        rows = self._decodable(5)
        accepted = data.draw(
            st.lists(st.integers(0, window), min_size=len(rows), max_size=len(rows))
        )
        self.engine.speculate(rows, window, accepted)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), count=st.integers(1, 7))
    def truncate(self, data: st.DataObject, count: int) -> None:
        self.engine.truncate(self._row(data), count)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), keep=st.booleans(), group=st.booleans())
    def leave(self, data: st.DataObject, keep: bool, group: bool) -> None:
        if group:
            self.engine.allocator.free_group_begin()
        self.engine.finish(self._row(data), keep=keep)
        if group:
            self.engine.allocator.free_group_end()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.engine.share(self.engine.requests[self._row(data)])

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        self.engine.evict(count)

    @precondition(lambda self: self.engine.steps > 5)
    @rule()
    def flush(self) -> None:
        self.engine.flush()

    @precondition(lambda self: not self.engine.requests)
    @rule(size=st.sampled_from((3, 17, 40, 64)))
    def resize(self, size: int) -> None:
        self.engine.resize(size)

    @rule(count=st.integers(1, 200))
    def allocate_and_free_at_once(self, count: int) -> None:
        allocator = self.engine.allocator
        all_there_is = allocator.available_size() + allocator.reserved_size()
        slots = allocator.alloc(count)
        assert (slots is None) == (count > all_there_is)
        if slots is not None:
            kept = slots.clone()
            self.engine.free(slots)
            assert torch.equal(slots, kept)

    # --- compacting ------------------------------------------------------------------------

    @rule(
        pages=st.sampled_from(PAGES_A_STEP),
        steps=st.integers(1, 4),
        max_live=st.sampled_from((1, 3, 32)),
        seed=st.integers(0, 1 << 16),
        rounds=st.integers(0, 12),
        data=st.data(),
    )
    def compact(
        self, pages: int, steps: int, max_live: int, seed: int, rounds: int, data: st.DataObject
    ) -> None:
        if rounds:
            self._serve(seed, rounds)
        rows = max(1, pages * self.engine.shape.page)
        self._set(mode := self._mode(data), rows, max_live, dry_run=False)
        self._ask(mode, data)
        for _ in range(steps):
            before = self.engine.snapshot()
            report = self.engine.compact()
            self._counts_stay(before)
            self._within_budget(report, rows)

    @rule(seed=st.integers(0, 1 << 16), rounds=st.integers(1, 12), compactions=st.integers(1, 4))
    def compact_when_idle(self, seed: int, rounds: int, compactions: int) -> None:
        """Nobody runs any more; what is cached is packed."""
        self._serve(seed, rounds)
        for row in sorted(self.engine.requests):
            self.engine.finish(row)
        self._set("idle", 64, 32, dry_run=False)
        for _ in range(compactions):
            before = self.engine.snapshot()
            self.engine.compact()
            self._counts_stay(before)

    @rule(data=st.data(), gated=st.booleans())
    def compact_without_moving(self, data: st.DataObject, gated: bool) -> None:
        self._set(mode := self._mode(data), 64, 32, dry_run=not gated)
        self._ask(mode, data)
        before, plans = self.engine.snapshot(), len(self.engine.mover.plans)
        report = self.engine.compact(gates=("transfer",) if gated else ())
        assert report.dry_run != gated
        assert report.gates == (("transfer",) if gated else ())
        assert not report.moves
        assert len(self.engine.mover.plans) == plans
        self._nothing_changed(before)

    @rule(fault=st.sampled_from(FAULTS), data=st.data())
    def compact_with_a_fault(self, fault: str, data: st.DataObject) -> None:
        engine = self.engine
        self._set(mode := self._mode(data), 64, 32, dry_run=False)
        self._ask(mode, data)
        before = engine.snapshot()
        try:
            with self._broken(fault) as values:
                engine.compact(values=values)
        except Fault:
            self._nothing_changed(before)
        else:
            # Nothing to move, or a mechanism that leaves the tree alone.
            self._counts_stay(before)

    @precondition(lambda self: self.engine.requests and self.engine.free_rows())
    @rule(data=st.data(), own=st.integers(1, 5))
    def a_holder_appears_midway(self, data: st.DataObject, own: int) -> None:
        """Between two slices of a gather, somebody else starts to share what is gathered."""
        engine = self.engine
        row = self._row(data)
        self._set("gather", self.engine.shape.page, 32, dry_run=False)
        engine.defragmenter.request(Gather(row, int(engine.generation[row])))
        engine.compact()
        self.nothing_is_lost()
        request = engine.requests[row]
        engine.share(request)
        if request.committed + own <= engine.shape.width:
            engine.admit([request.tokens[: request.committed] + engine.fresh_tokens(own)])
        for _ in range(12):
            engine.compact()

    # --- always ----------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.check()

    @invariant()
    def nobody_touches_stale_numbers(self) -> None:
        # No row but those of requests is ever rewritten by a move: row 0 is nobody's.
        assert (self.engine.table[0] < 0).all()

    # --- helpers ---------------------------------------------------------------------------

    def _in_prefill(self) -> list[Request]:
        return [r for r in self.engine.requests.values() if r.committed < len(r.tokens)]

    def _decodable(self, ahead: int) -> list[int]:
        width = self.engine.shape.width
        return sorted(
            row
            for row, r in self.engine.requests.items()
            if r.committed == len(r.tokens) and r.committed + ahead <= width
        )

    def _row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.engine.requests)))

    def _mode(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(BUSY if self.engine.requests else IDLE))

    def _set(self, mode: str, rows: int, max_live: int, *, dry_run: bool) -> None:
        config = settings_for(
            mode,
            bytes_per_step=rows * self.engine.mover.row_bytes,
            dry_run=dry_run,
            max_live=max_live,
        )
        self.engine.defragmenter.configure(self.engine.paged(config))

    def _ask(self, mode: str, data: st.DataObject) -> None:
        engine = self.engine
        if mode == "gather" and engine.requests:
            row = self._row(data)
            # Now and then for a request that has left its row already.
            generation = int(engine.generation[row]) - data.draw(st.sampled_from((0, 0, 0, 1)))
            engine.defragmenter.request(Gather(row, generation))
        elif mode == "lower":
            engine.defragmenter.request(Lower(data.draw(st.integers(1, 40))))

    def _within_budget(self, report: StepReport, rows: int) -> None:
        page = self.engine.shape.page
        on_demand = report.mechanism in ("gather", "lower")
        if report.moved_rows is not None:
            assert report.moved_rows <= (max(rows, page) if on_demand else rows)
            assert report.moved_rows <= report.planned_rows

    def _counts_stay(self, before: Snapshot) -> None:
        after = self.engine.snapshot()
        assert after.available == before.available
        assert after.evictable == before.evictable
        assert after.protected == before.protected
        assert after.reserved == before.reserved

    def _nothing_changed(self, before: Snapshot) -> None:
        after = self.engine.snapshot()
        assert torch.equal(after.table, before.table)
        assert after.values == before.values
        assert after.free == before.free
        self._counts_stay(before)

    @contextmanager
    def _broken(self, fault: str) -> Iterator[object]:
        engine = self.engine
        what, _, when = fault.partition(" ")
        values = None
        with pytest.MonkeyPatch.context() as patch:
            if what == "mover":
                patch.setattr(engine.mover, "fault", when)
            elif what == "holder":

                def values() -> Sequence[object]:
                    sound = engine.shared_values()
                    last = [BrokenValue(v, midway=when == "midway") for v in sound[-1:]]
                    return [*sound[:-1], *last]
            elif engine.allocator.two_ended is not None:
                patch.setattr(engine.allocator.two_ended, "substitute", _fail)
                patch.setattr(engine.allocator.two_ended, "substitute_front", _fail)
            yield values


def _fail(*_: object) -> None:
    raise Fault("the free list failed")
