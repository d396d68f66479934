"""Replays recorded events through one arm: its allocator, its defragmenter, its meter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvdefrag.core import events as ev
from kvdefrag.core.demand import Demand, IntArray, Kind, ragged
from kvdefrag.core.events import Event, Header
from kvdefrag.core.logged_rows import LoggedRows
from kvdefrag.core.profile import DeviceProfile
from kvdefrag.core.room import make_room, wants
from kvdefrag.core.view import EngineView
from kvdefrag.errors import SlotError
from kvdefrag.sim.arm_setup import make_allocator, make_defragmenter, relocates, tracker_of
from kvdefrag.sim.arms import Arm
from kvdefrag.sim.cost import StepTimer
from kvdefrag.sim.engine_types import StepInfo, StepKind, Totals
from kvdefrag.sim.lookahead import Lookahead
from kvdefrag.sim.meter import Meter
from kvdefrag.sim.results import ArmResult
from kvdefrag.sim.slot_map import SlotMap

_NONE: IntArray = np.empty(0, dtype=np.int64)
_KINDS = {"prefill": StepKind.PREFILL, "decode": StepKind.DECODE}


class ReplayRows(LoggedRows):
    """The rows as recorded, with the replay's own slots in their table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table.shape[0])
        self.table = table.numpy()


@dataclass
class RecordedTree:
    """The recorded prefix tree, as far as its size goes."""

    evictable_size: int = 0


class RecordedEngine:
    """How the recorded engine stood when it was last heard of; see `Measured`."""

    def __init__(self, table: torch.Tensor) -> None:
        self.now = 0.0
        self.totals = Totals()
        self.rows = ReplayRows(table)
        self.tree = RecordedTree()

    def learn(self, step: ev.Step) -> None:
        """Take over what a step says."""
        self.rows.stepped(step)
        self.now = step.time_s
        self.tree.evictable_size = step.cached
        self.totals.steps = step.step
        for name, count in step.counts.items():
            if hasattr(self.totals, name):
                setattr(self.totals, name, count)


class ArmReplay:
    """One arm that is asked for what the recorded run asked for.

    Admissions, retractions and times are the recorded run's, and so is the order of evictions; an
    arm that takes whole pages makes room for them by evicting a little earlier. Slots, relocations
    and the modelled time of each step are the arm's own.

    Args:
        arm: The policy.
        header: Of the log.
        ahead: The log, from which `apply` is given one event after the other.
        profile: Prices steps.
        sample_every: Decode steps between samples.
    """

    def __init__(
        self,
        arm: Arm,
        header: Header,
        ahead: Lookahead,
        profile: DeviceProfile,
        *,
        sample_every: int = 16,
    ) -> None:
        self._arm, self._ahead, self._sample_every = arm, ahead, sample_every
        self._pages_made = header.evicts_for_pages
        self._early = np.zeros(header.size + 1, dtype=np.bool_)
        self._table = torch.zeros((header.rows, header.context), dtype=torch.int32)
        self._timer = StepTimer(profile, verify=header.window > 0)
        self.allocator = make_allocator(arm, header.size, self._table)
        self.slot_map = SlotMap(header.size, profile.bytes_per_slot)
        self.defragmenter = make_defragmenter(
            arm,
            self.allocator,
            self._table,
            mover=self.slot_map,
            profile=profile,
            verify=header.window > 0,
        )
        self.engine = RecordedEngine(self._table)
        self._meter = Meter(
            self.engine,
            self.allocator,
            tracker_of(arm, self.defragmenter, self._table),
            self._timer,
            page=arm.config.page,
            packed=arm.packed,
        )
        self._relocates = relocates(arm)
        self._due = False
        self._decodes = 0
        self._moved_rows = 0

    def apply(self, event: Event) -> None:
        """Do what the recorded run did.

        Raises:
            SlotError: The event contradicts those before it.
        """
        if self._due:
            # Only now: nothing relocates after the last step.
            self._due = False
            self._compact()
        if isinstance(event, ev.Allocated):
            self._allocate(event)
        elif isinstance(event, ev.Freed):
            self._free(event.slots)
        elif isinstance(event, ev.Step):
            self._step(event)
        elif isinstance(event, ev.Shared):
            end = event.start + event.slots.shape[0]
            self.engine.rows.table[event.row, event.start : end] = self.slot_map.look(event.slots)
        elif isinstance(event, ev.Released):
            self.allocator.release(event.row, event.length)
        elif isinstance(event, ev.Moved):
            self.slot_map.rename(event.src, event.dst)
        else:
            self._apply_rare(event)

    def result(self, wall_s: float) -> ArmResult:
        """Return what the arm did; its replay took `wall_s` seconds."""
        arm = self._arm
        return self._meter.result(arm.name, arm.description, self._moved_rows, [], wall_s)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the allocator's free list is sound."""
        self.allocator.check_integrity()

    def _apply_rare(self, event: Event) -> None:
        if isinstance(event, ev.Refused):
            if self.allocator.alloc_for(event.demand) is not None:
                raise SlotError(f"{event.demand.total} slots were refused, though they are free")
        elif isinstance(event, ev.Opened):
            self._open(event)
        elif isinstance(event, ev.Cleared):
            self.allocator.clear()
            self._forget(self.allocator.size)
        elif isinstance(event, ev.Resized):
            self.allocator.resize(event.size)
            self._forget(event.size)

    def _open(self, event: ev.Opened) -> None:
        # Everything is taken and what was free is freed in order: that leaves the same list.
        if not self.slot_map.empty:
            raise SlotError("a log opens on a pool in use only at its beginning")
        self.allocator.alloc(self.allocator.size)
        every = torch.arange(1, self.allocator.size + 1)
        self.slot_map.give(every.numpy(), every)
        self.allocator.free(torch.from_numpy(self.slot_map.take(event.free)))

    def _forget(self, size: int) -> None:
        self.slot_map.clear(size)
        self._early = np.zeros(size + 1, dtype=np.bool_)

    def _free(self, recorded: IntArray) -> None:
        early = self._early[recorded]
        if early.any():
            self._early[recorded] = False
            recorded = recorded[~early]
        self.allocator.free(torch.from_numpy(self.slot_map.take(recorded)))

    def _make_room_for(self, demand: Demand) -> None:
        # What the recorded run evicted for the sake of pages is in the log already.
        slots = wants(self.allocator, demand).slots
        most = slots if self._pages_made else self.allocator.size
        make_room(self.allocator, demand, lambda count: self._make_room(min(count, most)))

    def _make_room(self, count: int) -> None:
        if count <= self.allocator.available_size():
            return
        rows, used = self.engine.rows, self.slot_map.dead()
        for row in rows.live_rows():
            used[self.slot_map.recorded(rows.table[row, : rows.allocated_len[row]])] = True
        for recorded in self._ahead.frees(used):
            self._early[recorded] = True
            self.allocator.free(torch.from_numpy(self.slot_map.take(recorded)))
            if count <= self.allocator.available_size():
                return

    def _allocate(self, event: ev.Allocated) -> None:
        count = event.slots.shape[0]
        if event.kind is Kind.PLAIN:
            slots = self.allocator.alloc(count)
        else:
            self._make_room_for(event.demand)
            slots = self.allocator.alloc_for(event.demand)
        if slots is None:
            free = self.allocator.available_size() + self.allocator.reserved_size()
            raise SlotError(f"{count} slots were handed out where only {free} can be free")
        self.slot_map.give(event.slots, slots)
        at = ragged(event.rows * self._table.shape[1] + event.starts, event.counts)
        self._table.view(-1)[torch.from_numpy(at)] = slots.to(self._table.dtype)
        self.engine.rows.allocated(event)

    def _step(self, event: ev.Step) -> None:
        self.engine.learn(event)
        self.engine.tree.evictable_size -= int(np.count_nonzero(self._early))
        if event.ran:
            self._timer.price(_priced(event))
        if event.ran == "decode":
            self._decodes += 1
            if self._decodes % self._sample_every == 0 and self.engine.rows.live.any():
                self._meter.sample(self._view(), self._moved_rows)
        self._due = self._relocates

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
            shared_values=self._shared,
        )

    def _shared(self) -> list[torch.Tensor]:
        # What the locked nodes of the tree hold: every live row's shared prefix, each slot once.
        rows = self.engine.rows
        prefixes = [rows.table[row, : rows.protected_len[row]] for row in rows.live_rows()]
        slots = np.unique(np.concatenate(prefixes)) if prefixes else _NONE
        return [torch.from_numpy(slots.astype(np.int64))]


def _priced(event: ev.Step) -> StepInfo:
    tokens = np.array([event.tokens], dtype=np.int64)
    kind = _KINDS[event.ran]
    return StepInfo(event.step, kind, event.time_s, _NONE, _NONE, tokens)
