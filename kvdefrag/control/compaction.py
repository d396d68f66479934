"""A compaction that somebody asked for: slices of it, one between two steps, until it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvdefrag.config import Config
from kvdefrag.control.command import How
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.mover import Mover
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.programs import Programs
from kvdefrag.core.readback import Readback
from kvdefrag.core.relocator import Relocator
from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView

_MOST_SLICES = 4096
_MOST_WAITED = 16  # steps; more than any readback takes


class Parts(NamedTuple):
    """What a compaction works with; see `Relocator`."""

    config: Config
    allocator: SlotAllocator
    mover: Mover
    readback: Readback
    tracker: Tracker
    programs: Programs


class Compaction:
    """Moves rows in slices that one step may take (`relocation.bytes_per_step`).

    Every rank that is told the same at the same step makes the same plans: it ends by what the
    readback brings, at a step that all ranks share.

    Args:
        parts: What moves the rows.
        how: The mechanism.
        rows: Rows to move at most; None for all that it finds.
        target: Of a gathering: table row and generation of the request.

    Attributes:
        moved: Rows that have moved, as far as is known.
        slices: Slices that have been planned.
        on_moved: Called with every number of rows that becomes known.
    """

    def __init__(
        self, parts: Parts, how: How, *, rows: int | None = None, target: tuple[int, int] = (0, 0)
    ) -> None:
        config, allocator, mover, readback, tracker, programs = parts
        self._allocator, self._mover, self._readback = allocator, mover, readback
        self._relocator = Relocator(config, allocator, mover, readback, tracker, programs)
        self._tracker, self._page = tracker, config.page
        self._slice = max(config.relocation.bytes_per_step // mover.row_bytes, config.page)
        self._how, self._left, self._target = how, rows or allocator.size, target
        self._position = self._waits = self._since = self.moved = self.slices = 0
        self._over = False
        self.on_moved: Callable[[int], None] = lambda rows: None

    @property
    def done(self) -> bool:
        """Whether nothing is left to move, and all that moved is known or never will be."""
        return self._over and (not self._waits or self._since > _MOST_WAITED)

    def advance(self, view: EngineView) -> None:
        """Move one slice; call it once a step, behind the readback's count of the step."""
        if self._over:
            # A pool that is cleared meanwhile forgets what was on its way.
            self._since += 1
            return
        pages = self._allocator.two_ended
        rows = min(self._slice, self._left)
        if pages is None or self.slices >= _MOST_SLICES or rows < self._least():
            self._over = True
            return
        self._tracker.observe(view)
        plan = self._plan(view, pages, rows)
        self.slices += 1
        if plan is None:
            self._over = True
            return
        self._waits += 1
        self._readback.submit(plan.moved_rows(), self._learn)

    def _least(self) -> int:
        return self._page if self._how == "tenure" else 1

    def _plan(self, view: EngineView, pages: TwoEnded, rows: int) -> MovePlan | None:
        if self._how == "tenure":
            return self._relocator.tenure(view, pages, rows=rows)
        if pages.dirty:
            pages.reorder()
        if self._how == "evacuate":
            return self._relocator.evacuate(view, pages, rows=rows)
        if self._how == "lower":
            return self._relocator.lower(view, pages, rows=rows)
        return self._gather(view, pages, rows)

    def _gather(self, view: EngineView, pages: TwoEnded, rows: int) -> MovePlan | None:
        row, generation = self._target
        found = (view.rows == row) & (view.generations == generation)
        if not found.any():
            return None
        rows = max(rows // self._page * self._page, self._page)
        plan, self._position = self._relocator.gather(
            view, pages, int(found.argmax()), begin=self._position, rows=rows
        )
        return plan

    def _learn(self, rows: int) -> None:
        self._waits -= 1
        self.moved += rows
        self._left -= rows
        # A stretch of a gathering may lie well already; the others look at everything each time.
        if self._how != "gather" and (rows == 0 or self._left <= 0):
            self._over = True
        self.on_moved(rows)
