"""Gives rows the slots they lack: whole pages where there are any, single slots otherwise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvdefrag.core.demand import Demand, IntArray, Kind
from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.free_list import FreeList
from kvdefrag.core.ledger import Ledger
from kvdefrag.core.reservation import Reservations
from kvdefrag.core.room import pages_wanted
from kvdefrag.core.slot_checks import SlotChecks


class RowFiller:
    """Takes slots from a two-ended list for rows that may hold more than they need.

    Args:
        free_list: Where slots come from.
        book: What each row holds.
        checks: Is told what is handed out.
        ledger: Is told what is taken before anything else happens to it.
        page: Slots to an aligned page.
    """

    def __init__(
        self,
        free_list: TwoEnded,
        book: Reservations,
        checks: SlotChecks,
        ledger: Ledger,
        *,
        page: int,
    ) -> None:
        self._free_list, self._book, self._checks, self._page = free_list, book, checks, page
        self._ledger = ledger

    def fill(self, demand: Demand, lack: IntArray, *, whole_groups: bool) -> None:
        """Write slots into the rows of `demand` that lack some; enough are free.

        Args:
            demand: Who wants slots.
            lack: int64 [n], slots each request wants beyond those its row holds.
            whole_groups: Let a row that takes single slots go on with them for a page of tokens.
        """
        book, wanting = self._book, np.flatnonzero(lack)
        need, rows = lack[wanting], demand.rows[wanting]
        starts = (demand.starts + demand.counts)[wanting] - need
        pages = pages_wanted(book, demand, lack, whole_groups=whole_groups)[wanting]
        surplus = self._surplus(demand.kind, need, pages)
        # Prompts and whole pages come from the front, single slots from the back.
        front = (surplus >= 0) | (demand.kind is Kind.EXTEND)
        book.note_singles(rows, starts, ~front)
        sizes = need + np.maximum(surplus, 0)
        if whole_groups and demand.kind is Kind.SPECULATIVE:
            rest = np.where(front, 0, book.to_group_end(rows, starts + need))
            spare = self._free_list.available() - int(sizes.sum())
            sizes = sizes + np.where(np.cumsum(rest) <= spare, rest, 0)
        for some, take in (
            (front, self._free_list.take_front),
            (~front, self._free_list.take_back),
        ):
            if some.any():
                slots = self._ledger.take(take(int(sizes[some].sum())))
                self._checks.taken(slots)
                book.write(rows[some], starts[some], sizes[some], slots)

    def _surplus(self, kind: Kind, need: IntArray, pages: IntArray) -> IntArray:
        # What each request takes beyond its need to fill whole pages; -1 where it takes none.
        # Prompts take pages even if the list may have run out of whole ones: it then gives the
        # emptiest pages, which is the best there is.
        spare = self._free_list.available() - int(need.sum())
        limit = self._free_list.whole_pages()
        surplus = np.full(need.shape[0], -1, dtype=np.int64)
        for i in range(need.shape[0]):
            count = int(pages[i])
            extra = count * self._page - int(need[i])
            if count and extra <= spare and (count <= limit or kind is Kind.EXTEND):
                surplus[i] = extra
                spare -= extra
                limit -= count
        return surplus


def take_aligned(free_list: FreeList, ledger: Ledger, demand: Demand, *, page: int) -> Tensor:
    """Take the slots of `demand` in pages of each request's own, as long as there are enough.

    What is left of each request's last page stays free.
    """
    padded = (-(-demand.counts // page)) * page
    if not 0 < int(padded.sum()) <= free_list.available():
        return ledger.take(free_list.take_front(demand.total))
    taken = ledger.take(free_list.take_front(int(padded.sum())))
    ends = np.cumsum(padded)
    starts = ends - padded
    pieces = [(int(s), int(n), int(e)) for s, n, e in zip(starts, demand.counts, ends, strict=True)]
    free_list.put(torch.cat([taken[s + n : e] for s, n, e in pieces]))
    return torch.cat([taken[s : s + n] for s, n, _ in pieces])
