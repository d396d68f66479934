"""What a bulk transfer of one request costs by layout, and what three remedies cost and bring.

    python bench/transfer.py --json bench/results [--tokens 8192 --layers 61 --row-bytes 1152]

The pool is aged first: `churn` random requests come and go through the real allocator under each
policy, then one request of `tokens` is placed. Its rows go to pinned host memory as PD
disaggregation and HiCache `direct` send them: a copy for each run of neighbours, layer and buffer.
Remedies: a sorted free list; a gather into a staging buffer and one copy a layer; and on-demand
gathering, which moves the request into one run where it stays, and then one copy a layer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine
from torch import Tensor

from kvdefrag.config import Config
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.defragmenter import Defragmenter
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.disciplines import Discipline
from kvdefrag.core.mover import Mover, TorchMover
from kvdefrag.core.policy import Gather
from kvdefrag.core.readback import Readback
from kvdefrag.core.view import EngineView
from kvdefrag.profiles import default_profile

PAGE, ROW = 64, 1
POLICIES: dict[str, tuple[Discipline, bool]] = {
    "stock": ("fifo", False),
    "sorted free list": ("sorted", False),
    "placement": ("two_ended", False),
    "placement + reservation": ("two_ended", True),
}


class Pool:
    """Buffers of all layers, and an allocator that has seen a lot."""

    def __init__(self, policy: str, given: argparse.Namespace, device: torch.device) -> None:
        self._policy, self._size = policy, given.slots
        self.readback = Readback(0)
        self.table = torch.zeros((66, given.tokens + 1024), dtype=torch.int32)
        self.allocator = self._allocator(torch.device("cpu"))
        self.buffers = [
            torch.zeros((given.slots + 1, given.row_bytes), dtype=torch.uint8, device=device)
            for _ in range(given.layers)
        ]
        self._lengths = np.zeros(66, dtype=np.int64)
        self._age(given)
        self._place(given.tokens)
        if device.type != "cpu":
            self._settle_on(device)
        self.slots = self.table[ROW, : given.tokens]

    def _allocator(self, device: torch.device) -> SlotAllocator:
        discipline, reservation = POLICIES[self._policy]
        return SlotAllocator(
            self._size,
            table=self.table,
            page=PAGE,
            discipline=discipline,
            reservation=reservation,
            checks="off",
            device=device,
            readback=None if device.type == "cpu" else self.readback,
        )

    def _settle_on(self, device: torch.device) -> None:
        # The same table and the same free slots there; what rows hold in reserve stays taken.
        free = self.allocator.free_slots()
        self.readback, self.table = Readback(2), self.table.to(device)
        self.allocator = self._allocator(device)
        self.allocator.alloc(self._size)
        self.allocator.free(free.to(device))

    def _age(self, given: argparse.Namespace) -> None:
        # Requests of random length decode side by side; one that is done makes way for a new one.
        draw = np.random.default_rng(0)
        room = given.slots - 5 * given.tokens
        mean = room // 56
        left = np.zeros(66, dtype=np.int64)
        for _ in range(given.churn):
            rows = np.flatnonzero(left[2:] == 0) + 2
            if rows.size:
                row = int(draw.choice(rows))
                self._leave(row)
                prompt = int(draw.integers(mean // 2, mean))
                if self.allocator.available_size() > prompt + room // 8 and self._take(
                    Kind.EXTEND, np.array([row]), np.array([prompt])
                ):
                    left[row] = draw.integers(8, 400)
            rows = np.flatnonzero(left)
            if rows.size and self._take(Kind.DECODE, rows, np.ones_like(rows)):
                left[rows] -= 1

    def _place(self, tokens: int) -> None:
        for row in range(2, 66):
            # For the request, for what the others decode meanwhile, and twice its size.
            if self.allocator.available_size() >= 5 * tokens:
                break
            self._leave(row)
        # Prefilled in chunks, between which others decode, and decoded for its last eighth.
        prompt = tokens - tokens // 8
        for done in range(0, prompt, 2048):
            self._take(Kind.EXTEND, np.array([ROW]), np.array([min(2048, prompt - done)]))
            rows = np.flatnonzero(self._lengths[2:])[:16] + 2
            self._take(Kind.DECODE, rows, np.ones_like(rows))
        rows = np.array([ROW, *(np.flatnonzero(self._lengths[2:])[:16] + 2)])
        for _ in range(tokens - prompt):
            self._take(Kind.DECODE, rows, np.ones_like(rows))

    def _take(self, kind: Kind, rows: np.ndarray, counts: np.ndarray) -> bool:
        starts = self._lengths[rows]
        if (starts + counts > self.table.shape[1]).any():
            return False
        slots = self.allocator.alloc_for(Demand(kind, rows, starts, counts))
        if slots is None:
            return False
        at = 0
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            self.table[row, start : start + count] = slots[at : at + count].int()
            at += count
        self._lengths[rows] += counts
        return True

    def _leave(self, row: int) -> None:
        length = int(self._lengths[row])
        self.allocator.release(row, length)
        self.allocator.free(self.table[row, :length].long())
        self._lengths[row] = 0

    def gather(self, mover: Mover) -> float:
        """Move the request into one run by the plugin's own path; return seconds."""
        config = Config.model_validate(
            {"relocation": {"mode": "on_demand", "bytes_per_step": "16GiB"}, "page": PAGE}
        )
        defragmenter = Defragmenter(
            config,
            allocator=self.allocator,
            table_rows=self.table.shape[0],
            mover=mover,
            profile=default_profile(),
            readback=self.readback,
        )
        defragmenter.request(Gather(ROW, 1))
        rows = np.array([ROW])
        lengths = np.array([int(self._lengths[ROW])])
        begun = _now()
        for step in range(64):
            view = EngineView(
                step=step,
                table=self.table,
                rows=rows,
                generations=np.ones(1, dtype=np.int64),
                protected=np.zeros(1, dtype=np.int64),
                committed=lengths,
                allocated=lengths,
            )
            defragmenter.step(step, lambda: view)  # noqa: B023
            if not defragmenter.demands:
                break
        return _now() - begun


def runs_of(slots: Tensor) -> list[tuple[int, int]]:
    """Return (first slot, length) of each run of neighbours, in order."""
    host = slots.cpu().numpy().astype(np.int64)
    starts = np.flatnonzero(np.diff(host, prepend=host[0] - 2) != 1)
    lengths = np.diff(starts, append=host.shape[0])
    return [(int(host[s]), int(n)) for s, n in zip(starts, lengths, strict=True)]


def descriptors(slots: Tensor) -> int:
    """Count what PD disaggregation would send for one layer, by its own function if installed."""
    host = slots.cpu().numpy().astype(np.int32)
    try:
        from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous
    except ImportError:
        return len(runs_of(slots))
    there = np.arange(host.shape[0], dtype=np.int32)
    return len(group_concurrent_contiguous(host, there)[0])


def by_runs(buffers: Sequence[Tensor], slots: Tensor, target: Tensor) -> Callable[[], object]:
    """Return the transfer of a request as it lies: a copy for each run and buffer."""
    pieces = runs_of(slots)

    def transfer() -> None:
        for layer, buffer in enumerate(buffers):
            at = 0
            for first, length in pieces:
                target[layer, at : at + length].copy_(
                    buffer[first : first + length], non_blocking=True
                )
                at += length

    return transfer


def by_staging(buffers: Sequence[Tensor], slots: Tensor, target: Tensor) -> Callable[[], object]:
    """Return a gather into staging and one copy a layer."""
    index = slots.long()
    staging = torch.empty(
        (len(buffers), slots.shape[0], target.shape[2]), dtype=torch.uint8, device=slots.device
    )

    def transfer() -> None:
        for layer, buffer in enumerate(buffers):
            torch.index_select(buffer, 0, index, out=staging[layer])
            target[layer].copy_(staging[layer], non_blocking=True)

    return transfer


def seconds(run: Callable[[], object], repeat: int) -> float:
    """Return the median wall time until the last byte has arrived."""
    run()
    found = []
    for _ in range(repeat):
        begun = _now()
        run()
        found.append(_now() - begun)
    return statistics.median(found)


def main() -> None:
    """Measure every policy and remedy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name, value in (
        ("tokens", 8192), ("layers", 61), ("row-bytes", 1152), ("slots", 200_000),
        ("churn", 3000), ("repeat", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="folder for the result")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for policy in POLICIES:
        rows += _measure(policy, given, device)
        torch.cuda.empty_cache()
    print(f"{'policy':26} {'how':26} {'descriptors':>11} {'ms':>9} {'GB/s':>7} {'extra ms':>9}")
    for r in rows:
        print(
            f"{r['policy']:26} {r['how']:26} {r['descriptors_per_layer']:11} {r['ms']:9.2f} "
            f"{r['gbps']:7.2f} {r['extra_ms']:9.2f}"
        )
    if given.json:
        result = {
            "machine": machine() if device.type == "cuda" else {},
            "command": ["python", "bench/transfer.py", *sys.argv[1:]],
            "bytes": given.tokens * given.layers * given.row_bytes,
            "rows": rows,
        }
        path = given.json / f"transfer-h200-{datetime.date.today()}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


def _measure(policy: str, given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    pool = Pool(policy, given, device)
    for number, buffer in enumerate(pool.buffers):
        buffer.random_(0, 256, generator=torch.Generator(device).manual_seed(number))
    pinned = device.type == "cuda"
    shape = (given.layers, given.tokens, given.row_bytes)
    right, target = (torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned) for _ in "ab")
    by_runs(pool.buffers, pool.slots, right)()
    found = []

    def note(how: str, run: Callable[[], object], extra: float = 0.0) -> None:
        target.zero_()
        took = seconds(run, given.repeat)
        if not torch.equal(target, right):
            raise AssertionError(f"{policy}, {how}: the bytes that arrived are wrong")
        total = took + extra
        count = 1 if how.startswith("staging") else descriptors(pool.slots)
        found.append(
            {
                "policy": policy,
                "how": how,
                "descriptors_per_layer": count,
                "ms": total * 1e3,
                "extra_ms": extra * 1e3,
                "gbps": target.numel() / total / 1e9,
            }
        )

    note("as it lies", by_runs(pool.buffers, pool.slots, target))
    note("staging, then one copy", by_staging(pool.buffers, pool.slots, target))
    if pool.allocator.two_ended is not None:
        extra = pool.gather(_mover(pool.buffers))
        note("gathered, then as it lies", by_runs(pool.buffers, pool.slots, target), extra)
    return found


def _mover(buffers: Sequence[Tensor]) -> Mover:
    if buffers[0].device.type == "cpu":
        return TorchMover(buffers)
    from kvdefrag.gpu import DeviceMover

    mover = DeviceMover(buffers)
    mover.prewarm()
    return mover


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
