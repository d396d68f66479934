"""Small engines for tests: prompts given token by token, every step taking one second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvdefrag.core.allocator import Discipline, SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.sim.engine import Engine
from kvdefrag.sim.engine_types import AcceptanceSource, EngineOptions, StepInfo
from kvdefrag.sim.request import SimRequest


def request(
    index: int, prompt: Sequence[int], output: int, *, arrival: float = 0.0, turn: int = 0
) -> SimRequest:
    """Return a request whose prompt has the given token identities."""
    tokens = np.array(prompt, dtype=np.int64)
    return SimRequest(index, arrival, len(tokens), output, lambda: tokens, turn)


@dataclass
class FixedLengths:
    """Accepts what it was told to, one list per step; then everything."""

    steps: list[list[int]]
    window: int
    asked: list[list[int]] = field(default_factory=list)

    def draw(self, request_turns: IntArray) -> IntArray:
        self.asked.append(request_turns.tolist())
        kept = self.steps.pop(0) if self.steps else [self.window] * len(request_turns)
        return np.array(kept, dtype=np.int64)


class Served:
    """An engine, its allocator, and the steps taken so far."""

    def __init__(
        self,
        requests: Iterable[SimRequest],
        pool: int,
        *,
        accepted: AcceptanceSource | None = None,
        discipline: Discipline = "fifo",
        reservation: bool = False,
        max_running: int = 4,
        context: int = 4096,
        overlap: bool = False,
        **options: float,
    ) -> None:
        self.options = EngineOptions(
            pool_slots=pool, max_running=max_running, context=context, overlap=overlap, **options
        )
        self.table = torch.zeros(self.options.table_shape, dtype=torch.int32)
        self.allocator = SlotAllocator(
            pool, table=self.table, discipline=discipline, reservation=reservation, page=4
        )
        self.engine = Engine(
            self.options, self.allocator, self.table, iter(requests), lambda _: 1.0, accepted
        )
        self.steps: list[StepInfo] = []

    def step(self) -> StepInfo:
        info = self.engine.step()
        assert info is not None
        self.steps.append(info)
        self.engine.check_integrity()
        return info

    def run(self) -> list[StepInfo]:
        while (info := self.engine.step()) is not None:
            self.steps.append(info)
            self.engine.check_integrity()
        return self.steps

    def until(self, kind: str, count: int = 1) -> StepInfo:
        """Step until `count` further steps of a kind were taken; return the last."""
        while True:
            info = self.step()
            count -= info.kind.value == kind
            if not count:
                return info

    def slots(self, row: int) -> list[int]:
        length = int(self.engine.rows.allocated_len[row])
        return self.table[row, :length].tolist()

    def free(self) -> list[int]:
        return self.allocator.free_slots().tolist()

    def story(self) -> list[tuple[str, list[int], list[int], list[int]]]:
        return [
            (s.kind.value, s.rows.tolist(), s.starts.tolist(), s.counts.tolist())
            for s in self.steps
        ]


@pytest.fixture(scope="session")
def make_request():
    return request


@pytest.fixture(scope="session")
def serve():
    return Served


@pytest.fixture(scope="session")
def fixed_lengths():
    return FixedLengths
