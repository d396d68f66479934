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

from cases import layout, overlap, remap, tenure
from cases.relocate import PAYLOAD, SHAPES
from measure import Clock, Run, machine
from pools import plan, pool, table_of

from kvdefrag_kernels import BufferTable, relocate, relocate_rows

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
            p20, p50, p80 = clock.quantiles(run, least=9, most=40)
            ratio = moved / p50 / 1e3 / roof
            lines.append({"variant": name, "us": [p20, p50, p80], "roof_ratio": ratio})
            print(f"{name:70} {p50:9.1f} us  roof {ratio:.3f}", flush=True)
    if path:
        result = {"machine": machine(), "roof_gbps": roof, "variants": lines}
        pathlib.Path(path).write_text(json.dumps(result, indent=1))


def copies() -> Iterator[tuple[str, int, Run]]:
    """Tiles and cache hints of the copy, at every row width."""
    tiles = [(256, 512, 2), (512, 1024, 4), (1024, 1024, 4), (1024, 2048, 8), (512, 1024, 8),
             (2048, 4096, 8)]  # fmt: skip
    works = [(1152, 256), (1152, 4096), *((w, 0) for w in SHAPES)]
    for (width, rows), tile, keep in itertools.product(works, tiles, ("", "evict_first")):
        layers, slots = SHAPES[width]
        rows = rows or min(PAYLOAD // (layers * width), slots // 2 - 1)
        relocate.UNITS, relocate.NARROW, relocate.WARPS = tile
        relocate.KEEP = keep
        table, (src, dst) = table_of(layers, width, slots), plan(slots, rows, "contiguous")
        yield (f"copy {width} B x {layers} x {rows} tile {tile} {keep}", 2 * layers * rows * width,
               lambda t=table, s=src, d=dst: relocate_rows(t, s, d, disjoint=True))  # fmt: skip
    relocate.UNITS, relocate.NARROW, relocate.WARPS, relocate.KEEP = 1024, 2048, 8, ""


def checks() -> Iterator[tuple[str, int, Run]]:
    """The device check alone, and the copy without programmatic launch."""
    whole = relocate.overlaps_launches
    layers, slots = SHAPES[1152]
    table = table_of(layers, 1152, slots)
    for rows, pdl, only in itertools.product((256, 4096, 30_000), (True, False), (False, True)):
        src, dst = plan(slots, rows, "contiguous")
        relocate.overlaps_launches = lambda _, p=pdl: p
        kernels = relocate.programs("_relocate")
        copy = kernels.copy_rows
        if only:
            kernels.copy_rows = _Nothing()
        yield (f"check only={only} pdl={pdl} rows {rows}", 0 if only else 2 * 61 * rows * 1152,
               lambda s=src, d=dst: relocate_rows(table, s, d, disjoint=True))  # fmt: skip
        kernels.copy_rows = copy
    relocate.overlaps_launches = whole


class _Nothing:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


def staged() -> Iterator[tuple[str, int, Run]]:
    """Staging memory of overlapping moves."""
    for width, rows in ((1152, 30_000), (1152, 4096), (256, 50_000)):
        layers, slots = SHAPES[width]
        for mebibytes in (4, 8, 16, 24, 32, 48):
            table = BufferTable(pool(layers, width, slots), scratch_bytes=mebibytes << 20)
            src, dst = plan(slots, rows, "permutation")
            yield (f"staged {width} B x {rows}, scratch {mebibytes} MiB", 2 * layers * rows * width,
                   lambda t=table, s=src, d=dst: relocate_rows(t, s, d))  # fmt: skip
    assert overlap.SHAPES is SHAPES


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
        for block, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8)):
            stats.BLOCK, stats.WARPS = block, warps
            view.BLOCK, view.WARPS = block, warps
            name = f"{rows} x {length} block {block} warps {warps}"
            yield f"layout_stats {name}", 4 * rows * length, made.stats()
            yield f"page_view {name}", 8 * rows * length, made.view()
        stats.BLOCK, stats.WARPS, view.BLOCK, view.WARPS = 4096, 8, 4096, 8
    module = importlib.import_module("kvdefrag_kernels.tenure")
    scene = tenure.Inputs()
    for pages, groups, warps in ((8192, 64, 16), (4096, 64, 16), (4096, 16, 8), (2048, 32, 8),
                                 (8192, 16, 16)):  # fmt: skip
        module.PAGES_BLOCK, module.GROUPS, module.PLAN_WARPS = pages, groups, warps
        yield f"tenure plan pages {pages} groups {groups} warps {warps}", 0, scene.part("plan")
    module.PAGES_BLOCK, module.GROUPS, module.PLAN_WARPS = 8192, 64, 16
    for part in ("copy", "commit", "step"):
        yield f"tenure {part}", 0, scene.part(part)


if __name__ == "__main__":
    main()
