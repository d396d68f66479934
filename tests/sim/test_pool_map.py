"""Who owns which slot, in an engine state made by hand, and how pictures of it are kept."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.sim.pool_map import MOST_CELLS, Album, draw, owners
from kvdefrag.sim.results import PoolMap

FREE, CACHED, RESERVED, SHARED, ROW_1, ROW_2, ROW_3 = range(7)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def state(size: int = 31, page: int = 8, *, reservation: bool = False):
    """Rows 1 and 3 live with prefixes 1..4 and 1..2; 5..7 and 8 private; 9 and 10 cached."""
    table = torch.zeros((5, 32), dtype=torch.int32)
    allocator = SlotAllocator(size, page=page, discipline="fifo")
    taken = allocator.alloc(10)
    assert taken is not None
    table[1, :7] = torch.arange(1, 8)
    table[3, :3] = torch.tensor([1, 2, 8])
    rows = SimpleNamespace(
        table=table.numpy(),
        protected_len=ints(0, 4, 0, 2, 0),
        allocated_len=ints(0, 7, 0, 3, 0),
        live_rows=lambda: ints(1, 3),
    )
    return SimpleNamespace(rows=rows, now=2.5), allocator


def test_every_slot_has_one_owner() -> None:
    engine, allocator = state()

    assert owners(engine, allocator).tolist() == [
        FREE,  # the sink
        *[SHARED] * 2,
        *[ROW_1] * 5,
        ROW_3,
        *[CACHED] * 2,
        *[FREE] * 21,
    ]


def test_reserved_slots_are_told_apart_from_those_in_use() -> None:
    table = torch.zeros((3, 32), dtype=torch.int32)
    allocator = SlotAllocator(31, page=8, table=table, reservation=True)
    slots = allocator.alloc_for(Demand(Kind.EXTEND, ints(2), ints(0), ints(5)))
    assert slots is not None
    table[2, :5] = slots
    rows = SimpleNamespace(
        table=table.numpy(),
        protected_len=ints(0, 0, 0),
        allocated_len=ints(0, 0, 5),
        live_rows=lambda: ints(2),
    )

    owner = owners(SimpleNamespace(rows=rows, now=0.0), allocator)

    assert owner[8:16].tolist() == [ROW_2] * 5 + [RESERVED] * 3
    assert np.count_nonzero(owner) == 8


def test_a_cell_shows_its_most_frequent_owner_ties_to_the_lower_number() -> None:
    engine, allocator = state()

    found = draw(engine, allocator, page=4)

    # Cells of 4: sink, shared, shared, row 1; row 1 four times; row 3, cached twice, free.
    assert found.owners.tolist() == [SHARED, ROW_1, CACHED, FREE, FREE, FREE, FREE, FREE]
    assert (found.slots_per_cell, found.time_s) == (4, 2.5)
    assert found.owners.dtype == np.uint16


def test_a_tie_goes_to_the_lower_number() -> None:
    engine, allocator = state()

    assert draw(engine, allocator, page=2).owners.tolist()[:5] == [FREE, SHARED, ROW_1, ROW_1,
                                                                   CACHED]  # fmt: skip


@pytest.mark.parametrize("cells", [MOST_CELLS, MOST_CELLS + 1])
def test_a_large_pool_is_drawn_in_larger_cells(cells: int) -> None:
    engine, allocator = state(size=cells * 8 - 1)

    found = draw(engine, allocator, page=8)

    assert found.slots_per_cell == (8 if cells == MOST_CELLS else 16)
    assert len(found.owners) <= MOST_CELLS


def test_an_album_keeps_a_bounded_number_of_maps_evenly_spread() -> None:
    album = Album(most=4)

    for moment in range(40):
        if album.due():
            album.add(PoolMap(float(moment), np.zeros(1, np.uint16), 1))
        assert len(album.maps) <= 4

    times = [m.time_s for m in album.maps]
    assert times[0] == 0
    assert len({b - a for a, b in pairwise(times)}) == 1
    assert times[-1] >= 20
