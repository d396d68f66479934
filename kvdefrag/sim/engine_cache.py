"""Where tree, rows and allocator meet: sharing prefixes, keeping them, making room."""

from __future__ import annotations

import numpy as np
import torch

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import Demand, IntArray
from kvdefrag.core.room import make_room
from kvdefrag.errors import IntegrityError
from kvdefrag.sim.engine_rows import Rows
from kvdefrag.sim.radix import RadixTree
from kvdefrag.sim.radix_node import path, path_slots
from kvdefrag.sim.request import Job


class PrefixCache:
    """Moves slots between requests, tree and free list as SGLang's `RadixCache` does.

    Attributes:
        evicted: Slots evicted so far.
    """

    def __init__(self, allocator: SlotAllocator, rows: Rows) -> None:
        self.tree = RadixTree()
        self.evicted = 0
        self._allocator = allocator
        self._rows = rows

    def match(self, job: Job) -> None:
        """Find the job's longest cached prefix, at most all but its last token.

        The last token is always computed, since its output is what the prefill is for.
        """
        found = self.tree.match(job.tokens(0, job.fill_len - 1))
        job.node, job.matched = found.node, found.length

    def write_prefix(self, job: Job) -> None:
        """Write the slots of the job's matched prefix into its row."""
        end = job.matched
        for node in path(job.node):
            size = node.slots.shape[0]
            self._rows.table[job.row, end - size : end] = node.slots
            end -= size

    def keep_unfinished(self, job: Job) -> None:
        """Put the job's computed prompt tokens into the tree and lock them there.

        Where the tree has the tokens already the job's own slots are freed, and its row names
        the tree's instead.
        """
        row, end = job.row, job.end
        protected = int(self._rows.protected_len[row])
        tokens = job.tokens(protected, end)
        node, shared = self.tree.insert(tokens, self._rows.table[row, protected:end], job.node)
        if shared:
            self._free(self._rows.slots(row, protected, protected + shared))
            slots = path_slots(node)
            self._rows.table[row, protected:end] = slots[protected:end]
        self.tree.refresh(node)
        self.tree.lock(node)
        self.tree.unlock(job.node)
        self._rows.protected_len[row] = end
        job.node = node
        if end == job.fill_len:
            job.forget_tokens()

    def leave(self, job: Job, *, keep: bool) -> None:
        """Take the job out of its row; with `keep`, its tokens stay in the tree."""
        rows, row = self._rows, job.row
        protected, end = int(rows.protected_len[row]), int(rows.committed_len[row])
        allocated = int(rows.allocated_len[row])
        dropped = end
        if keep:
            tokens = job.tokens(protected, end)
            held = rows.table[row, protected:end]
            dropped = protected + self.tree.insert(tokens, held, job.node).length
        self._free(rows.slots(row, protected, dropped))
        self.tree.unlock(job.node)
        self._free(rows.slots(row, end, allocated))
        self._allocator.release(row, allocated)
        job.node = self.tree.root
        job.forget_tokens()
        rows.give_back(job)

    def make_room(self, count: int) -> None:
        """Evict cached prefixes until `count` slots are free, as far as that goes."""
        short = count - self._allocator.available_size()
        if short > 0:
            slots = self.tree.evict(short)
            self.evicted += slots.shape[0]
            self._free(slots)

    def allocate(self, demand: Demand) -> IntArray | None:
        """Evict as needed, then hand out the slots of `demand`; None if they are not there."""
        make_room(self._allocator, demand, self.make_room)
        slots = self._allocator.alloc_for(demand)
        return None if slots is None else slots.numpy()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless free list, rows and tree share out slots 1..size."""
        rows, allocator = self._rows, self._allocator
        jobs = [rows.job(int(row)) for row in rows.live_rows()]
        self.tree.check_integrity(job.node for job in jobs)
        for job in jobs:
            self._check_prefix(job)
        owned = [allocator.free_slots().numpy()]
        owned += [
            rows.slots(job.row, int(rows.protected_len[job.row]), self._held(job.row))
            for job in jobs
        ]
        owned += [node.slots for node in self.tree.nodes()]
        counts = np.bincount(np.concatenate(owned), minlength=allocator.size + 1)
        wrong = np.flatnonzero(counts != 1)
        if counts[0] or counts.shape[0] != allocator.size + 1 or wrong.shape[0] != 1:
            raise IntegrityError(
                f"slots 1..{allocator.size} should each have one owner; "
                f"owners of {wrong[:8].tolist()}: {counts[wrong[:8]].tolist()}"
            )

    def _held(self, row: int) -> int:
        book = self._allocator.reservations
        allocated = int(self._rows.allocated_len[row])
        return max(allocated, int(book.held[row])) if book is not None else allocated

    def _check_prefix(self, job: Job) -> None:
        slots = path_slots(job.node)
        protected = int(self._rows.protected_len[job.row])
        if not np.array_equal(slots, self._rows.table[job.row, :protected]):
            raise IntegrityError(
                f"row {job.row} and the tree disagree on its {protected} protected slots "
                f"(the tree has {slots.shape[0]})"
            )

    def _free(self, slots: IntArray) -> None:
        self._allocator.free(torch.from_numpy(slots))
