"""Move rows between slots in every buffer of every pool."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._load import (
    ceil_div,
    interpreted,
    meets,
    need_device,
    need_indices,
    overlaps_launches,
    programs,
)
from .buffer_table import BufferTable, Group, Shape, served, signed_magic

# Chosen on an H200 by bench/tune.py. One warp a program: eight 16-byte vectors a thread, or four
# where the program must be ready for narrow rows too, which take registers.
UNITS, MIXED_UNITS, NARROW, WARPS = 256, 128, 256, 1
CHECK_BLOCK, CHECK_WARPS, CHECK_PROGRAMS = 256, 8, 264
STAGE_UNITS, STAGE_NARROW, STAGE_WARPS = 1024, 2048, 8
# Half of each multiprocessor's 256 KiB of registers holds rows of an overlapping move.
HOLD_UNITS, HOLD_WARPS, HOLD_REGISTERS = 8192, 16, 128
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
    step = source.numel() // count
    fatal = _ALWAYS | (_OVERLAP if disjoint else 0) | (_DUPLICATE_SRC if distinct_src else 0)
    pdl = overlaps_launches(table.device)
    if not disjoint:
        held, staged = _split_groups(table, count)
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
        _hold(table, plan, held)
        _stage(table, plan, waves)


def waves_of(table: BufferTable, count: int, groups: Sequence[Group]) -> tuple[Wave, ...]:
    """Cut the buffers of `groups` into slices whose rows fit half of the staging memory.

    ValueError where not even one byte of every row fits: the caller must split the plan.
    """
    room = table.scratch_bytes // 32 * 16 // count
    if groups and room < 1:
        raise ValueError(
            f"{count} overlapping moves need {2 * count + 32} bytes of staging memory, "
            f"the table has {table.scratch_bytes}"
        )
    waves: list[Wave] = []
    for first, buffers, (unit, words, _) in groups:
        cut = next(u for u in (unit, 4, 1) if u <= unit and u <= room)
        total = words * (unit // cut)
        slices = ceil_div(total, room // cut)
        width = ceil_div(total, slices)
        together = max(1, room // cut // width)
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
    _stage(table, (stay.view(torch.int32),) * 2 + (2, 1), waves_of(table, 1, table.groups[:1]))


def verdict(table: BufferTable) -> Reason:
    """Read why the last launch was voided, 0 if it was not; waits for the device."""
    return Reason(int(table.state[VERDICT]))


def compiled_variants() -> int:
    """Count the compiled variants of the kernels behind `relocate_rows`, over all devices."""
    if interpreted():
        return 0
    kernels = programs("_relocate")
    found = (kernels.check_moves, kernels.copy_rows, kernels.stage_rows, kernels.hold_rows)
    return sum(len(caches[0]) for k in found for caches in k.device_caches.values())


def _split_groups(table: BufferTable, count: int) -> tuple[list[Group], list[Group]]:
    # What registers can hold, and what must pass through the staging memory: rows that are not
    # cut into 16-byte units, more rows than one wave has units, devices without grid barriers.
    most = _resident(table.device) * HOLD_UNITS
    held = [g for g in table.groups if g.shape.unit == 16 and count <= most]
    return held, [g for g in table.groups if g not in held]


def _resident(device: torch.device) -> int:
    if not meets(device):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _copy(table: BufferTable, plan: Any, pdl: bool) -> None:
    mixed = any(g.shape.unit != 16 for g in table.groups)
    units, narrow = MIXED_UNITS if mixed else UNITS, NARROW
    if interpreted():
        units, narrow = 4096, 4096
    tiles = max(_copy_tiles(g.shape, plan[3], units, narrow) for g in table.groups)
    shape = table.groups[0].shape if len(table.groups) == 1 else Shape(0, 1, 0)
    programs("_relocate").copy_rows[(tiles, table.chunk_count)](
        table.lines, table.chunks, *plan, table.state, table.lines.shape[0], served(shape.unit),
        shape.words, signed_magic(shape.words), shape.pitch, shape.unit,  # inputs
        UNITS=units, NARROW=narrow, MIXED=mixed, PDL=pdl, num_warps=WARPS,  # constants
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _hold(table: BufferTable, plan: Any, groups: Sequence[Group]) -> None:
    count, all_programs, arrived = plan[3], _resident(table.device), 0
    for first, buffers, (_, words, _) in groups:
        most = all_programs * HOLD_UNITS // count
        width = ceil_div(words, ceil_div(words, most))
        whole_lines = ceil_div(width, 8) * 8
        width = min(whole_lines if whole_lines <= most else width, words)
        slices, tiles = ceil_div(words, width), ceil_div(count * width, HOLD_UNITS)
        together = all_programs // tiles
        programs("_relocate").hold_rows[(all_programs,)](
            table.lines, *plan, table.state,
            first, buffers, words, width, signed_magic(width), slices, tiles, together, arrived,
            # inputs
            UNITS=HOLD_UNITS, num_warps=HOLD_WARPS, maxnreg=HOLD_REGISTERS,
            launch_cooperative_grid=True,  # constants
        )  # fmt: skip
        arrived += all_programs * ceil_div(buffers * slices, together)


def _stage(table: BufferTable, plan: Any, waves: Sequence[Wave]) -> None:
    half, nothing = table.scratch_bytes // 32 * 16, Wave(0, 0, 0, 1, 16)
    units, narrow = (4096, 4096) if interpreted() else (STAGE_UNITS, STAGE_NARROW)
    if not waves:
        return
    for k, (load, save) in enumerate(zip((*waves, nothing), (nothing, *waves), strict=True)):
        tiles = max(
            _tiles(Shape(w.unit, w.width, 0), plan[3], units, narrow)
            for w in (load, save)
            if w.buffers
        )
        programs("_relocate").stage_rows[(tiles, max(load.buffers, save.buffers), 2)](
            table.lines, *plan, table.state, table.staging,
            *_numbers(load), k % 2 * half, *_numbers(save), (k + 1) % 2 * half,  # inputs
            UNITS=units, NARROW=narrow, num_warps=STAGE_WARPS,  # constants
        )  # fmt: skip


def _numbers(wave: Wave) -> tuple[int, ...]:
    return (*wave[:4], signed_magic(wave.width), wave.unit)


def _tiles(shape: Shape, count: int, units: int, narrow: int) -> int:
    return ceil_div(shape.words * count, units if shape.unit == 16 else narrow)


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
