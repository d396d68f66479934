"""Move plans: which rows go where, in a shape the host knows beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdefrag.errors import PlanError


@dataclass(frozen=True)
class MovePlan:
    """Copy row `src[i]` to row `dst[i]` in every buffer, for all i at once.

    The shape is fixed by the host. A move that cannot happen is the pair (0, 0): the sink onto
    itself. Sources and destinations of real moves are disjoint unless `disjoint` says otherwise.

    Attributes:
        src, dst: int64 [n].
        disjoint: No slot is both source and destination.
        counted: Number of real moves, an int64 scalar on the device, where the planner has it.
    """

    src: Tensor
    dst: Tensor
    disjoint: bool = True
    counted: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Pairs in the plan, real or not: an upper bound of the rows moved."""
        return self.src.shape[0]

    def moved_rows(self) -> Tensor:
        """Return the number of real moves, an int64 scalar on the plan's device."""
        return (self.src != self.dst).sum() if self.counted is None else self.counted

    def voided_if(self, refused: Tensor | None) -> MovePlan:
        """Return a plan of as many pairs that moves nothing where `refused`, a bool scalar, is set.

        None stands for a plan that nobody has looked at.
        """
        if refused is None:
            return self
        src, dst = torch.where(refused, 0, self.src), torch.where(refused, 0, self.dst)
        return MovePlan(src, dst, self.disjoint)


def violation(plan: MovePlan, is_free: Tensor, size: int) -> Tensor:
    """Return a bool scalar on the device: whether the plan breaks a rule.

    Rules: sources live and distinct, destinations free and distinct, both within 1..size.

    Args:
        plan: The plan.
        is_free: bool [>= size + 1], which slots are free before the move.
        size: Slots 1..size.
    """
    real = plan.src != plan.dst
    outside = real & (_outside(plan.src, size) | _outside(plan.dst, size))
    src, dst = plan.src.clamp(0, size), plan.dst.clamp(0, size)
    wrong = real & (is_free[src] | ~is_free[dst])
    return (outside | wrong).any() | _repeats(plan.src, real, size) | _repeats(plan.dst, real, size)


def check_plan(plan: MovePlan, is_free: Tensor, size: int) -> None:
    """Raise `PlanError` naming what is wrong with a plan of CPU tensors; nothing has moved."""
    if not bool(violation(plan, is_free, size)):
        return
    real = plan.src != plan.dst
    src, dst = plan.src[real], plan.dst[real]
    for what, slots in (("source", src), ("destination", dst)):
        bad = slots[_outside(slots, size)]
        if bad.numel():
            raise PlanError(f"{what} {int(bad[0])} is outside 1..{size}")
        ordered = slots.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.numel():
            raise PlanError(f"{what} {int(twice[0])} is named twice")
    if is_free[src].any():
        raise PlanError(f"source {int(src[is_free[src]][0])} is a free slot")
    raise PlanError(f"destination {int(dst[~is_free[dst]][0])} is not a free slot")


def _outside(slots: Tensor, size: int) -> Tensor:
    return (slots < 1) | (slots > size)


def _repeats(slots: Tensor, real: Tensor, size: int) -> Tensor:
    # Pairs that move nothing get a number of their own each, so that they never look alike.
    own = size + 1 + torch.arange(slots.shape[0], device=slots.device)
    ordered = torch.where(real, slots, own).sort().values
    return (ordered[1:] == ordered[:-1]).any()
