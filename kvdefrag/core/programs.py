"""The parts of a relocation that a device may do in a few launches of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvdefrag.core.commit import commit_groups
from kvdefrag.core.demand import IntArray
from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.holders import Holder, ValueTensors, live_rows
from kvdefrag.core.layout import slot_stats
from kvdefrag.core.mover import Mover
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.plan_tenure import plan_tenure
from kvdefrag.core.view import EngineView, to_device

Refused = Callable[[MovePlan], Tensor | None]


class Tenured(NamedTuple):
    """What a tenure step did, valid until the next one.

    Attributes:
        moves: The plan as it was carried out.
        reached: int64 [lanes], position up to which the lane's row needs no tenure any more.
        of: int64 [n], index into the view of the first n lanes; the others are padding.
    """

    moves: MovePlan
    reached: Tensor
    of: IntArray


class Programs(Protocol):
    """Measuring, tenure, rewriting of holders. Every implementation makes the same decisions."""

    def tenure(
        self,
        view: EngineView,
        starts: IntArray,
        free_list: TwoEnded,
        *,
        max_groups: int,
        dry_run: bool,
        refused: Refused,
    ) -> Tenured | None:
        """Plan a tenure step, as `plan_tenure` says, and carry it out; None if no group waits.

        An exception leaves table and free list either both as before or both as after the move.

        Args:
            view: The running requests.
            starts: int64 [n], position in each row up to which it needs no tenure.
            free_list: Where whole pages come from and the slots left behind go.
            max_groups: Groups at most.
            dry_run: Only plan.
            refused: Asked once about the plan, before anything moves: returns None, or a bool
                scalar on the device that voids it.
        """
        ...

    def measure(self, view: EngineView) -> Tensor:
        """Return int [2, n]: runs and tokens in aligned pages of each row, where the table is."""
        ...

    def rows(self, view: EngineView, held: IntArray | None) -> Holder:
        """Return the holder of all live rows, as `live_rows`."""
        ...

    def values(self, values: Sequence[Tensor]) -> Holder:
        """Return the holder of slot tensors that others keep, as `ValueTensors`."""
        ...


class TorchPrograms:
    """The reference, on any device: whole-tensor operations of torch.

    Args:
        mover: Copies the rows.
        page: Tokens to a group.
    """

    def __init__(self, mover: Mover, *, page: int) -> None:
        self._mover, self._page = mover, page

    def tenure(
        self,
        view: EngineView,
        starts: IntArray,
        free_list: TwoEnded,
        *,
        max_groups: int,
        dry_run: bool,
        refused: Refused,
    ) -> Tenured | None:
        if free_list.dirty:
            free_list.reorder()
        plan = plan_tenure(view, starts, free_list, page=self._page, max_groups=max_groups)
        if plan is None:
            return None
        plan = plan.voided_if(refused(plan.moves))
        if not dry_run:
            plan = commit_groups(view, plan, self._mover, free_list)
        return Tenured(plan.moves, plan.reached, plan.of)

    def measure(self, view: EngineView) -> Tensor:
        rows, lengths = (to_device(a, view.device) for a in (view.rows, view.committed))
        width = int(view.committed.max(initial=0))
        stats = slot_stats(view.table[rows, :width].long(), lengths, page_sizes=(self._page,))
        return torch.stack([stats.runs, stats.covered[self._page]])

    def rows(self, view: EngineView, held: IntArray | None) -> Holder:
        return live_rows(view, held)

    def values(self, values: Sequence[Tensor]) -> Holder:
        return ValueTensors(values)
