"""Move rows between slots of every layer: ours and every mover that exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from measure import Entry, Run
from peers import PEERS
from pools import Expected, Plan, plan, poison, pool, sector_ceiling, table_of

from kvdefrag_kernels import relocate_rows

# Buffers, row bytes, slots: about 8.6 GB each.
SHAPES = {
    4096: (64, 32_768),
    2048: (64, 65_536),
    1152: (61, 131_072),
    656: (61, 196_608),
    512: (160, 98_304),
    256: (160, 196_608),
    132: (61, 1_048_576),
    128: (160, 393_216),
}
PAYLOAD = 2 << 30


def entries() -> Iterator[Entry]:
    """Few rows against every peer, then 4 GB moved at each row width."""
    for row_bytes, rows in ((1152, 256), (1152, 4096), (2048, 256), (256, 256)):
        yield from compare(row_bytes, rows, "contiguous", list(PEERS))
    for row_bytes, (layers, slots) in SHAPES.items():
        rows = min(PAYLOAD // (layers * row_bytes), slots // 2 - 1)
        yield from compare(row_bytes, rows, "contiguous", ["torch_index_copy"])
        yield from compare(row_bytes, rows, "shuffled", [])


def compare(row_bytes: int, rows: int, destinations: str, peers: list[str]) -> Iterator[Entry]:
    """Give ours and the named peers on one plan."""
    layers, slots = SHAPES[row_bytes]
    params = {"row_bytes": row_bytes, "layers": layers, "rows": rows, "dst": destinations}
    moved = 2 * layers * rows * row_bytes
    ceiling = sector_ceiling(row_bytes, destinations)
    fetched = round(sector_ceiling(row_bytes, destinations, sector=64), 4)
    watch = Watch(row_bytes, rows, destinations)

    def ours(buffers: tuple[torch.Tensor, ...], src: torch.Tensor, dst: torch.Tensor) -> Run:
        table = table_of(layers, row_bytes, slots)
        return lambda: relocate_rows(table, src, dst, disjoint=True)

    if rows <= 4096:
        yield Entry("relocate", params, "contiguous_copy", moved, lambda: contiguous(moved // 2))
    for name, mover in {"kvdefrag": ours, **{n: PEERS[n] for n in peers}}.items():
        few = name.startswith("memcpy") and rows > 256
        yield Entry(
            "relocate", params, name, moved, watch.make(mover), watch.check,
            ceiling=ceiling, host=rows <= 4096 and name in ("kvdefrag", "sglang_tiled"),
            absent="hundreds of thousands of copies" if few else None,
            notes={"ceiling_64": fetched},
        )  # fmt: skip


def contiguous(size: int) -> Run:
    """Copy as many bytes in one piece: what this amount of data can reach at all."""
    one, two = (torch.empty(size, dtype=torch.uint8, device="cuda").random_() for _ in "ab")
    return lambda: two.copy_(one)


class Watch:
    """Poisons the destinations before a provider's first call and checks them after it."""

    def __init__(self, row_bytes: int, rows: int, destinations: str) -> None:
        layers, slots = SHAPES[row_bytes]
        self.pool = lambda: pool(layers, row_bytes, slots)
        self.plan = lambda: plan(slots, rows, destinations)
        self.expected: Expected | None = None

    def make(self, mover: Callable[..., Run]) -> Callable[[], Run]:
        """Delay the building of a mover until the runner asks for it."""

        def build() -> Run:
            buffers = self.pool()
            moves: Plan = self.plan()
            run = mover(buffers, *moves)
            self.expected = Expected(buffers, *moves)
            poison(buffers, moves[1])
            return run

        return build

    def check(self) -> None:
        """Raise if the last provider's first call left wrong bytes."""
        if self.expected is not None:
            self.expected()
            self.expected = None
