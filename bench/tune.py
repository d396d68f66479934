"""Try tile shapes of every kernel in one go: `python bench/tune.py [--json PATH]`.

Prints one line a variant. The choices in the wrappers come from such a run; this is how they are
made again for another GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from cases import layout, remap, tenure
from cases.relocate import PAYLOAD, SHAPES
from measure import Clock, Run, machine
from pools import plan, pool, table_of

from kvdefrag_kernels import BufferTable, buffer_table, overlap, relocate, relocate_rows

CLOCK_S = 0.08


def main() -> None:
    """Time every variant of every kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    path = parser.parse_args().json
    clock = Clock(budget_s=CLOCK_S)
    roof = clock.roof_gbps()
    lines = []
    for group in (copies(), checks(), staged(), programs()):
        for name, moved, run in group:
            try:
                p20, p50, p80 = clock.quantiles(run, least=9, most=40)
            except Exception as error:  # too many registers for a cooperative launch, say
                print(f"{name:70} {type(error).__name__}: {error}"[:160], flush=True)
                continue
            ratio = moved / p50 / 1e3 / roof
            lines.append({"variant": name, "us": [p20, p50, p80], "roof_ratio": ratio})
            print(f"{name:70} {p50:9.1f} us  roof {ratio:.3f}", flush=True)
    if path:
        result = {"machine": machine(), "roof_gbps": roof, "variants": lines}
        pathlib.Path(path).write_text(json.dumps(result, indent=1))


def copies() -> Iterator[tuple[str, int, Run]]:
    """Tiles, registers and sharing of the copy, at every row width."""
    names = ("UNITS", "MIXED_UNITS", "NARROW", "WARPS")
    kept = [getattr(relocate, n) for n in names]
    tiles = [(256, 128, 256, 1), (128, 128, 256, 1), (512, 128, 512, 2), (512, 256, 512, 2),
             (1024, 256, 1024, 4)]  # fmt: skip
    works = [(1152, 256), (1152, 4096), *((w, 0) for w in SHAPES)]
    for (width, rows), tile in itertools.product(works, tiles):
        layers, slots = SHAPES[width]
        rows = rows or min(PAYLOAD // (layers * width), slots // 2 - 1)
        table, (src, dst) = table_of(layers, width, slots), plan(slots, rows, "contiguous")
        for name, value in zip(names, tile, strict=True):
            setattr(relocate, name, value)
        yield (f"copy {width} B x {layers} x {rows} tile {tile}", 2 * layers * rows * width,
               lambda t=table, s=src, d=dst: relocate_rows(t, s, d, disjoint=True))  # fmt: skip
    for name, value in zip(names, kept, strict=True):
        setattr(relocate, name, value)
    for shared in (1, 2, 4, 8, 16):
        layers, slots = SHAPES[132]
        table, (src, dst) = table_of(layers, 132, slots), plan(slots, 200_000, "contiguous")
        buffer_table.SHARED = shared
        table.refresh()
        yield (f"copy 132 B x {layers} x 200000 shared {shared}", 2 * layers * 200_000 * 132,
               lambda t=table, s=src, d=dst: relocate_rows(t, s, d, disjoint=True))  # fmt: skip
    buffer_table.SHARED = 8
    table.refresh()


def checks() -> Iterator[tuple[str, int, Run]]:
    """The device check alone, the copy alone, and both without programmatic launch."""
    whole = relocate.overlaps_launches
    kept = relocate.CHECK_BLOCK, relocate.CHECK_WARPS
    layers, slots = SHAPES[1152]
    table = table_of(layers, 1152, slots)
    kernels = relocate.programs("_relocate")
    for rows, pdl, left_out in itertools.product(
        (256, 4096, 30_000), (True, False), ("", "copy_rows", "check_moves")
    ):
        src, dst = plan(slots, rows, "contiguous")
        relocate.overlaps_launches = lambda _, p=pdl: p
        program = left_out and getattr(kernels, left_out)
        if left_out:
            setattr(kernels, left_out, _Nothing())
        yield (f"{rows} rows, pdl {pdl}, without {left_out or 'nothing'}", 2 * 61 * rows * 1152,
               lambda s=src, d=dst: relocate_rows(table, s, d, disjoint=True))  # fmt: skip
        if left_out:
            setattr(kernels, left_out, program)
    relocate.overlaps_launches = whole
    for rows, block in itertools.product((256, 4096), ((256, 4), (256, 8), (512, 8), (1024, 8))):
        relocate.CHECK_BLOCK, relocate.CHECK_WARPS = block
        src, dst = plan(slots, rows, "contiguous")
        yield (f"{rows} rows, check block {block}", 2 * 61 * rows * 1152,
               lambda s=src, d=dst: relocate_rows(table, s, d, disjoint=True))  # fmt: skip
    relocate.CHECK_BLOCK, relocate.CHECK_WARPS = kept


class _Nothing:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


def staged() -> Iterator[tuple[str, int, Run]]:
    """Overlapping moves: how much the registers hold, and staging memory instead."""
    names = ("HOLD_UNITS", "HOLD_WARPS", "HOLD_REGISTERS")
    kept = [getattr(overlap, n) for n in names]
    whole = overlap.meets
    for width, rows in ((1152, 30_000), (1152, 4096), (1152, 256), (256, 50_000), (2048, 16_000)):
        layers, slots = SHAPES[width]
        src, dst = plan(slots, rows, "permutation")
        moved = 2 * layers * rows * width
        table = table_of(layers, width, slots)
        for hold in ((8192, 16, 128), (8192, 32, 64), (4096, 16, 104), (16384, 32, 64)):
            for name, value in zip(names, hold, strict=True):
                setattr(overlap, name, value)
            yield (f"held {width} B x {rows}, {hold}", moved,
                   lambda t=table, s=src, d=dst: relocate_rows(t, s, d))  # fmt: skip
        for name, value in zip(names, kept, strict=True):
            setattr(overlap, name, value)
        overlap.meets = lambda _: False
        for mebibytes in (32, 64):
            table = BufferTable(pool(layers, width, slots), scratch_bytes=mebibytes << 20)
            yield (f"staged {width} B x {rows}, scratch {mebibytes} MiB", moved,
                   lambda t=table, s=src, d=dst: relocate_rows(t, s, d))  # fmt: skip
        overlap.meets = whole


def programs() -> Iterator[tuple[str, int, Run]]:
    """Blocks of the small programs."""
    import importlib

    module = importlib.import_module("kvdefrag_kernels.remap")
    inputs = remap.Inputs()
    for block, warps in itertools.product((512, 1024, 2048, 4096), (4, 8)):
        module.BLOCK, module.WARPS = block, warps
        yield f"remap block {block} warps {warps}", 9 << 20, inputs.rows("kvdefrag")
    module.BLOCK, module.WARPS = 1024, 4
    stats = importlib.import_module("kvdefrag_kernels.layout_stats")
    view = importlib.import_module("kvdefrag_kernels.page_view")
    for rows, length in ((256, 8192), (64, 131_072)):
        made = layout.Inputs(rows, length)
        for block, warps in ((512, 2), (256, 1), (1024, 2), (512, 1)):
            stats.BLOCK, stats.WARPS = block, warps
            view.BLOCK, view.WARPS = block, warps
            name = f"{rows} x {length} block {block} warps {warps}"
            yield f"layout_stats {name}", 4 * rows * length, made.stats()
            yield f"page_view {name}", 8 * rows * length, made.view()
        stats.BLOCK, stats.WARPS, view.BLOCK, view.WARPS = 1024, 4, 1024, 4
    module = importlib.import_module("kvdefrag_kernels.tenure")
    scene = tenure.Inputs()
    for pages, groups, warps in ((4096, 64, 16), (4096, 64, 32), (2048, 64, 16), (4096, 32, 16),
                                 (2048, 64, 8)):  # fmt: skip
        module.PAGES_BLOCK, module.GROUPS, module.PLAN_WARPS = pages, groups, warps
        yield f"tenure plan pages {pages} groups {groups} warps {warps}", 0, scene.part("plan")
    module.PAGES_BLOCK, module.GROUPS, module.PLAN_WARPS = 4096, 64, 16
    for part in ("copy", "commit", "step"):
        yield f"tenure {part}", 0, scene.part(part)


if __name__ == "__main__":
    main()
