"""The simulator's engine beside the real scheduler: the same slots after every iteration (0.5.17).

The trace is an excerpt of the one that ships with the package, shrunk: a block of 512 tokens
becomes 8, so that a small pool sees the same sharing, eviction and pressure.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from harness.engine import Engine, generate
from harness.settings import settings

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.data import CONVERSATION_TRACE, open_data
from kvdefrag.sglang.compat import compat, requests_of
from kvdefrag.sim import request as sim_request
from kvdefrag.sim.engine import Engine as Model
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.request import SimRequest

BLOCK, SHRUNK = 512, 8
PAGE = 16


class Excerpt(NamedTuple):
    """One request of the shrunk trace."""

    arrival: float
    tokens: tuple[int, ...]
    count: int


def excerpt(requests: int, longest: int) -> list[Excerpt]:
    """Return the first requests whose shrunk prompts are not longer than `longest` tokens."""
    with open_data(CONVERSATION_TRACE) as file:
        rows = (json.loads(line) for line in file if line.strip())
        short = (r for r in rows if len(r["hash_ids"]) * SHRUNK <= longest)
        return [_shrunk(r, i) for i, r in enumerate(itertools.islice(short, requests))]


def _shrunk(row: dict[str, Any], index: int) -> Excerpt:
    length = max(1, row["input_length"] * SHRUNK // BLOCK)
    tokens: list[int] = []
    for block in row["hash_ids"]:
        draw = random.Random(block)
        tokens += [draw.randrange(3, 1000) for _ in range(SHRUNK)]
    # A step takes one second of the model's time.
    return Excerpt(2.0 * index, tuple(tokens[:length]), min(row["output_length"] // 8, 40) + 1)


class Lockstep:
    """Drives the real scheduler and the model with the same requests, and compares.

    Args:
        models: Folder of the checkpoints.
        discipline, reservation: How slots are placed, in both.
        overlap: Whether the scheduler overlaps.
        pool: Slots.

    Attributes:
        compared: Iterations after which everything was equal.
    """

    def __init__(
        self, models: Path, *, discipline: str, reservation: bool, overlap: bool, pool: int
    ) -> None:
        self._trace = excerpt(60, longest=130)
        sizes = {"max_total_tokens": pool, "max_running_requests": 8, "chunked_prefill_size": 64}
        options = sizes | {"max_prefill_tokens": 100, "context_length": 512}
        placement = {"free_list": discipline, "reservation": reservation}
        with settings({"placement": placement, "relocation": {"mode": "off"}, "page": PAGE}):
            self.engine = Engine(
                model_path=str(models / "llama"), disable_overlap_schedule=not overlap, **options
            )
        self._options = EngineOptions(
            pool_slots=pool,
            max_running=8,
            context=512,
            chunked_prefill=64,
            max_prefill=self.engine.scheduler.max_prefill_tokens,
            overlap=overlap,
            page=PAGE,
        )
        self._table = torch.zeros(self._table_shape(), dtype=torch.int32)
        self._slots = SlotAllocator(
            pool,
            table=self._table,
            page=PAGE,
            discipline=discipline,  # type: ignore[arg-type]
            reservation=reservation,
            evict_for_pages=True,
        )
        self.model = Model(self._options, self._slots, self._table, self._arrivals(), lambda _: 1.0)
        self._requests: dict[int, Any] = {}
        self._sent, self._over = 0, False
        self.compared = 0
        self.engine.at_top, self.engine.feed = self._at_top, self._feed
        self.engine.finished = lambda: self._over

    def run(self) -> None:
        """Serve everything.

        Raises:
            AssertionError: The two differ after some iteration.
        """
        with patch.object(sim_request, "output_tokens", self._output):
            self.engine.run()

    def _table_shape(self) -> tuple[int, int]:
        # As wide as the real one at least.
        width = int(self.engine.scheduler.req_to_token_pool.req_to_token.shape[1])
        rows, needed = self._options.table_shape
        return rows, max(width, needed)

    def _arrivals(self) -> Iterator[SimRequest]:
        for i, (arrival, tokens, count) in enumerate(self._trace):
            named = np.array(tokens, dtype=np.int64)
            yield SimRequest(i, arrival, len(tokens), count, lambda named=named: named)

    def _output(self, index: int, start: int, count: int) -> Any:
        return np.array(self._requests[index].output_ids[start : start + count], dtype=np.int64)

    def _feed(self, iteration: int) -> Sequence[Any]:
        messages = []
        while self._sent < len(self._trace) and self._trace[self._sent].arrival <= self.model.now:
            ask = self._trace[self._sent]
            messages.append(generate(str(self._sent), ask.tokens, ask.count))
            self._sent += 1
        return messages

    def _at_top(self, iteration: int) -> None:
        for request in self.engine.requests():
            self._requests[int(request.rid)] = request
        if iteration == 1 or self._over:
            return
        model = self.model
        model._receive()
        info = model._pass()
        self._compare()
        self.compared += 1
        model.check_integrity()
        if info is None and model._is_idle():
            assert self.engine.idle()
            info = model._idle()
            self._over = info is None
        if info is not None:
            model.totals.add(info)

    def _compare(self) -> None:
        s, model = self.engine.scheduler, self.model
        ours = self._slots.free_slots().tolist()
        theirs = s.token_to_kv_pool_allocator.free_pages.tolist()
        assert ours == theirs, _first_difference(ours, theirs)
        names = compat()
        live = {k.row: k for r in requests_of(s) if (k := names.lengths(r)) is not None}
        assert sorted(live) == model.rows.live_rows().tolist()
        for row, lengths in live.items():
            assert lengths.allocated == model.rows.allocated_len[row]
            assert lengths.protected == model.rows.protected_len[row]
            end = lengths.allocated
            if self._slots.reservations is not None:
                end = int(self._slots.reservations.held[row])
            real = s.req_to_token_pool.req_to_token[row, :end]
            assert real.tolist() == self._table[row, :end].tolist()
        assert _nodes(s.tree_cache.root_node, real=True) == _nodes(model.tree.root, real=False)
        sizes = s.tree_cache.evictable_size(), s.tree_cache.protected_size()
        assert sizes == (model.tree.evictable_size, model.tree.protected_size)


def _first_difference(ours: list[int], theirs: list[int]) -> str:
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"free slot {at} is {a} in the model and {b} in the scheduler"
    return f"{len(ours)} slots are free in the model and {len(theirs)} in the scheduler"


def _nodes(root: Any, *, real: bool) -> dict[tuple[int, ...], tuple[list[int], int]]:
    """Return slots and locks of every node by the tokens that lead to it."""
    found, left = {}, [(root, ())]
    while left:
        node, path = left.pop()
        for child in node.children.values():
            key = child.key.token_ids if real else child.key.tolist()
            below = (*path, *key)
            value, locks = (child.value, child.lock_ref) if real else (child.slots, child.locks)
            found[below] = (value.tolist(), locks)
            left.append((child, below))
    return found
