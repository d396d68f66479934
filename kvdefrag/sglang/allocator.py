"""SGLang's token allocator with kvdefrag's placement, once a scheduler has taken it over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from torch import Tensor

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import Demand


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
            core.free_group_end()  # what is held back would be lost
            self.free_pages = core.surrender()

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
        if mark is None:
            return core.alloc(need_size)
        try:
            return _placed(core, mark, need_size)
        except Exception as fault:
            self.give_up(fault)
            stock = super().alloc(need_size)
            return stock

    def free(self, free_index: Tensor) -> None:
        if self.core is None:
            super().free(free_index)
        else:
            self.core.free(free_index)

    def free_group_begin(self) -> None:
        if self.core is None:
            super().free_group_begin()
        else:
            self.core.free_group_begin()

    def free_group_end(self) -> None:
        if self.core is None:
            super().free_group_end()
        else:
            self.core.free_group_end()

    def check_decode_capacity(self, *args: Any, num_tokens: int, **kwargs: Any) -> bool:
        """Say whether a decode step fits, reserved slots given back first (0.5.23 asks here)."""
        fits = bool(super().check_decode_capacity(*args, num_tokens=num_tokens, **kwargs))
        return fits or self.give_way(num_tokens)

    def give_way(self, count: int) -> bool:
        """Give reserved slots back until `count` are free; say whether they are."""
        return self.core is not None and self.core.make_room(count)

    def clear(self) -> None:
        super().clear()
        if self.core is not None:
            self.core.clear()
        if self.on_clear is not None:
            self.on_clear()

    def resize(self, config: Any) -> None:
        super().resize(config)
        if self.core is not None:
            self.core.resize(self.size)


def _placed(core: SlotAllocator, mark: Mark, count: int) -> Tensor | None:
    demand = mark.demand()
    if demand.total != count:
        # Somebody else's demand, whose rows are not known: the caller may write over what a row
        # has in reserve.
        core.make_room(core.size)
        return core.alloc(count)
    mark.make_room(core.slots_needed(demand))
    return core.alloc_for(demand)
