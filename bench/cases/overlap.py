"""Overlapping moves through bounded staging memory: shift by one, and a random permutation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from measure import Entry, Run
from peers import torch_index
from pools import Plan, plan, pool, table_of

from cases.relocate import SHAPES
from kvdefrag_kernels import relocate_rows


def entries() -> Iterator[Entry]:
    """Ours and torch, which makes a copy of the rows of one layer at a time."""
    for row_bytes, rows in ((1152, 30_000), (1152, 4096), (256, 50_000), (2048, 16_000)):
        layers, _ = SHAPES[row_bytes]
        for kind in ("shift", "permutation"):
            params = {"row_bytes": row_bytes, "layers": layers, "rows": rows, "dst": kind}
            moved = 2 * layers * rows * row_bytes
            yield Entry(
                "overlap", params, "kvdefrag", moved, lambda p=params: ours(p),
                lambda p=params: check(p), notes={"scratch_bytes": 32 << 20},
            )  # fmt: skip
            yield Entry("overlap", params, "torch_index", moved, lambda p=params: torch_run(p))


def ours(params: dict) -> Run:
    """Move through the table's staging memory."""
    table = table_of(*shape(params))
    src, dst = moves(params)
    return lambda: relocate_rows(table, src, dst)


def torch_run(params: dict) -> Run:
    """Move with one temporary a layer."""
    return torch_index(pool(*shape(params)), *moves(params))


def check(params: dict) -> None:
    """Move once more and compare two layers with what they must hold then."""
    buffers = pool(*shape(params))
    src, dst = moves(params)
    watched = [buffers[0], buffers[-1]]
    rows = [b[src].clone() for b in watched]
    relocate_rows(table_of(*shape(params)), src, dst)
    if not all(torch.equal(b[dst], r) for b, r in zip(watched, rows, strict=True)):
        raise AssertionError("wrong bytes after the move")


def shape(params: dict) -> tuple[int, int, int]:
    """Find the pool of a case."""
    layers, slots = SHAPES[params["row_bytes"]]
    return layers, params["row_bytes"], slots


def moves(params: dict) -> Plan:
    """Find the plan of a case."""
    return plan(SHAPES[params["row_bytes"]][1], params["rows"], params["dst"])
