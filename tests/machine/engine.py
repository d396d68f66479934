"""A small engine with a real pool: every KV row says which token it belongs to, and where.

Rows of the pool are int64 [3]: the slot it was computed for, the token, and a mark for the buffer
(layer, and K or V). Tokens are unique to a position of a sequence, so a row that is read back in
the wrong place, from the wrong buffer or stale is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvdefrag.config import Config
from kvdefrag.core.allocator import Discipline, SlotAllocator
from kvdefrag.core.defragmenter import Defragmenter
from kvdefrag.core.demand import Demand, IntArray, Kind
from kvdefrag.core.mover import TorchMover
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.profile import AttentionCost, DeviceProfile
from kvdefrag.core.readback import Readback
from kvdefrag.core.report import StepReport
from kvdefrag.core.room import make_room
from kvdefrag.core.view import EngineView
from kvdefrag.sim.radix import RadixTree
from kvdefrag.sim.radix_node import Node, path, path_slots

COST = AttentionCost(name="-", scattered_gbps=1, paged_gbps=2, fixed_us=0, left_over_us=0)
PROFILE = DeviceProfile(
    version=1,
    name="test",
    layers=2,
    row_bytes=48,
    copy_gbps=1,
    relocation_efficiency=1,
    relocation_fixed_us=0,
    step_base_us=1,
    prefill_base_us=1,
    prefill_us_per_token=1,
    decode={"stock": COST, "paged": COST},
    verify={"stock": COST, "paged": COST},
    transfer_us_per_descriptor=1,
    provenance={},
)
GARBAGE = -7


def settings_for(mode: str, *, bytes_per_step: int, dry_run: bool, max_live: int) -> Config:
    """Return settings under which `mode` is triggered at every step."""
    return Config.model_validate(
        {
            "relocation": {
                "mode": "threshold",
                "dry_run": dry_run,
                "mechanisms": {
                    "tenure": mode == "tenure",
                    "evacuation": mode == "evacuation",
                    "on_demand": mode in ("gather", "lower", "idle"),
                },
                "tenure_interval": 1,
                "bytes_per_step": bytes_per_step,
                "duty_bytes_per_step": bytes_per_step,
                "coverage_low": 0.999,
                "coverage_high": 1.0,
                "whole_free_low": 0.999,
                "whole_free_high": 1.0,
                "unusable_free_min": 0.0,
                "max_live_per_page": max_live,
                "min_gain_rows": 0,
                "check_plans": "always",
            }
        }
    )


class Fault(Exception):
    """What a broken part raises in a test."""


class RecordingMover:
    """Copies like the reference, keeps what it was given, and fails when told to.

    Attributes:
        plans: Every plan handed over.
        fault: `before` fails without a copy, `midway` after some of the buffers.
        during: Called once after the rows were copied and before anybody is told.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.plans: list[MovePlan] = []
        self.fault: str | None = None
        self.during: Callable[[], None] | None = None

    @property
    def row_bytes(self) -> int:
        return TorchMover(self.buffers).row_bytes

    def copy(self, plan: MovePlan) -> None:
        if self.fault == "before":
            raise Fault("the mover failed before it copied")
        if self.fault == "midway":
            TorchMover(self.buffers[:1]).copy(plan)
            raise Fault("the mover failed midway")
        self.plans.append(plan)
        TorchMover(self.buffers).copy(plan)
        if self.during is not None:
            self.during()


@dataclass
class Request:
    """A running request: its row and how far each part of it reaches."""

    row: int
    tokens: list[int]
    node: Node
    protected: int = 0
    committed: int = 0
    allocated: int = 0


@dataclass(frozen=True)
class Shape:
    """What a pool is made of."""

    size: int = 64
    page: int = 4
    rows: int = 6
    width: int = 64
    discipline: Discipline = "two_ended"
    reservation: bool = False
    device_form: bool = False
    delay: int = 0
    latent: bool = False
    interval: int = 4
    checks: str = "strict"


@dataclass
class Snapshot:
    """Everything that a compaction may not change, or must change for all or for none."""

    table: Tensor
    values: list[list[int]]
    free: list[int]
    available: int
    evictable: int
    protected: int
    reserved: int = field(default=0)


class Engine:
    """Serves requests step by step with the real allocator, tree and defragmenter.

    Args:
        shape: Sizes and modes.
        config: Settings of the defragmenter; its page is taken from the shape.
    """

    def __init__(self, shape: Shape, config: Config | None = None) -> None:
        self.shape = shape
        self.table = torch.zeros(shape.rows + 1, shape.width, dtype=torch.int32)
        # Stale numbers of former owners: nobody may read or rewrite them.
        self.table[:] = GARBAGE
        self.readback = Readback(shape.delay)
        self.mover = RecordingMover([])
        self._make_pool(shape.size)
        self.allocator = SlotAllocator(
            shape.size,
            table=self.table,
            page=shape.page,
            discipline=shape.discipline,
            reservation=shape.reservation,
            reorder_interval=shape.interval,
            evict_for_pages=True,
            checks=shape.checks,
            readback=self.readback if shape.device_form else None,
        )
        self.tree = RadixTree()
        self.requests: dict[int, Request] = {}
        self.generation = np.zeros(shape.rows + 1, dtype=np.int64)
        self.steps = 0
        self._token = 0
        self.defragmenter = Defragmenter(
            self.paged(config or Config()),
            allocator=self.allocator,
            table_rows=shape.rows + 1,
            mover=self.mover,
            profile=PROFILE,
            readback=self.readback,
        )

    def _make_pool(self, size: int) -> None:
        buffers = 2 if self.shape.latent else 4
        self.mover.buffers = [
            torch.full((size + 1, 3), GARBAGE - mark, dtype=torch.int64) for mark in range(buffers)
        ]

    def paged(self, config: Config) -> Config:
        """Return `config` with this pool's page, which may be smaller than users may choose."""
        return config.model_copy(update={"page": self.shape.page})

    @property
    def size(self) -> int:
        return self.allocator.size

    def free_rows(self) -> list[int]:
        return [r for r in range(1, self.shape.rows + 1) if r not in self.requests]

    def fresh_tokens(self, count: int) -> list[int]:
        """Return tokens that nobody else has."""
        self._token += count
        return list(range(1 << 40, (1 << 40) + self._token))[self._token - count :]

    # --- what a scheduler does -------------------------------------------------------------

    def admit(self, prompts: Sequence[Sequence[int]], *, chunk: int | None = None) -> list[int]:
        """Prefill prompts as one batch; with `chunk` only so many tokens of each.

        Returns:
            The rows, or nothing if the slots were not to be had.
        """
        rows = self.free_rows()[: len(prompts)]
        batch = []
        for row, prompt in zip(rows, prompts, strict=True):
            self.generation[row] += 1
            found = self.tree.match(np.array(prompt[:-1], dtype=np.int64))
            self.tree.lock(found.node)
            request = Request(row, list(prompt), found.node)
            request.protected = request.committed = request.allocated = found.length
            if found.length:
                self.table[row, : found.length] = torch.from_numpy(path_slots(found.node)).int()
            self.requests[row] = request
            batch.append(request)
        if self.extend(batch, chunk=chunk):
            return rows
        for request in batch:
            self.abort(request.row)
        return []

    def extend(self, batch: Sequence[Request], *, chunk: int | None = None) -> bool:
        """Compute the next chunk of every prompt in `batch` and share what was computed."""
        starts = _array(r.allocated for r in batch)
        ends = _array(
            len(r.tokens) if chunk is None else min(r.allocated + chunk, len(r.tokens))
            for r in batch
        )
        slots = self.allocate(Kind.EXTEND, batch, starts, ends - starts)
        if slots is None:
            return False
        for request, end in zip(batch, ends.tolist(), strict=True):
            request.committed = request.allocated = end
            self.write(request, request.protected, end)
        return True

    def share(self, request: Request) -> None:
        """Put what a request has computed into the tree, and free what the tree had already."""
        row, low, high = request.row, request.protected, request.committed
        key = np.array(request.tokens[low:high], dtype=np.int64)
        held = self.table[row, low:high].numpy().astype(np.int64)
        node, known = self.tree.insert(key, held, request.node)
        twice = self.table[row, low : low + known].clone()
        self.table[row, :high] = torch.from_numpy(path_slots(node)).int()
        self.free(twice)
        self.tree.lock(node)
        self.tree.unlock(request.node)
        request.node, request.protected = node, high

    def decode(self, rows: Iterable[int]) -> bool:
        """Decode one token in every row given."""
        batch = [self.requests[r] for r in rows]
        starts = _array(r.allocated for r in batch)
        wanted = _array(r.committed + 1 for r in batch)
        counts = (wanted - starts).clip(0)
        # A row that still holds rejected drafts needs nothing; plain decoding knows no such rows.
        kind = Kind.DECODE if (counts == 1).all() else Kind.SPECULATIVE
        if self.allocate(kind, batch, starts, counts) is None:
            return False
        for request in batch:
            self._keep(request, 1)
        return True

    def speculate(self, rows: Iterable[int], window: int, accepted: Sequence[int]) -> bool:
        """Verify `window` drafts in every row and keep `accepted` of them; the rest stay held."""
        batch = [self.requests[r] for r in rows]
        starts = _array(r.allocated for r in batch)
        wanted = _array(r.committed + window for r in batch)
        counts = (wanted - starts).clip(0)
        if self.allocate(Kind.SPECULATIVE, batch, starts, counts) is None:
            return False
        for request, keep in zip(batch, accepted, strict=True):
            self.scribble(self.table[request.row, request.committed : request.allocated])
            self._keep(request, keep)
        return True

    def truncate(self, row: int, count: int) -> None:
        """Take the last tokens of a request back; never what the tree owns."""
        request = self.requests[row]
        length = max(request.protected, request.committed - count)
        self._drop_tail(request, length)
        request.committed = request.allocated = length
        del request.tokens[length:]

    def finish(self, row: int, *, keep: bool = True) -> None:
        """Let a request leave; with `keep` its tokens stay in the tree."""
        request = self.requests[row]
        if keep and request.committed > request.protected:
            self.share(request)
        self.abort(row)

    def abort(self, row: int) -> None:
        """Let a request leave; only what the tree owns stays."""
        request = self.requests.pop(row)
        self._drop_tail(request, request.protected)
        self.tree.unlock(request.node)

    def evict(self, count: int) -> None:
        """Evict cached prefixes, least recently used first."""
        self.free(torch.from_numpy(self.tree.evict(count)))

    def evict_until(self, count: int) -> None:
        """Evict until `count` slots are free, as far as that goes."""
        short = count - self.allocator.available_size()
        if short > 0:
            self.evict(short)

    def flush(self) -> None:
        """Forget all requests and all that is cached."""
        self.requests.clear()
        self.tree = RadixTree()
        self.allocator.clear()
        self.defragmenter.clear()

    def resize(self, size: int) -> None:
        """Use a pool of another size; nobody may be served."""
        self._make_pool(size)
        self.flush()
        self.allocator.resize(size)

    # --- slots and rows --------------------------------------------------------------------

    def allocate(
        self, kind: Kind, batch: Sequence[Request], starts: IntArray, counts: IntArray
    ) -> Tensor | None:
        demand = Demand(kind, _array(r.row for r in batch), starts, counts)
        make_room(self.allocator, demand, self.evict_until)
        slots = self.allocator.alloc_for(demand)
        if slots is None:
            return None
        assert slots.dtype == torch.int64
        assert slots.shape == (demand.total,)
        at = 0
        for request, start, count in zip(batch, starts.tolist(), counts.tolist(), strict=True):
            self.table[request.row, start : start + count] = slots[at : at + count].int()
            at += count
            request.allocated = max(request.allocated, start + count)
        return slots

    def free(self, slots: Tensor) -> None:
        self.scribble(slots)
        self.allocator.free(slots)

    def scribble(self, slots: Tensor) -> None:
        """Write what may be left by a rejected draft or a former owner."""
        for buffer in self.mover.buffers:
            buffer[slots.long()] = GARBAGE

    def write(self, request: Request, start: int, end: int) -> None:
        """Compute the KV of tokens [start, end)."""
        slots = self.table[request.row, start:end].long()
        tokens = torch.tensor(request.tokens[start:end], dtype=torch.int64)
        for mark, buffer in enumerate(self.mover.buffers):
            buffer[slots] = torch.stack([slots, tokens, torch.full_like(slots, mark)], 1)

    def _keep(self, request: Request, count: int) -> None:
        request.tokens += self.fresh_tokens(count)
        self.write(request, request.committed, request.committed + count)
        request.committed += count

    def _drop_tail(self, request: Request, length: int) -> None:
        # Reserved slots go back with the tail: a row never reserves behind a gap.
        if self.allocator.reservations is not None:
            self.scribble(self.table[request.row, length : self.held(request)])
            self.allocator.free(self.table[request.row, length : request.allocated].clone())
            self.allocator.release(request.row, request.allocated)
        else:
            self.free(self.table[request.row, length : request.allocated].clone())

    def held(self, request: Request) -> int:
        book = self.allocator.reservations
        return max(request.allocated, int(book.held[request.row]) if book else 0)

    # --- the defragmenter ------------------------------------------------------------------

    def view(self, values: Callable[[], Sequence[Tensor]] | None = None) -> EngineView:
        rows = sorted(self.requests)
        requests = [self.requests[r] for r in rows]
        return EngineView(
            step=self.steps,
            table=self.table,
            rows=_array(rows),
            generations=self.generation[rows] if rows else _array(()),
            protected=_array(r.protected for r in requests),
            committed=_array(r.committed for r in requests),
            allocated=_array(r.allocated for r in requests),
            shared_values=values or self.shared_values,
        )

    def shared_values(self) -> list[Tensor]:
        """Return the slots of locked nodes; when nobody runs, of all nodes."""
        if not self.requests:
            return [torch.from_numpy(node.slots) for node in self.tree.nodes()]
        return self.tree.locked_path_values(r.node for r in self.requests.values())

    def compact(
        self,
        *,
        gates: tuple[str, ...] = (),
        values: Callable[[], Sequence[Tensor]] | None = None,
    ) -> StepReport:
        """Take one step of the defragmenter."""
        self.steps += 1
        return self.defragmenter.step(self.steps, lambda: self.view(values), gates=gates)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            table=self.table.clone(),
            values=[node.slots.tolist() for node in self.tree.nodes()],
            free=sorted(self.allocator.free_slots().tolist()),
            available=self.allocator.available_size(),
            evictable=self.tree.evictable_size,
            protected=self.tree.protected_size,
            reserved=self.allocator.reserved_size(),
        )

    # --- what must always hold -------------------------------------------------------------

    def check(self) -> None:
        """Check every invariant of the pool."""
        self.check_owners()
        self.check_contents()
        self.allocator.check_integrity()
        self.tree.check_integrity(r.node for r in self.requests.values())
        self.defragmenter.tracker.observe(self.view())
        self.defragmenter.tracker.check_integrity(self.view())
        self.check_whole_pages()

    def check_owners(self) -> None:
        """Every slot 1..size has exactly one owner: the free list, a row, or the tree."""
        owned = [self.allocator.free_slots()]
        owned += [torch.from_numpy(node.slots) for node in self.tree.nodes()]
        for request in self.requests.values():
            row = self.table[request.row].long()
            owned.append(row[request.protected : self.held(request)])
            shared = torch.from_numpy(path_slots(request.node))
            assert torch.equal(shared, row[: request.protected]), (
                f"row {request.row} names {row[: request.protected].tolist()} for its prefix, "
                f"the tree {shared.tolist()}"
            )
        everything = torch.cat([o.long() for o in owned]).sort().values
        expected = torch.arange(1, self.size + 1)
        assert torch.equal(everything, expected), f"owners: {everything.tolist()}"
        reserved = sum(self.held(r) - r.allocated for r in self.requests.values())
        assert reserved == self.allocator.reserved_size()

    def check_contents(self) -> None:
        """Every request, and every cached prefix, reads what was written, in every buffer."""
        for request in self.requests.values():
            slots = self.table[request.row, : request.committed].long()
            self._check_rows(slots, request.tokens[: request.committed], f"row {request.row}")
        for node in self.tree.nodes():
            spelt = [t for step in reversed(list(path(node))) for t in step.key.tolist()]
            slots = torch.from_numpy(path_slots(node))
            self._check_rows(slots, spelt, f"node {node.serial}")

    def _check_rows(self, slots: Tensor, tokens: list[int], whose: str) -> None:
        for mark, buffer in enumerate(self.mover.buffers):
            found, expected = buffer[slots], torch.tensor(tokens, dtype=torch.int64)
            assert torch.equal(found[:, 1], expected), (
                f"{whose}, buffer {mark}: reads {found[:, 1].tolist()}, wrote {tokens}"
            )
            assert (found[:, 2] == mark).all(), f"{whose}: rows of buffer {mark} are another's"

    def check_whole_pages(self) -> None:
        """As many whole pages lie at the front of the list as it promises at least."""
        pages = self.allocator.two_ended
        if pages is None:
            return
        sure, page = pages.whole_pages(), self.shape.page
        assert 0 <= sure <= self.size // page
        front = pages.slots()[: sure * page].view(sure, page)
        whole = (front == front[:, :1] + torch.arange(page)).all(1) & (front[:, 0] % page == 0)
        assert whole.all(), f"{sure} whole pages promised, front is {front.tolist()}"


def _array(numbers: Iterable[int]) -> IntArray:
    return np.fromiter(numbers, dtype=np.int64)
