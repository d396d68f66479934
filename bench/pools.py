"""Pools, plans and checks that the copy cases share."""

from __future__ import annotations

import functools
import math

import torch

from kvdefrag_kernels import BufferTable, prewarm

Plan = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def pool(layers: int, row_bytes: int, slots: int) -> tuple[torch.Tensor, ...]:
    """Allocate random bytes: one tensor [slots, row_bytes] a layer (K and V count as two)."""
    buffers = []
    for _ in range(layers):
        whole = torch.empty(slots * row_bytes + 8, dtype=torch.uint8, device="cuda")
        whole[: whole.numel() // 8 * 8].view(torch.int64).random_()
        buffers.append(whole[: slots * row_bytes].view(slots, row_bytes))
    return tuple(buffers)


@functools.cache
def table_of(layers: int, row_bytes: int, slots: int) -> BufferTable:
    """Build and warm our table over a pool."""
    table = BufferTable(pool(layers, row_bytes, slots))
    prewarm(table)
    return table


@functools.cache
def plan(slots: int, rows: int, destinations: str) -> Plan:
    """Choose shuffled sources; destinations contiguous, shuffled, or overlapping the sources."""
    random = torch.Generator().manual_seed(rows)
    order = torch.randperm(slots - 1 - rows, generator=random) + 1
    src = order[:rows].cuda()
    if destinations == "contiguous":
        return src, torch.arange(slots - rows, slots, device="cuda")
    if destinations == "shuffled":
        return src, order[rows : 2 * rows].cuda()
    if destinations == "shift":
        src = torch.arange(1, rows + 1, device="cuda")
        return src, src + 1
    return src, src[torch.randperm(rows, generator=random).cuda()]  # a permutation of the sources


class Expected:
    """Remembers what two buffers must hold after a disjoint move, and raises if they do not."""

    def __init__(self, buffers: tuple[torch.Tensor, ...], src: torch.Tensor, dst: torch.Tensor):
        self.dst = dst
        self.watched = [buffers[0], buffers[-1]]
        self.rows = [b[src].clone() for b in self.watched]

    def __call__(self) -> None:
        for buffer, rows in zip(self.watched, self.rows, strict=True):
            if not torch.equal(buffer[self.dst], rows):
                raise AssertionError("wrong bytes after the move")


def poison(buffers: tuple[torch.Tensor, ...], dst: torch.Tensor) -> None:
    """Overwrite the destinations of the watched buffers, so that a move left out is seen."""
    for buffer in (buffers[0], buffers[-1]):
        buffer[dst] = 0xA5


def sector_ceiling(row_bytes: int, destinations: str, *, sector: int = 32) -> float:
    """Share of the roof left when memory moves whole sectors of 32 bytes (or 64, see README).

    A row at byte offset o touches ceil((o % sector + row) / sector) sectors, averaged over the
    offsets that consecutive slots have. Sources are read so. Contiguous destinations fill their
    sectors together, so they cost their own bytes; scattered ones write whole sectors too, and
    read those that they cover in part.
    """
    starts = range(0, sector, math.gcd(row_bytes, sector))
    touched = sum(math.ceil((o + row_bytes) / sector) for o in starts) / len(starts)
    parts = sum((o % sector > 0) + ((o + row_bytes) % sector > 0) for o in starts) / len(starts)
    written = row_bytes if destinations == "contiguous" else sector * (touched + parts)
    return 2 * row_bytes / (sector * touched + written)
