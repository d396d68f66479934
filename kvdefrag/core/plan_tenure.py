"""Tenure: copy decode tokens, a page's worth at a time, into whole free pages.

A row is walked from the position up to which it needs no tenure, one group of a page of tokens to
a plan:

    the row has begun an aligned page before that position and fills it in order
                                          -> the walk goes on behind that page
    an aligned page begins there          -> it stays; the walk goes on behind it
    an aligned page begins further on, within the group
                                          -> the few tokens before it stay left over: moving the
                                             group would break that page
    otherwise                             -> the group moves into a whole free page, if there is one

The last page may still be filling: as far as tokens are committed it must be in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvdefrag.core.demand import IntArray
from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.view import EngineView, to_device


@dataclass(frozen=True)
class TenurePlan:
    """At most one group of a page of tokens from each row, and where it goes.

    Attributes:
        moves: The plan, `[lanes * page]` pairs.
        index: int64 [lanes, page], flat table positions of each lane's tokens; position 0 where
            there is no group.
        before, after: int64 [lanes, page], slots at those positions before and after.
        pages_used: bool [lanes], which candidate pages are used up.
        given: int64 [lanes, page], what becomes free in place of each candidate page.
        reached: int64 [lanes], position up to which the lane's row needs no tenure any more.
        of: int64 [n], index into the view of the first n lanes; the others are padding.
    """

    moves: MovePlan
    index: Tensor
    before: Tensor
    after: Tensor
    pages_used: Tensor
    given: Tensor
    reached: Tensor
    of: IntArray

    def voided_if(self, refused: Tensor | None) -> TenurePlan:
        """Return a plan of the same shape that changes nothing where `refused` is set."""
        if refused is None:
            return self
        return replace(
            self,
            moves=self.moves.voided_if(refused),
            after=torch.where(refused, self.before, self.after),
            pages_used=self.pages_used & ~refused,
            reached=torch.where(refused, 0, self.reached),
        )


def plan_tenure(
    view: EngineView, starts: IntArray, free_list: TwoEnded, *, page: int, max_groups: int
) -> TenurePlan | None:
    """Plan to move whole groups of committed tokens that lie outside aligned pages.

    Args:
        view: The running requests.
        starts: int64 [n], position in each row from which tokens may be outside pages; at or
            past `protected`.
        free_list: Where whole free pages come from; in canonical order.
        page: Tokens to a group.
        max_groups: Groups at most; rows that come later in the view wait.

    Returns:
        The plan, its shape a power of two, or None if no row has a whole group waiting.
    """
    of = waiting(view, starts, page=page, max_groups=max_groups)
    if of is None:
        return None
    host = walks(view, starts, of)
    host[0] *= view.table.shape[1]
    row, base, limit = to_device(host, view.device)
    walk = _Walk(view.table.view(-1), row, limit, page)
    start = walk.behind_begun_page(base)
    skip = walk.next_page(start)
    fits = start + page <= limit
    steps = torch.arange(page, device=view.device)
    index = torch.where(fits[:, None], row[:, None] + start[:, None] + steps, 0)
    before = view.table.view(-1)[index].long()
    in_page = fits & (skip == 0)
    return _place(free_list, index, before, fits & (skip == page), in_page, start, skip, of)


def waiting(view: EngineView, starts: IntArray, *, page: int, max_groups: int) -> IntArray | None:
    """Return the indices of the rows that a plan looks at, int64 [n]; None for none."""
    of = np.flatnonzero(view.committed - starts >= page)[:max_groups]
    return of if of.size else None


def walks(view: EngineView, starts: IntArray, of: IntArray) -> IntArray:
    """Return where each lane begins: int64 [3, lanes], row, position and committed tokens.

    As many lanes as the next power of two; those beyond `of` are all zero and hold no token.
    """
    host = np.zeros((3, 1 << (int(of.size) - 1).bit_length()), dtype=np.int64)
    host[:, : of.size] = view.rows[of], starts[of], view.committed[of]
    return host


class _Walk:
    # Looks at stretches of rows; positions at or past `limit` count as whatever is hoped for.
    def __init__(self, table: Tensor, row: Tensor, limit: Tensor, page: int) -> None:
        self._table, self._row, self._limit, self._page = table, row, limit, page
        self._steps = torch.arange(2 * page, device=table.device)

    def behind_begun_page(self, base: Tensor) -> Tensor:
        page = self._page
        slot = self._table[self._row + base].long()
        offset = slot % page
        position = (base - offset)[:, None] + self._steps[:page]
        actual, known = self._read(position)
        expected = (slot - offset)[:, None] + self._steps[:page]
        begun = ((actual == expected) | ~known).all(1) & (base >= offset) & (slot >= page)
        return torch.where(begun & (offset > 0), base + page - offset, base)

    def next_page(self, start: Tensor) -> Tensor:
        # Distance from `start` to the first token within a page's reach that begins an aligned
        # page; `page` if there is none.
        page = self._page
        slots, known = self._read(start[:, None] + self._steps)
        breaks = known & (slots != slots.roll(1, 1) + 1)
        until = breaks.cumsum(1)
        # No break behind token q up to q + page - 1: the run that holds q reaches that far.
        in_order = until[:, page - 1 : -1] == until[:, :page]
        first = slots[:, :page]
        begins = in_order & known[:, :page] & (first % page == 0) & (first >= page)
        nearest = begins.long().argmax(1)
        return torch.where(begins.any(1), nearest, page)

    def _read(self, position: Tensor) -> tuple[Tensor, Tensor]:
        known = (position >= 0) & (position < self._limit[:, None])
        at = self._row[:, None] + torch.where(known, position, 0)
        return self._table[at].long(), known


def _place(
    free_list: TwoEnded,
    index: Tensor,
    before: Tensor,
    wanting: Tensor,
    in_page: Tensor,
    start: Tensor,
    skip: Tensor,
    of: IntArray,
) -> TenurePlan:
    lanes, page = before.shape
    candidates, whole = free_list.front_pages(lanes)
    rank = (wanting.cumsum(0) - 1).clamp(min=0)
    moved = wanting & whole[rank]
    after = torch.where(moved[:, None], candidates[rank], before)
    moves = MovePlan(
        src=torch.where(moved[:, None], before, 0).flatten(),
        dst=torch.where(moved[:, None], after, 0).flatten(),
    )
    used = torch.arange(lanes, device=before.device) < moved.sum()
    # Row `lanes` of the scratch takes what does not move.
    given = torch.zeros((lanes + 1, page), dtype=torch.int64, device=before.device)
    given[torch.where(moved, rank, lanes)] = before
    passed = torch.where(in_page | moved, page, torch.where(skip < page, skip, 0))
    return TenurePlan(moves, index, before, after, used, given[:lanes], start + passed, of)
