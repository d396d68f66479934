"""SGLang's token allocator with kvdefrag's placement, once a scheduler has taken it over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from torch import Tensor

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import Demand
from kvdefrag.core.room import make_room
from kvdefrag.errors import SlotError


class Mark(Protocol):
    """Says who is about to allocate."""

    def demand(self) -> Demand:
        """Return what the caller wants; asked for inside the allocation."""
        ...

    def make_room(self, count: int) -> None:
        """Evict cached prefixes until `count` slots are free, as far as that goes."""
        ...


class KvdefragAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """Stock until `take_over`, and for whoever never calls it.

    A sub-allocator of another allocator is built from this class too; it stays stock.

    Attributes:
        core: Places the slots; None while stock.
        mark: Who is about to allocate, or None.
        on_clear: Called once every slot is free again: nobody runs any more.
        on_fault: Called with an exception of ours, once this is stock again.
    """

    core: SlotAllocator | None = None
    mark: Mark | None = None
    on_clear: Callable[[], None] | None = None
    on_fault: Callable[[Exception], None] | None = None

    def take_over(self, core: SlotAllocator) -> None:
        """Hand out slots by `core` from now on; every slot must be free."""
        if self.available_size() != self.size or core.size != self.size:
            raise ValueError(
                f"{self.available_size()} of {self.size} slots are free, {core.size} in the core"
            )
        self.core = core

    def hand_back(self) -> None:
        """Be stock again, with the slots that are free now; reserved ones are freed."""
        if self.core is not None:
            core, self.core = self.core, None
            with suppress(Exception):
                core.free_group_end()
            self.free_pages = torch.unique(core.surrender())

    def give_up(self, fault: Exception) -> None:
        """Be stock again after a fault of ours, and tell whoever wants to know."""
        self.hand_back()
        if self.on_fault is not None:
            self.on_fault(fault)

    @property
    def free_pages(self) -> Tensor:
        """The free slots, int64, in list order."""
        return self._stock_free if self.core is None else self.core.free_slots()

    @free_pages.setter
    def free_pages(self, slots: Tensor) -> None:
        self._stock_free = slots

    @property
    def release_pages(self) -> Tensor:
        """Slots that stock keeps aside until it sorts; none once taken over."""
        return self._stock_aside if self.core is None else self._stock_aside[:0]

    @release_pages.setter
    def release_pages(self, slots: Tensor) -> None:
        self._stock_aside = slots

    def available_size(self) -> int:
        return super().available_size() if self.core is None else self.core.available_size()

    def get_all_free_pages(self) -> Tensor:
        if self.core is not None:
            return self.core.free_slots()
        return torch.cat((self._stock_free, self._stock_aside))

    def alloc(self, need_size: int) -> Tensor | None:
        core, mark = self.core, self.mark
        if core is None:
            stock: Tensor | None = super().alloc(need_size)
            return stock
        self.mark = None
        core.begin()
        try:
            slots = core.alloc(need_size) if mark is None else _placed(core, mark, need_size)
        except Exception as fault:
            if mark is None and isinstance(fault, SlotError):
                raise  # the caller's own
            core.withdraw()
            self.give_up(fault)
        # Eviction may have met a fault: what the core gives then is no longer its to give.
        return slots if self.core is core else super().alloc(need_size)

    def free(self, free_index: Tensor) -> None:
        if self.core is None:
            super().free(free_index)
            return
        try:
            self.core.free(free_index)
        except SlotError:
            raise
        except Exception as fault:
            self.give_up(fault)
            # Whether it got as far as the list is not known.
            freed = free_index.to(torch.int64)
            self.free_pages = torch.unique(torch.cat((self.free_pages, freed)))

    def free_group_begin(self) -> None:
        if self.core is None:
            super().free_group_begin()
        else:
            self.core.free_group_begin()

    def free_group_end(self) -> None:
        if self.core is None:
            super().free_group_end()
            return
        try:
            self.core.free_group_end()
        except SlotError:
            raise
        except Exception as fault:
            self.give_up(fault)

    def check_decode_capacity(self, *args: Any, num_tokens: int, **kwargs: Any) -> bool:
        """Say whether a decode step fits (0.5.23 asks here); see `fits`."""
        fits = bool(super().check_decode_capacity(*args, num_tokens=num_tokens, **kwargs))
        return fits or self.fits(num_tokens)

    def fits(self, count: int) -> bool:
        """Say whether `count` slots for running rows are to be had, without giving any back.

        A reserved slot either serves the row that holds it or is given back when another row
        needs it, at the allocation and no earlier: all of them count.
        """
        core = self.core
        return core is not None and count <= core.available_size() + core.reserved_size()

    def clear(self) -> None:
        super().clear()
        self._anew(lambda core: core.clear())

    def resize(self, config: Any) -> None:
        super().resize(config)
        self._anew(lambda core: core.resize(self.size))

    def _anew(self, restart: Callable[[SlotAllocator], None]) -> None:
        # Stock has every slot free by now, whatever ours does.
        try:
            if self.core is not None:
                restart(self.core)
            if self.on_clear is not None:
                self.on_clear()
        except Exception as fault:
            self.core = None
            if self.on_fault is not None:
                self.on_fault(fault)


def _placed(core: SlotAllocator, mark: Mark, count: int) -> Tensor | None:
    demand = mark.demand()
    if demand.total != count:
        # Somebody else's demand, whose rows are not known: the caller may write over what a row
        # has in reserve.
        core.make_room(core.size)
        return core.alloc(count)
    make_room(core, demand, mark.make_room)
    return core.alloc_for(demand)
