"""Rewrite table entries and value tensors through a look-up table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from measure import Entry, Run

from kvdefrag_kernels import remap, remap_torch, remap_values, remap_values_torch

SIZE = 2 << 20
ROWS, LENGTH, CONTEXT = 256, 4096, 16_384


def entries() -> Iterator[Entry]:
    """One million entries over 256 rows, a quarter of all slots moved; and 185,000 values."""
    made = Inputs()
    table = {"entries": ROWS * LENGTH, "rows": ROWS, "slots": SIZE}
    # Bytes: each entry read, its new number read, and written where it changed.
    for name in ("kvdefrag", "torch"):
        yield Entry("remap", table, name, ROWS * LENGTH * 9, lambda n=name: made.rows(n),
                    made.check, host=True)  # fmt: skip
    values = {"entries": 185_000, "tensors": 300, "slots": SIZE}
    for name in ("kvdefrag", "torch"):
        yield Entry("remap", values, name, 185_000 * 13, lambda n=name: made.values(n), host=True)


class Inputs:
    """A table of random slots, a quarter of which moved."""

    def __init__(self) -> None:
        lut = torch.arange(SIZE + 1, dtype=torch.int32)
        moved = torch.randperm(SIZE)[: SIZE // 4] + 1
        lut[moved] = lut[moved.roll(1)]
        self.lut = lut.cuda()
        self.table = torch.randint(1, SIZE, (2 * ROWS, CONTEXT), dtype=torch.int32, device="cuda")
        self.list = (torch.randperm(2 * ROWS - 1)[:ROWS] + 1).cuda()
        self.starts = self.list % 700
        self.ends = self.starts + LENGTH
        self.twin = self.table.clone()
        remap_torch(self.lut, self.twin, self.list, self.starts, self.ends)

    def rows(self, name: str) -> Run:
        """Remap table rows; the reference form is one indexing expression over a block."""
        if name == "kvdefrag":
            return lambda: remap(
                self.lut, self.table, self.list, self.starts, self.ends, longest=LENGTH
            )
        columns = self.starts[:, None] + torch.arange(LENGTH, device="cuda")
        at = self.list[:, None], columns

        def run() -> None:
            self.table[at] = self.lut[self.table[at].long()]

        self.twin = self.table.clone()
        remap_torch(self.lut, self.twin, self.list, self.starts, self.ends)
        return run

    def check(self) -> None:
        """Raise unless the table is what the reference made of it."""
        if not torch.equal(self.table, self.twin):
            raise AssertionError("wrong entries after the remap")

    def values(self, name: str) -> Run:
        """Remap 300 tensors of node values."""
        sizes = torch.randint(1, 1233, (300,)).tolist()
        tensors = [torch.randint(1, SIZE, (n,), device="cuda") for n in sizes]
        operation = remap_values if name == "kvdefrag" else remap_values_torch
        return lambda: operation(self.lut, tensors)
