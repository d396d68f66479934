"""The slot allocator: SGLang's contract, kvdefrag's placement."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.disciplines import (
    Discipline,
    TwoEnded,
    check_page,
    make_free_list,
    make_reservations,
    two_ended_only,
)
from kvdefrag.core.giving import Giving
from kvdefrag.core.ledger import Ledger
from kvdefrag.core.readback import Readback
from kvdefrag.core.reservation import Reservations
from kvdefrag.core.row_filler import RowFiller, take_aligned
from kvdefrag.core.slot_checks import Checks, make_checks
from kvdefrag.errors import IntegrityError, SlotError


class SlotAllocator:
    """Hands out KV slots 1..size and takes them back.

    Args:
        size: Number of slots; slot 0 is the sink and never handed out.
        table: int32 [rows, width], the engine's `req_to_token`; needed for reservation.
        page: Slots to an aligned page, a power of two.
        discipline: `fifo` and `sorted` are SGLang's orders, slot for slot.
        reservation: Let each row own the rest of its last page, taken a page at a time.
        reorder_interval: Decode allocations between two renewals of the two-ended order.
        evict_for_pages: Whether `room.make_room` evicts on while whole pages are short.
        checks: What a wrong free does: raise, be counted and ignored, or go unseen.
        device: Where the free list lives.
        readback: Late results from the device; by default delivered at once (CPU).

    Attributes:
        whole_groups: Let a row that had to take single slots go on with them for a whole page of
            tokens: somebody will move such groups into pages, and a page begun amid a group
            would leave a rest that fits nowhere.

    Raises:
        ConfigError: `page` is no power of two, or reservation lacks a table or two ends.
    """

    def __init__(
        self,
        size: int,
        *,
        table: Tensor | None = None,
        page: int = 64,
        discipline: Discipline = "two_ended",
        reservation: bool = False,
        reorder_interval: int = 16,
        evict_for_pages: bool = False,
        checks: Checks = "strict",
        device: torch.device | str = "cpu",
        readback: Readback | None = None,
    ) -> None:
        self.size = size
        self.page = page
        self.discipline: Discipline = discipline
        self.evict_for_pages = evict_for_pages
        self._device = torch.device(device)
        self._reorder_interval = reorder_interval
        self._since_reorder = 0
        check_page(page)
        self.checks = make_checks(size, checks, self._device)
        self.free_list = make_free_list(size, discipline, page, self._device, readback)
        self._two_ended = two_ended_only(self.free_list)
        self.reservations = make_reservations(table, page, reservation, discipline)
        self._ledger = Ledger()
        self._filler = self._make_filler()
        self._giving = self._make_giving()
        self._group: list[Tensor] | None = None
        self.whole_groups = False

    @property
    def two_ended(self) -> TwoEnded | None:
        """The two-ended list, or None under SGLang's own orders."""
        return self._two_ended

    def available_size(self) -> int:
        """Return the number of free slots; reserved ones are not among them."""
        return self.free_list.available()

    def reserved_size(self) -> int:
        """Return the number of slots that rows hold beyond their allocated length."""
        return self.reservations.size() if self.reservations else 0

    def count_whole_pages(self) -> int:
        """Return how many whole pages are surely free, with all freed slots sorted in."""
        if self._two_ended is None:
            return 0
        self._sort_in()
        return self._two_ended.whole_pages()

    def alloc(self, count: int) -> Tensor | None:
        """Hand out `count` slots for an unnamed purpose.

        Returns:
            int64 [count], or None if fewer are free; nothing changes then.

        Raises:
            SlotError: `count` is negative.
        """
        if count < 0:
            raise SlotError(f"cannot allocate {count} slots: the count must be 0 or more")
        self._ledger.begin()
        if not self._make_room(count):
            return None
        return self._taken(self._take_back(count))

    def alloc_for(self, demand: Demand) -> Tensor | None:
        """Hand out the slots of `demand`, placed for what they are for.

        Slots beyond those asked for are written into the rows as reserved; the caller writes
        the returned ones.

        Returns:
            int64 [sum(counts)] in request order, or None if too few are free; nothing changes
            then but reservations of others that were given back.
        """
        self._ledger.begin(demand)
        if self.reservations is not None:
            return self._alloc_reserved(demand, self.reservations)
        if not self._make_room(demand.total):
            return None
        if demand.kind is Kind.EXTEND and self._two_ended is not None and demand.total:
            return self._alloc_aligned(demand)
        return self._taken(self._take_back(demand.total))

    def free(self, slots: Tensor) -> None:
        """Take slots back.

        Raises:
            SlotError: Under `strict`, a slot is not live, out of range or named twice; nothing
                is freed then.
        """
        if slots.shape[0] == 0:
            return
        if self._group is not None:
            # Cloned: the caller may rewrite its table row before the group ends.
            self._group.append(slots.to(torch.int64, copy=True))
            return
        self._give(slots.to(torch.int64))

    def free_group_begin(self) -> None:
        """Hold back frees until `free_group_end()`.

        Raises:
            IntegrityError: A group is open already; a second one would lose its slots.
        """
        if self._group is not None:
            raise IntegrityError(f"a free group of {len(self._group)} frees is open already")
        self._group = []

    def free_group_end(self) -> None:
        """Free what was held back, as one call."""
        group, self._group = self._group, None
        if not group:
            return
        slots = torch.cat(group)
        self._ledger.leave(slots)
        try:
            self.free(slots)
        except SlotError:
            # One wrong slot must not cost the others: each free by itself, the first error last.
            self._free_each(group)
            self._ledger.arrive()
            raise
        self._ledger.arrive()

    @property
    def in_free_group(self) -> bool:
        """Whether frees are being held back."""
        return self._group is not None

    def release(self, row: int, length: int) -> None:
        """Take back what `row` holds beyond `length` tokens, as its request leaves it."""
        if self.reservations is None:
            return
        slots = self.reservations.give_back(row, length)
        self._ledger.leave(slots)
        self.free(slots)
        self._ledger.arrive()
        self.reservations.forget(row)

    def make_room(self, count: int) -> bool:
        """Give reserved slots back until `count` are free; say whether they are."""
        return self._make_room(count)

    def begin(self) -> None:
        """Note that the latest allocation has reached who asked for it."""
        self._ledger.begin()

    def withdraw(self) -> None:
        """Take the latest allocation back, however far a fault let it get.

        Only `surrender` is of use then.
        """
        if self.reservations is not None and self._ledger.demand is not None:
            self.reservations.withdraw(self._ledger.demand)
        self._ledger.withdraw()

    def surrender(self) -> Tensor:
        """Return all free and reserved slots, int64, for another list; this one is done with.

        After a fault amid an allocation or a free some are named twice.
        """
        parts = [self.free_list.slots(), *self._ledger.adrift()]
        if self.reservations is not None:
            parts.append(self.reservations.reserved())
            self.reservations.clear()
        return torch.cat(parts)

    def clear(self) -> None:
        """Make every slot free again."""
        self.free_list.clear(self.size)
        self.checks.clear(self.size)
        self._since_reorder = 0
        self._group = None
        self._ledger.clear()
        if self.reservations is not None:
            self.reservations.clear()

    def resize(self, size: int) -> None:
        """Hold 1..size from now on, all free."""
        self.size = size
        self.clear()

    def free_slots(self) -> Tensor:
        """Return a copy of the free slots, int64, in list order."""
        return self.free_list.slots().clone()

    def commit_moves(self, src: Tensor, dst: Tensor) -> None:
        """Note that rows moved from `src` to `dst`, both int64 [n]; equal pairs change nothing."""
        self.checks.moved(src, dst)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the free list is a set in 1..size, as long as counted."""
        slots = self.free_slots().cpu()
        distinct = torch.unique(slots).shape[0]
        outside = int(((slots < 1) | (slots > self.size)).sum())
        if distinct != self.available_size() or slots.shape[0] != distinct or outside:
            raise IntegrityError(
                f"free list: {self.available_size()} counted, {slots.shape[0]} listed, "
                f"{distinct} distinct, {outside} outside 1..{self.size}"
            )

    def _alloc_aligned(self, demand: Demand) -> Tensor:
        # Each prompt starts on a page boundary; what is left of its last page stays free.
        self._sort_in()
        return self._taken(take_aligned(self.free_list, self._ledger, demand, page=self.page))

    def _alloc_reserved(self, demand: Demand, book: Reservations) -> Tensor | None:
        assert self._filler is not None
        assert self._giving is not None
        self._giving.part_with_estranged(demand)
        lack = book.lacking(demand)
        if lack.any():
            if demand.kind is Kind.EXTEND:
                self._sort_in()
            if not self._make_room(int(lack.sum()), demand):
                return None
            self._filler.fill(demand, lack, whole_groups=self.whole_groups)
        if self._pages_run_short(demand):
            self._tick()
        book.commit(demand)
        return book.read(demand)

    def _pages_run_short(self, demand: Demand) -> bool:
        # While every row can have a page the order of the rest does not matter, and sorting it
        # is the dearest thing that a decode step could do.
        return self._two_ended is None or self._two_ended.whole_pages() < demand.rows.shape[0]

    def _make_filler(self) -> RowFiller | None:
        if self.reservations is None or self._two_ended is None:
            return None
        return RowFiller(
            self._two_ended, self.reservations, self.checks, self._ledger, page=self.page
        )

    def _make_giving(self) -> Giving | None:
        if self.reservations is None:
            return None
        return Giving(self.reservations, self.free_list, self.checks, self._ledger)

    def _make_room(self, count: int, demand: Demand | None = None) -> bool:
        # Reserved slots go back first when slots run out: all but those that are asked for now.
        if count <= self.available_size() or self._giving is None:
            return count <= self.available_size()
        return self._giving.make_room(count, demand)

    def _sort_in(self) -> None:
        if self._two_ended is not None and self._two_ended.dirty:
            self._two_ended.reorder()
            self._since_reorder = 0

    def _take_back(self, count: int) -> Tensor:
        self._tick()
        return self._ledger.take(self.free_list.take_back(count))

    def _tick(self) -> None:
        if self._two_ended is None:
            return
        self._since_reorder += 1
        if self._since_reorder >= self._reorder_interval and self._two_ended.dirty:
            self._two_ended.reorder()
            self._since_reorder = 0

    def _free_each(self, group: list[Tensor]) -> None:
        for slots in group:
            with suppress(SlotError):
                self.free(slots)

    def _give(self, slots: Tensor) -> None:
        self.free_list.put(self.checks.admit(slots))

    def _taken(self, slots: Tensor) -> Tensor:
        self.checks.taken(slots)
        return slots
