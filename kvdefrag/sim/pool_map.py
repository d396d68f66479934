"""Pictures of the pool: who owns each slot, a few dozen times over a run."""

from __future__ import annotations

import numpy as np

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.sim.measured import Measured
from kvdefrag.sim.results import PoolMap

FREE, CACHED, RESERVED, SHARED, FIRST_ROW = 0, 1, 2, 3, 4
MOST_CELLS = 16_384


def owners(engine: Measured, allocator: SlotAllocator) -> IntArray:
    """Return the owner of slots 0..size, int64, coded as `PoolMap.owners`."""
    owner = np.full(allocator.size + 1, CACHED, dtype=np.int64)
    rows = engine.rows
    for row in engine.rows.live_rows().tolist():
        shared = rows.table[row, : rows.protected_len[row]]
        owner[shared] = np.where(owner[shared] == CACHED, FIRST_ROW + row - 1, SHARED)
        begin, end = int(rows.protected_len[row]), int(rows.allocated_len[row])
        owner[rows.table[row, begin:end]] = FIRST_ROW + row - 1
        if allocator.reservations is not None:
            owner[rows.table[row, end : int(allocator.reservations.held[row])]] = RESERVED
    owner[allocator.free_slots().numpy()] = FREE
    owner[0] = FREE
    return owner


def draw(engine: Measured, allocator: SlotAllocator, *, page: int) -> PoolMap:
    """Return the pool as it is now, in cells of whole pages."""
    owner = owners(engine, allocator)
    per_cell = page
    while -(-owner.shape[0] // per_cell) > MOST_CELLS:
        per_cell *= 2
    cells = -(-owner.shape[0] // per_cell)
    kinds = int(owner.max()) + 1
    at = np.arange(owner.shape[0]) // per_cell * kinds + owner
    votes = np.bincount(at, minlength=cells * kinds).reshape(cells, kinds)
    return PoolMap(engine.now, votes.argmax(1).astype(np.uint16), per_cell)


class Album:
    """Keeps at most `most` maps, evenly spread however long the run turns out to be."""

    def __init__(self, most: int = 24) -> None:
        self._most = most
        self._every = 1
        self._offered = 0
        self.maps: list[PoolMap] = []

    def due(self) -> bool:
        """Count one opportunity and say whether to take a map now."""
        self._offered += 1
        return (self._offered - 1) % self._every == 0

    def add(self, new: PoolMap) -> None:
        """Keep a map; when there are too many, every other one goes and the pace halves."""
        self.maps.append(new)
        if len(self.maps) > self._most:
            self.maps = self.maps[::2]
            self._every *= 2
