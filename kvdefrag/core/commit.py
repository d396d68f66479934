"""Carries a plan out: rows, holders, free list; all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.holders import Holder, remap_all
from kvdefrag.core.mover import Mover
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.plan_tenure import TenurePlan
from kvdefrag.core.view import EngineView


def commit_groups(
    view: EngineView, plan: TenurePlan, mover: Mover, free_list: TwoEnded
) -> TenurePlan:
    """Carry out a tenure plan: private tokens, named by their table row alone.

    The table is rewritten in place; no entry outside the groups changes, and none at all if the
    mover refuses the plan.

    Returns:
        The plan as it was carried out.
    """
    plan = plan.voided_if(mover.copy(plan.moves))
    table = view.table.view(-1)
    try:
        table[plan.index] = plan.after.to(table.dtype)
        free_list.substitute_front(plan.pages_used, plan.given)
    except BaseException:
        # The source rows still hold their bytes: naming them again undoes the move.
        table[plan.index] = plan.before.to(table.dtype)
        raise
    return plan


def commit_slots(
    plan: MovePlan, mover: Mover, holders: Sequence[Holder], free_list: TwoEnded, size: int
) -> MovePlan:
    """Carry out a plan whose slots several holders may name; nothing if the mover refuses it.

    Returns:
        The plan as it was carried out.
    """
    plan = plan.voided_if(mover.copy(plan))
    lut = torch.arange(size + 1, device=plan.src.device)
    inverse = lut.clone()
    lut[plan.src] = plan.dst
    inverse[plan.dst] = plan.src
    remap_all(holders, lut, inverse)
    try:
        free_list.substitute(plan.dst, plan.src)
    except BaseException:
        remap_all(holders, inverse, lut)
        raise
    return plan
