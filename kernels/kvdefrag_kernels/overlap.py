"""Overlapping moves: rows wait in registers, or in staging memory, until all are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._load import ceil_div, interpreted, meets, programs
from .buffer_table import BufferTable, Group, Shape, signed_magic

# Chosen on an H200 by bench/tune.py.
STAGE_UNITS, STAGE_NARROW, STAGE_WARPS = 1024, 2048, 8
# Half of each multiprocessor's 256 KiB of registers holds rows of an overlapping move.
HOLD_UNITS, HOLD_WARPS, HOLD_REGISTERS = 8192, 16, 128


class Wave(NamedTuple):
    """A column slice of some neighbouring buffers, small enough to be staged for all rows."""

    first: int
    buffers: int
    column: int
    width: int
    unit: int


def split_groups(table: BufferTable, count: int) -> tuple[list[Group], list[Group]]:
    """Give the groups whose rows registers can hold, and those that must be staged.

    Staged are rows that are not cut into 16-byte units, more rows than one wave has units, and
    everything on devices without cooperative launches.
    """
    most = _resident(table.device) * HOLD_UNITS
    held = [g for g in table.groups if g.shape.unit == 16 and count <= most]
    return held, [g for g in table.groups if g not in held]


def _resident(device: torch.device) -> int:
    if not meets(device):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


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


def hold(table: BufferTable, plan: Any, groups: Sequence[Group]) -> None:
    """Move the rows of `groups` through registers: one cooperative launch a group."""
    count, all_programs, arrived = plan[3], _resident(table.device), 0
    for first, buffers, (_, words, _) in groups:
        most = all_programs * HOLD_UNITS // count
        width = ceil_div(words, ceil_div(words, most))
        whole_lines = ceil_div(width, 8) * 8
        width = min(whole_lines if whole_lines <= most else width, words)
        slices, tiles = ceil_div(words, width), ceil_div(count * width, HOLD_UNITS)
        together = all_programs // tiles
        programs("_overlap").hold_rows[(all_programs,)](
            table.lines, *plan, table.slots, table.state,
            first, buffers, words, width, signed_magic(width), slices, tiles, together, arrived,
            # inputs
            UNITS=HOLD_UNITS, num_warps=HOLD_WARPS, maxnreg=HOLD_REGISTERS,
            launch_cooperative_grid=True,  # constants
        )  # fmt: skip
        arrived += all_programs * ceil_div(buffers * slices, together)


def stage(table: BufferTable, plan: Any, waves: Sequence[Wave]) -> None:
    """Move `waves` through the staging memory: a launch gathers one and scatters the one before."""
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
        programs("_overlap").stage_rows[(tiles, max(load.buffers, save.buffers), 2)](
            table.lines, *plan, table.slots, table.state, table.staging,
            *_numbers(load), k % 2 * half, *_numbers(save), (k + 1) % 2 * half,  # inputs
            UNITS=units, NARROW=narrow, num_warps=STAGE_WARPS,  # constants
        )  # fmt: skip


def _numbers(wave: Wave) -> tuple[int, ...]:
    return (*wave[:4], signed_magic(wave.width), wave.unit)


def _tiles(shape: Shape, count: int, units: int, narrow: int) -> int:
    return ceil_div(shape.words * count, units if shape.unit == 16 else narrow)
