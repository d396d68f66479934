# mypy: ignore-errors
"""Device programs of `overlap`: rows that are sources and destinations at once."""

import triton
import triton.language as tl

from ._relocate import ARRIVALS, FIELDS, VERDICT, _at, _move, _move16, _pair, _pitch, _place


@triton.jit(
    do_not_specialize=[
        "step", "count", "limit",
        "load_buffer", "load_buffers", "load_column", "load_width", "load_magic", "load_size",
        "load_at",
        "save_buffer", "save_buffers", "save_column", "save_width", "save_magic", "save_size",
        "save_at",
    ],
    do_not_specialize_on_alignment=["table", "src", "dst", "state", "staging"],
)  # fmt: skip
def stage_rows(
    table, src, dst, step, count, limit, state, staging,  # inputs
    load_buffer, load_buffers, load_column, load_width, load_magic, load_size, load_at,
    save_buffer, save_buffers, save_column, save_width, save_magic, save_size, save_at,
    UNITS: tl.constexpr, NARROW: tl.constexpr,  # constants
):  # fmt: skip
    # Gathers one wave into one half of the staging memory while the wave before it is scattered
    # from the other half; a wave is a column slice of all rows, so no wave reads what another wrote
    saving = tl.program_id(2) == 1
    first_buffer = tl.where(saving, save_buffer, load_buffer)
    buffers = tl.where(saving, save_buffers, load_buffers)
    left = tl.where(saving, save_column, load_column)
    width = tl.where(saving, save_width, load_width).to(tl.int64)
    magic = tl.where(saving, save_magic, load_magic).to(tl.int64) + (1 << 31)
    size = tl.where(saving, save_size, load_size)
    at = tl.where(saving, save_at, load_at).to(tl.int64)
    nth = tl.program_id(1)
    if nth < buffers:
        line = table + (first_buffer + nth) * FIELDS
        base = tl.load(line)
        # The table counts the stride in the buffer's own units; a wave may cut finer ones.
        pitch = _pitch(line).to(tl.int64) * (tl.load(line + 4) // size)
        tile = tl.program_id(0).to(tl.int64)
        total = count * width
        memory = staging.to(tl.int64) + at
        skip = nth * total
        if size == 16:
            if tile * UNITS < total:
                row, column, live = _place(tile * UNITS, width, magic, total, UNITS)
                s, d, moving = _pair(src, dst, step, limit, row, live)
                staged = skip + tile * UNITS + tl.arange(0, UNITS)
                if saving:
                    there = _at(d, pitch, left + column)
                    _move16(memory, staged, base, there, moving, state, False)
                else:
                    there = _at(s, pitch, left + column)
                    _move16(base, there, memory, staged, moving, state, False)
        else:
            if tile * NARROW < total:
                row, column, live = _place(tile * NARROW, width, magic, total, NARROW)
                s, d, moving = _pair(src, dst, step, limit, row, live)
                staged = skip + tile * NARROW + tl.arange(0, NARROW)
                if saving:
                    there = _at(d, pitch, left + column)
                    if size == 4:
                        _move(memory, staged, base, there, moving, state, tl.int32, False)
                    else:
                        _move(memory, staged, base, there, moving, state, tl.int8, False)
                else:
                    there = _at(s, pitch, left + column)
                    if size == 4:
                        _move(base, there, memory, staged, moving, state, tl.int32, False)
                    else:
                        _move(base, there, memory, staged, moving, state, tl.int8, False)


@triton.jit(
    do_not_specialize=[
        "step", "count", "limit",
        "buffer", "buffers", "words", "width", "magic", "slices", "tiles", "together", "arrived",
    ],
    do_not_specialize_on_alignment=["table", "src", "dst", "state"],
)  # fmt: skip
def hold_rows(
    table, src, dst, step, count, limit, state,  # inputs
    buffer, buffers, words, width, magic, slices, tiles, together, arrived,  # inputs
    UNITS: tl.constexpr,  # constants
):  # fmt: skip
    # The registers of all programs hold one wave: all load, all meet, all store. Needs all programs
    # resident at once (a cooperative launch). A wave is a column slice of all rows in `together`
    # buffers, so the next one may load while this one is stored.
    programs = tl.num_programs(0)
    tile = tl.program_id(0) % tiles
    nth = tl.program_id(0) // tiles
    width = tl.full([], 0, tl.int32) + width
    jobs = buffers * slices
    total = count * width
    magic = tl.full([], 1 << 31, tl.int64) + magic
    if tl.load(state + VERDICT) == 0:
        meeting = state + ARRIVALS
        target = tl.full([], 0, tl.int64) + arrived
        wave = 0
        while wave < jobs:
            job = wave + nth
            busy = (nth < together) & (job < jobs)
            left = (job % slices) * width
            line = table + (buffer + tl.minimum(job, jobs - 1) // slices) * FIELDS
            pitch = _pitch(line)
            pointer = tl.multiple_of(tl.load(line).to(tl.pointer_type(tl.int64)), 16)
            lane = tl.arange(0, 2)[None, :]
            # Places are computed again after the meeting, from a zero that the compiler cannot
            # know: kept, they would take registers from the wave.
            zero = tl.load(state + VERDICT, volatile=True).to(tl.int32)
            row, column, live = _place((tile + zero) * UNITS, width, magic, total, UNITS)
            column += left
            live = live & (column < tl.where(busy, words, 0))
            s, d, moving = _pair(src, dst, step, limit, row, live)
            there = _at(s, pitch, column)
            x = tl.load(pointer + (there[:, None] * 2 + lane), mask=moving[:, None])
            tl.debug_barrier()
            target += programs
            tl.atomic_add(meeting, 1, sem="release")
            while tl.atomic_add(meeting, 0, sem="acquire") < target:
                pass
            tl.debug_barrier()
            zero = tl.load(state + VERDICT, volatile=True).to(tl.int32)
            row, column, live = _place((tile + zero) * UNITS, width, magic, total, UNITS)
            column += left
            live = live & (column < tl.where(busy, words, 0))
            s, d, moving = _pair(src, dst, step, limit, row, live)
            here = _at(d, pitch, column)
            tl.store(pointer + (here[:, None] * 2 + lane), x, mask=moving[:, None])
            wave += together
