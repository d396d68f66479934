"""Move rows between slots in every buffer of every pool."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._load import ceil_div, interpreted, need_device, need_indices, overlaps_launches, programs
from .buffer_table import BufferTable, Shape, magic_of

# Chosen on an H200 (bench/README.md): 16 KiB tiles of four 16-byte vectors a thread.
UNITS, NARROW, WARPS = 1024, 2048, 8
KEEP = ""
CHECK_BLOCK, CHECK_WARPS, CHECK_PROGRAMS = 1024, 8, 264
VERDICT, HISTORY, VOIDED = 3, 4, 5


class Reason(enum.IntFlag):
    """Why a launch was voided."""

    SLOT_ZERO = 1
    OUT_OF_RANGE = 2
    DUPLICATE_DST = 4
    OVERLAP = 8
    DUPLICATE_SRC = 16


class Wave(NamedTuple):
    """A column slice of some neighbouring buffers, small enough to be staged for all rows."""

    first: int
    buffers: int
    column: int
    width: int
    unit: int


def relocate_rows(
    table: BufferTable,
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    disjoint: bool = False,
    distinct_src: bool = False,
) -> None:
    """Copy row `src[i]` to row `dst[i]` of every buffer, as `buf[dst] = buf[src].clone()`.

    `src` and `dst` are int32 or int64 [n] on the table's device. Entries with `dst == src` cost
    nothing and are never checked. With `disjoint` no destination may be a source: one pass at the
    memory's speed. Without it any permutation is allowed and rows pass through the table's staging
    memory, in column slices of at most half of it; ValueError if not even one byte of every row
    fits there.

    Duplicate destinations, slot 0 and slots outside the pool void the whole launch: on the CPU by
    ValueError, on a GPU without synchronising: `verdict(table)` and `table.state` tell. With
    `distinct_src`, which needs `disjoint`, duplicate sources void it too.
    """
    _check_arguments(table, src, dst, disjoint, distinct_src)
    if table.device.type == "cpu":
        check_moves_torch(table.slots, src, dst, disjoint=disjoint, distinct_src=distinct_src)
    need_device(table.device, "relocate_rows_torch")
    if src.numel():
        launch(table, src, dst, disjoint=disjoint, distinct_src=distinct_src)


def relocate_rows_torch(
    buffers: Sequence[torch.Tensor],
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    disjoint: bool = False,
    distinct_src: bool = False,
) -> None:
    """Reference of `relocate_rows` in plain torch; ValueError instead of a voided launch.

    Holds a copy of the moved rows of one buffer at a time.
    """
    if disjoint is False and distinct_src:
        raise ValueError("distinct_src needs disjoint moves")
    slots = min(int(b.shape[0]) for b in buffers)
    check_moves_torch(slots, src, dst, disjoint=disjoint, distinct_src=distinct_src)
    moving = src != dst
    source, target = src[moving].long(), dst[moving].long()
    for buffer in buffers:
        # Bytes, not values: a NaN's payload must survive, and fp8 has no indexing on the CPU.
        rows = buffer if buffer.ndim > 1 else buffer.unsqueeze(1)
        raw = rows.flatten(1).view(torch.uint8)
        raw[target] = raw[source].clone()


def check_moves_torch(
    slots: int,
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    disjoint: bool = False,
    distinct_src: bool = False,
) -> None:
    """Raise ValueError naming the rule and the first slots that a plan breaks."""
    moving = src != dst
    source, target = src[moving].long(), dst[moving].long()
    both = torch.cat([source, target])
    if bool((both == 0).any()):
        raise ValueError("slot 0 is the sink: it is neither a source nor a destination")
    _refuse(both[(both < 0) | (both >= slots)], f"slots outside 1..{slots - 1}")
    _refuse(_repeated(target), "duplicate destinations")
    if disjoint:
        _refuse(target[torch.isin(target, source)], "destinations are sources too")
    if distinct_src:
        _refuse(_repeated(source), "duplicate sources")


def launch(
    table: BufferTable,
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    disjoint: bool,
    distinct_src: bool = False,
) -> None:
    """Start the device check and the copy, whatever the device; see `relocate_rows`."""
    kernels = programs("_relocate")
    count = src.numel()
    source, target = src.view(torch.int32), dst.view(torch.int32)
    step, dst_step = source.numel() // count, target.numel() // count
    fatal = Reason.SLOT_ZERO | Reason.OUT_OF_RANGE | Reason.DUPLICATE_DST
    fatal |= Reason.OVERLAP if disjoint else Reason(0)
    fatal |= Reason.DUPLICATE_SRC if distinct_src else Reason(0)
    overlap = overlaps_launches(table.device)
    waves = () if disjoint else waves_of(table, count)
    kernels.check_moves[(min(ceil_div(count, CHECK_BLOCK), CHECK_PROGRAMS),)](
        source, target, step, dst_step, count, table.slots, int(disjoint), int(fatal),  # inputs
        table.claims, table.state,  # scratch and verdict
        BLOCK=CHECK_BLOCK, PDL=overlap, num_warps=CHECK_WARPS,  # constants
    )  # fmt: skip
    if disjoint:
        tiles = max(_tiles(g.shape, count) for g in table.groups)
        extra = {"launch_pdl": True} if overlap else {}
        kernels.copy_rows[(tiles, table.lines.shape[0])](
            table.lines, source, target, step, dst_step, count, table.state,  # inputs
            UNITS=UNITS, NARROW=NARROW, KEEP=KEEP, PDL=overlap, num_warps=WARPS, **extra,
        )  # fmt: skip
        return
    half = table.scratch_bytes // 32 * 16
    nothing = Wave(0, 0, 0, 1, 16)
    for k, (load, save) in enumerate(zip((*waves, nothing), (nothing, *waves), strict=True)):
        tiles = max(_tiles(Shape(w.unit, w.width), count) for w in (load, save) if w.buffers)
        kernels.stage_rows[(tiles, max(load.buffers, save.buffers), 2)](
            table.lines, source, target, step, dst_step, count, table.state, table.staging,
            *_numbers(load), k % 2 * half, *_numbers(save), (k + 1) % 2 * half,
            UNITS=UNITS, NARROW=NARROW, num_warps=WARPS,
        )  # fmt: skip


def waves_of(table: BufferTable, count: int) -> tuple[Wave, ...]:
    """Cut all buffers into slices whose `count` rows fit half of the staging memory.

    ValueError where not even one byte of every row fits: the caller must split the plan.
    """
    room = table.scratch_bytes // 32 * 16 // count
    if room < 1:
        raise ValueError(
            f"{count} overlapping moves need {2 * count + 32} bytes of staging memory, "
            f"the table has {table.scratch_bytes}"
        )
    waves: list[Wave] = []
    for first, buffers, (unit, words) in table.groups:
        # 64 bytes are two sectors: thinner slices would fetch each sector again and again, but a
        # thin slice is still right.
        cut = next(u for u in (unit, 4, 1) if u <= unit and u <= room)
        width, total = room // cut, words * (unit // cut)
        together = max(1, width // total)
        width = min(width, total)
        for b in range(0, buffers, together):
            many = min(together, buffers - b)
            for c in range(0, total, width):
                waves.append(Wave(first + b, many, c, min(width, total - c), cut))
    return tuple(waves)


def prewarm(table: BufferTable) -> None:
    """Build and load every variant that any later call needs; changes no byte of any buffer."""
    need_device(table.device, "relocate_rows_torch")
    for dtype in (torch.int32, torch.int64):
        stay = torch.zeros(1, dtype=dtype, device=table.device)
        launch(table, stay, stay, disjoint=True)
        launch(table, stay, stay, disjoint=False)


def verdict(table: BufferTable) -> Reason:
    """Read why the last launch was voided, 0 if it was not; waits for the device."""
    return Reason(int(table.state[VERDICT]))


def compiled_variants() -> int:
    """Count the compiled variants of the kernels behind `relocate_rows`, over all devices."""
    if interpreted():
        return 0
    kernels = programs("_relocate")
    found = (kernels.check_moves, kernels.copy_rows, kernels.stage_rows)
    return sum(len(caches[0]) for k in found for caches in k.device_caches.values())


def _numbers(wave: Wave) -> tuple[int, ...]:
    return (*wave[:4], magic_of(wave.width) & 0xFFFFFFFF, wave.unit)


def _tiles(shape: Shape, count: int) -> int:
    return ceil_div(shape.words * count, UNITS if shape.unit == 16 else NARROW)


def _check_arguments(
    table: BufferTable, src: torch.Tensor, dst: torch.Tensor, disjoint: bool, distinct_src: bool
) -> None:
    need_indices("src", src, table.device)
    need_indices("dst", dst, table.device)
    if src.numel() != dst.numel():
        raise ValueError(f"src has {src.numel()} entries, dst has {dst.numel()}")
    if distinct_src and not disjoint:
        raise ValueError("distinct_src needs disjoint moves")


def _repeated(slots: torch.Tensor) -> torch.Tensor:
    values, counts = torch.unique(slots, return_counts=True)
    return values[counts > 1]


def _refuse(slots: torch.Tensor, rule: str) -> None:
    if slots.numel():
        raise ValueError(f"{rule}: {slots[:8].tolist()}")
