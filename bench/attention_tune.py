"""Try program shapes of the attention kernel: `python bench/attention_tune.py [--json PATH]`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from attention import captured, interleaved
from cases.attention import SHAPES, Scene
from measure import Clock, machine, quantiles_of

from kvdefrag_kernels.attention_geometry import Tile

# A shape of the program, and what else is tried with it: fewer workers, pages without tensor maps,
# the attention alone without the combination of its parts.
Variant = tuple[Tile, str]
LATENT: list[Variant] = [
    (Tile(64, 64, 8, 2, 2, 1), ""),
    (Tile(64, 64, 8, 2, 2, 1), "unmapped"),
    (Tile(64, 64, 8, 2, 2, 1), "alone"),
    (Tile(64, 64, 8, 2, 2, 1), "half"),
    (Tile(64, 32, 8, 3, 3, 1), ""),
]
EIGHT: list[Variant] = [
    (Tile(16, 32, 4, 1, 1, 2), ""),
    (Tile(16, 32, 4, 1, 1, 2), "alone"),
    (Tile(16, 32, 8, 1, 1, 1), ""),
    (Tile(16, 64, 8, 1, 1, 1), ""),
    (Tile(16, 32, 4, 1, 1, 1), ""),
    (Tile(16, 16, 4, 1, 1, 2), ""),
]
ONE: list[Variant] = [
    (Tile(16, 32, 4, 3, 3, 2), ""),
    (Tile(16, 32, 4, 3, 3, 2), "unmapped"),
    (Tile(16, 32, 4, 3, 3, 2), "alone"),
    (Tile(16, 32, 4, 3, 3, 2), "half"),
    (Tile(16, 64, 4, 2, 2, 2), ""),
    (Tile(16, 64, 4, 3, 3, 1), ""),
    (Tile(16, 32, 4, 4, 4, 1), ""),
    (Tile(16, 32, 8, 3, 3, 2), ""),
    (Tile(16, 64, 8, 2, 2, 2), ""),
    (Tile(16, 64, 8, 3, 3, 1), ""),
    (Tile(64, 64, 8, 2, 2, 1), ""),
]
GROUPED: list[Variant] = [
    (Tile(64, 64, 4, 3, 3, 2), ""),
    (Tile(64, 64, 4, 3, 3, 2), "unmapped"),
    (Tile(64, 64, 4, 2, 2, 2), ""),
    (Tile(64, 64, 4, 2, 2, 3), ""),
    (Tile(64, 64, 4, 4, 4, 1), ""),
    (Tile(64, 64, 4, 5, 5, 1), ""),
    (Tile(64, 32, 4, 4, 4, 2), ""),
    (Tile(64, 32, 4, 4, 4, 3), ""),
    (Tile(64, 32, 4, 5, 5, 2), ""),
    (Tile(64, 128, 4, 2, 2, 1), ""),
    (Tile(64, 64, 8, 3, 3, 1), ""),
]


def main() -> None:
    """Time every variant on every chosen shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--rounds", type=int, default=9, help="0: build every variant only")
    arguments = parser.parse_args()
    clock, lines = Clock(), []
    for shape in SHAPES:
        if arguments.shape and shape.name not in arguments.shape:
            continue
        one = EIGHT if shape.dtype.itemsize == 1 else ONE
        tiles = (one if shape.queries == 1 else LATENT) if shape.geometry.latent else GROUPED
        for coverage in (0.0, 0.99):
            lines += variants(Scene(shape, coverage), tiles, clock, arguments.rounds)
            torch.cuda.empty_cache()
        if arguments.json:
            result = {"machine": machine(), "variants": lines}
            pathlib.Path(arguments.json).write_text(json.dumps(result, indent=1))


def variants(scene: Scene, tiles: list[Variant], clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """Time one scene; a variant that does not compile or is wrong is said so."""
    graphs, where = {}, f"{scene.shape.name} {scene.coverage}"
    paged = scene.coverage > 0
    for tile, also in tiles:
        name = " ".join(map(str, tile)) + " " + also
        if also == "unmapped" and not paged:
            continue
        begin = time.perf_counter()
        try:
            with changed(also):
                run = scene.ours(paged=paged, tile=tile, workers=fewer(scene, tile, also))
                error = scene.check(run())
                if not error < 0.02 and also != "alone":
                    print(f"{where:30} {name:30} WRONG {error}", flush=True)
                    continue
                graphs[name] = captured(run)
        except Exception as failure:
            print(
                f"{where:30} {name:30} {type(failure).__name__}: {failure}"[:100].replace(
                    "\n", " "
                ),
                flush=True,
            )
        if time.perf_counter() - begin > 8:
            print(f"{where} {name} took {time.perf_counter() - begin:.0f} s to build", flush=True)
    lines: list[dict[str, Any]] = []
    if not rounds:
        return lines
    for name, found in interleaved(graphs, clock, rounds).items():
        p20, p50, p80 = quantiles_of(found)
        lines.append({"where": where, "tile": name, "us": [p20, p50, p80]})
        gbps = scene.shape.read / p50 / 1e3
        print(f"{where:30} {name:30} {p50:9.1f} us {gbps:6.0f} GB/s", flush=True)
    return lines


@contextlib.contextmanager
def changed(also: str) -> Iterator[None]:
    """Leave out tensor maps, or the combination of parts."""
    module = importlib.import_module("kvdefrag_kernels.tree_attention")
    kernels = module.programs("_attention_merge")
    kept = module._maps, kernels.combine
    if also == "unmapped":
        module._maps = lambda *_: None
    if also == "alone":
        kernels.combine = Nothing()
    try:
        yield
    finally:
        module._maps, kernels.combine = kept


class Nothing:
    """Launches nothing."""

    def __getitem__(self, grid: Any) -> Any:
        """Take any grid."""
        return lambda *_, **__: None


def fewer(scene: Scene, tile: Tile, also: str) -> int | None:
    """Give half the workers that there would be, where that is asked for."""
    if also != "half":
        return None
    g = scene.shape.geometry
    across = -(-scene.shape.queries * g.group // tile.rows) * g.kv_heads
    lanes = torch.cuda.get_device_properties(0).multi_processor_count * tile.resident
    return max(1, lanes // across // 2)


if __name__ == "__main__":
    main()
