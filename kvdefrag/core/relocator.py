"""Plans a relocation, checks the plan and carries it out, one mechanism each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvdefrag.config import Config
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.commit import commit_slots
from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.holders import Holder, range_index
from kvdefrag.core.mover import Mover
from kvdefrag.core.plan import MovePlan, check_plan, violation
from kvdefrag.core.plan_evacuate import plan_evacuation
from kvdefrag.core.plan_gather import any_missing, plan_gather, plan_lower
from kvdefrag.core.programs import Programs, Tenured
from kvdefrag.core.readback import Readback
from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView
from kvdefrag.errors import IntegrityError

_SAMPLED = 64


class Relocator:
    """Relocates rows when told to.

    Every method returns the plan, carried out unless the settings ask for a dry run. An exception
    leaves tables, tree values and free list either all as before or all as after the move.

    Args:
        config: The settings; may be replaced between steps.
        allocator: The engine's allocator, with a two-ended list.
        mover: Copies the rows.
        readback: Brings device results back.
        tracker: Is told what moved.
        programs: Tenure and the rewriting of holders.
    """

    def __init__(
        self,
        config: Config,
        allocator: SlotAllocator,
        mover: Mover,
        readback: Readback,
        tracker: Tracker,
        programs: Programs,
    ) -> None:
        self.config = config
        self._allocator, self._mover = allocator, mover
        self._readback, self._tracker = readback, tracker
        self._programs = programs
        self._plans = 0

    def tenure(self, view: EngineView, pages: TwoEnded, *, rows: int) -> MovePlan | None:
        """Move groups of a page of private tokens into whole pages; None if none waits."""
        dry_run = self.config.relocation.dry_run
        tenured = self._programs.tenure(
            view,
            self._tracker.tenured(view),
            pages,
            max_groups=rows // self.config.page,
            dry_run=dry_run,
            refused=self._refused,
        )
        if tenured is None:
            return None
        if not dry_run:
            self._allocator.commit_moves(tenured.moves.src, tenured.moves.dst)
            self._confirm(view, tenured)
        return tenured.moves

    def evacuate(self, view: EngineView, pages: TwoEnded, *, rows: int) -> MovePlan:
        """Empty the sparsest pages into the holes of denser ones."""
        most = min(self.config.relocation.max_live_per_page, rows)
        values = view.shared_values()
        plan = plan_evacuation(
            _movable(view, values),
            pages,
            page=self.config.page,
            max_pages=max(1, rows // most),
            max_live=most,
        )
        return self._move(view, pages, plan, values)

    def lower(self, view: EngineView, pages: TwoEnded, *, rows: int) -> MovePlan:
        """Move the highest rows into the lowest free slots."""
        values = view.shared_values()
        free = self._allocator.free_slots()
        return self._move(view, pages, plan_lower(_movable(view, values), free, rows=rows), values)

    def gather(
        self, view: EngineView, pages: TwoEnded, at: int, *, begin: int, rows: int
    ) -> tuple[MovePlan | None, int]:
        """Lay up to `rows` tokens of a request from `begin` on into neighbouring pages.

        Returns:
            The plan, None if nothing is left, and the position up to which it is done.
        """
        values = view.shared_values()
        shared = int(view.protected[at])
        begin = max(begin, 0 if values else shared)
        end = min(int(view.committed[at]), begin + rows)
        if end <= begin:
            return None, end
        stretch = view.table[int(view.rows[at]), max(begin - 1, 0) : end].long()
        previous, slots = (stretch[0], stretch[1:]) if begin else (None, stretch)
        plan = plan_gather(slots, previous, pages, page=self.config.page)
        if begin < shared:
            # Shared slots move only if the tree gave all of them out.
            plan = plan.voided_if(any_missing(slots, _movable(view, values), self._allocator.size))
        return self._move(view, pages, plan, values), end

    def _move(
        self, view: EngineView, pages: TwoEnded, plan: MovePlan, values: Sequence[Tensor]
    ) -> MovePlan:
        plan = plan.voided_if(self._refused(plan))
        if not self.config.relocation.dry_run:
            book = self._allocator.reservations
            programs = self._programs
            holders: list[Holder] = [programs.rows(view, book.held if book else None)]
            holders += [programs.values(values), programs.values(view.copies())]
            plan = commit_slots(plan, self._mover, holders, pages, self._allocator.size)
            self._allocator.commit_moves(plan.src, plan.dst)
            self._tracker.moved(view.rows)
        return plan

    def _confirm(self, view: EngineView, tenured: Tenured) -> None:
        rows, generations = view.rows[tenured.of], view.generations[tenured.of]

        def deliver(reached: Tensor) -> None:
            self._tracker.confirm(rows, generations, reached.numpy()[: rows.shape[0]])

        self._readback.submit_tensor(tenured.reached, deliver)
        self._tracker.moved_private(rows)

    def _refused(self, plan: MovePlan) -> Tensor | None:
        # Whether the plan breaks a rule: a flag on the device, or None if it was not looked at.
        self._plans += 1
        mode = self.config.relocation.check_plans
        if mode == "never" or (mode == "sampled" and self._plans % _SAMPLED):
            return None
        size, device = self._allocator.size, plan.src.device
        is_free = torch.zeros(size + 1, dtype=torch.bool, device=device)
        is_free.index_fill_(0, self._allocator.free_list.slots(), True)
        if device.type == "cpu":
            check_plan(plan, is_free, size)
            return None
        refused = violation(plan, is_free, size)
        self._readback.submit(refused, _flagged)
        return refused


def _movable(view: EngineView, values: Sequence[Tensor]) -> Tensor:
    # Each slot once: private ranges by their row, shared ones by their tree node.
    index = range_index(view.table, view.rows, view.protected, view.allocated)
    return torch.cat([view.table.view(-1)[index].long(), *(v.long() for v in values)])


def _flagged(broken: int) -> None:
    if broken:
        raise IntegrityError("a plan named a slot twice, a free source or a live destination")
