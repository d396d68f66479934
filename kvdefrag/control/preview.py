"""What a compaction would do: it is run on a copy of the tables, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvdefrag.config import Config
from kvdefrag.control.command import How
from kvdefrag.control.compaction import Compaction, Parts
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.core.free_stats import free_stats
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.mover import CountingMover
from kvdefrag.core.programs import TorchPrograms
from kvdefrag.core.readback import Readback
from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView


@dataclass(frozen=True)
class Snapshot:
    """An engine at one moment, on the host. Rows of the table are numbered by their place here.

    Attributes:
        size, page: Slots 1..size, and slots to an aligned page.
        row_bytes: Bytes of one slot over all buffers.
        table: int32 [n, width], the live rows, each as far as it is allocated.
        generations, protected, committed, allocated: int64 [n], as in `EngineView`.
        tenured: int64 [n], position up to which each row is known to need no tenure.
        shared: int64 [m], slots of the tree nodes that may move.
        free: int64 [k], the free slots.
    """

    size: int
    page: int
    row_bytes: int
    table: Tensor
    generations: IntArray
    protected: IntArray
    committed: IntArray
    allocated: IntArray
    tenured: IntArray
    shared: Tensor
    free: Tensor


@dataclass(frozen=True)
class Effect:
    """How the running requests and the free slots lie.

    Attributes:
        tokens: Tokens that the running requests have committed.
        runs: Longest stretches of them whose slots rise by 1.
        coverage: Share of them in aligned pages; None if nobody runs.
        whole_free_pages: Pages with every slot free.
    """

    tokens: int
    runs: int
    coverage: float | None
    whole_free_pages: int

    def plain(self) -> dict[str, float | int | None]:
        """Return it as a mapping."""
        return dict(vars(self))


def effect_of(snapshot: Snapshot) -> Effect:
    """Return how things lie in a snapshot."""
    return _effect(snapshot, snapshot.table, snapshot.free)


def preview(
    snapshot: Snapshot, config: Config, how: How, *, rows: int | None, at: int = 0
) -> tuple[int, Effect]:
    """Return how many rows a compaction would move, and how things would lie then.

    Args:
        snapshot: Stays as it is.
        config: The settings.
        how: The mechanism.
        rows: Rows to move at most; None for all that it finds.
        at: Of a gathering: the request's place in the snapshot.
    """
    # Row 0 of a table is nobody's.
    count, width = snapshot.table.shape
    table = torch.zeros((count + 1, width), dtype=torch.int32)
    table[1:] = snapshot.table
    allocator = _allocator(snapshot)
    tracker = Tracker(count + 1, page=snapshot.page)
    view = _view(snapshot, table)
    tracker.observe(view)
    tracker.confirm(view.rows, view.generations, snapshot.tenured)
    mover = CountingMover(snapshot.row_bytes)
    programs = TorchPrograms(mover, page=snapshot.page)
    rules = config.relocation.model_copy(update={"dry_run": False})
    config = config.model_copy(update={"relocation": rules})
    parts = Parts(config, allocator, mover, Readback(0), tracker, programs)
    target = (at + 1, int(snapshot.generations[at])) if count else (0, 0)
    job = Compaction(parts, how, rows=rows, target=target)
    while not job.done:
        job.advance(view)
    return job.moved, _effect(snapshot, table[1:], allocator.free_slots())


def _view(snapshot: Snapshot, table: Tensor) -> EngineView:
    shared = snapshot.shared.clone()
    values = (shared,) if shared.numel() else ()
    return EngineView(
        step=0,
        table=table,
        rows=np.arange(1, table.shape[0], dtype=np.int64),
        generations=snapshot.generations,
        protected=snapshot.protected,
        committed=snapshot.committed,
        allocated=snapshot.allocated,
        shared_values=lambda: values,
    )


def _allocator(snapshot: Snapshot) -> SlotAllocator:
    # Everything is taken, and what is free is given back: that leaves the same list.
    made = SlotAllocator(snapshot.size, page=snapshot.page, checks="off")
    made.alloc(snapshot.size)
    made.free(snapshot.free)
    return made


def _effect(snapshot: Snapshot, table: Tensor, free: Tensor) -> Effect:
    runs = covered = 0
    for row, length in enumerate(snapshot.committed.tolist()):
        # Row by row: a table of the longest context may be too large to work on as a whole.
        at, lengths = torch.tensor([row]), torch.tensor([length])
        stats = layout_stats(table[:, :length], at, lengths, page_sizes=(snapshot.page,))
        runs += int(stats.runs.sum())
        covered += int(stats.covered[snapshot.page].sum())
    tokens = int(snapshot.committed.sum())
    whole = free_stats(free, snapshot.size, page=snapshot.page).whole_pages
    return Effect(tokens, runs, covered / tokens if tokens else None, whole)
