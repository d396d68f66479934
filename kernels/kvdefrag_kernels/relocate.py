"""Move rows between slots in every buffer of every pool."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from ._load import (
    ceil_div,
    interpreted,
    need_device,
    need_indices,
    overlaps_launches,
    programs,
)
from .buffer_table import BufferTable, Shape, served, signed_magic
from .overlap import hold, split_groups, stage, waves_of

# Chosen on an H200 by bench/tune.py. One warp a program: eight 16-byte vectors a thread, or four
# where the program must be ready for narrow rows too, which take registers.
UNITS, MIXED_UNITS, NARROW, WARPS = 256, 128, 256, 1
CHECK_BLOCK, CHECK_WARPS, CHECK_PROGRAMS = 256, 8, 264
VERDICT, HISTORY, VOIDED = 3, 4, 5


class Reason(enum.IntFlag):
    """Why a launch was voided."""

    SLOT_ZERO = 1
    OUT_OF_RANGE = 2
    DUPLICATE_DST = 4
    OVERLAP = 8
    DUPLICATE_SRC = 16


# As plain numbers: flags cost microseconds of host time in every call.
_ALWAYS = int(Reason.SLOT_ZERO | Reason.OUT_OF_RANGE | Reason.DUPLICATE_DST)
_OVERLAP, _DUPLICATE_SRC = int(Reason.OVERLAP), int(Reason.DUPLICATE_SRC)


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
    memory's speed. Without it any permutation is allowed: rows wait, in column slices, in the
    registers of one cooperative launch (16-byte units, up to 8,192 rows a multiprocessor), or else
    in the table's staging memory, of which half holds one slice; ValueError if not even one byte of
    every row fits there.

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
    step = source.numel() // count
    fatal = _ALWAYS | (_OVERLAP if disjoint else 0) | (_DUPLICATE_SRC if distinct_src else 0)
    pdl = overlaps_launches(table.device)
    if not disjoint:
        held, staged = split_groups(table, count)
        waves = waves_of(table, count, staged)
    plan = source, target, step, count
    block = 1024 if interpreted() else CHECK_BLOCK
    kernels.check_moves[(min(ceil_div(count, block), CHECK_PROGRAMS),)](
        *plan, table.slots, int(disjoint), fatal,  # inputs
        table.claims, table.state,  # scratch and verdict
        BLOCK=block, PDL=pdl, num_warps=CHECK_WARPS,  # constants
    )  # fmt: skip
    if disjoint:
        _copy(table, plan, pdl)
    else:
        hold(table, plan, held)
        stage(table, plan, waves)


def prewarm(table: BufferTable) -> None:
    """Build and load every variant that any later call needs; changes no byte of any buffer."""
    need_device(table.device, "relocate_rows_torch")
    for dtype in (torch.int32, torch.int64):
        stay = torch.zeros(1, dtype=dtype, device=table.device)
        launch(table, stay, stay, disjoint=True)
        launch(table, stay, stay, disjoint=False)
    stage(table, (stay.view(torch.int32),) * 2 + (2, 1), waves_of(table, 1, table.groups[:1]))


def verdict(table: BufferTable) -> Reason:
    """Read why the last launch was voided, 0 if it was not; waits for the device."""
    return Reason(int(table.state[VERDICT]))


def voided(table: BufferTable) -> torch.Tensor:
    """Return whether the last launch was voided, a bool scalar on the device; does not wait."""
    return table.state[VERDICT] != 0


def compiled_variants() -> int:
    """Count the compiled variants of the kernels behind `relocate_rows`, over all devices."""
    if interpreted():
        return 0
    kernels = programs("_relocate")
    others = programs("_overlap")
    found = (kernels.check_moves, kernels.copy_rows, others.stage_rows, others.hold_rows)
    return sum(len(caches[0]) for k in found for caches in k.device_caches.values())


def _copy(table: BufferTable, plan: Any, pdl: bool) -> None:
    mixed = any(g.shape.unit != 16 for g in table.groups)
    units, narrow = MIXED_UNITS if mixed else UNITS, NARROW
    if interpreted():
        units, narrow = 4096, 4096
    tiles = max(_copy_tiles(g.shape, plan[3], units, narrow) for g in table.groups)
    shape = table.groups[0].shape if len(table.groups) == 1 else Shape(0, 1, 0)
    programs("_relocate").copy_rows[(tiles, table.chunk_count)](
        table.lines, table.chunks, *plan, table.slots, table.state,
        table.lines.shape[0], served(shape.unit),
        shape.words, signed_magic(shape.words), shape.pitch, shape.unit,  # inputs
        UNITS=units, NARROW=narrow, MIXED=mixed, PDL=pdl, num_warps=WARPS,  # constants
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _copy_tiles(shape: Shape, count: int, units: int, narrow: int) -> int:
    # Wide units: whole rows where they nearly fill a tile. Narrow ones: up to 128 bytes of the
    # first tile lie before the first row.
    if shape.unit != 16:
        return ceil_div(shape.words * count + 128 // shape.unit, narrow)
    rows = units // shape.words
    if rows * shape.words * 5 >= units * 4:
        return ceil_div(count, rows)
    return ceil_div(shape.words * count, units)


def _check_arguments(
    table: BufferTable, src: torch.Tensor, dst: torch.Tensor, disjoint: bool, distinct_src: bool
) -> None:
    need_indices("src", src, table.device)
    need_indices("dst", dst, table.device)
    if src.numel() != dst.numel():
        raise ValueError(f"src has {src.numel()} entries, dst has {dst.numel()}")
    if src.dtype != dst.dtype:
        raise ValueError(f"src is {src.dtype}, dst is {dst.dtype}: give both the same")
    if distinct_src and not disjoint:
        raise ValueError("distinct_src needs disjoint moves")


def _repeated(slots: torch.Tensor) -> torch.Tensor:
    ordered = slots.sort().values
    return ordered[1:][ordered[1:] == ordered[:-1]]


def _refuse(slots: torch.Tensor, rule: str) -> None:
    if slots.numel():
        raise ValueError(f"{rule}: {slots[:8].tolist()}")
