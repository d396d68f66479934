"""Which waiting requests may join the next prefill: SGLang's `PrefillAdder`, page size 1.

Read in 0.5.17, `managers/schedule_policy.py`. Two budgets are kept in slots: what is free or
could be evicted, less what running requests are expected to still need; and the tokens that one
prefill step computes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.demand import IntArray
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.radix import RadixTree
from kvdefrag.sim.request import Job

CLIP_OUTPUT = 4096
"""Longest output that admission reserves for; longer ones may still be generated."""
SLACK = 1
"""Extra slot per request, for page rounding in the engine (its page size is 1)."""


class Verdict(enum.Enum):
    """What trying to add a request came to."""

    CONTINUE = "continue"
    NO_SLOTS = "no_slots"
    STEP_FULL = "step_full"


class Extend(NamedTuple):
    """One request's share of a prefill step: tokens `[start, end)`."""

    job: Job
    start: int
    end: int


@dataclass
class TokenRatio:
    """Share of its output limit that a running request is expected to still need.

    Falls with every decode step, from 0.7 to 0.098 over 600 steps, is estimated anew after a
    retraction and starts again when the engine is idle.
    """

    conservativeness: float = 1.0
    current: float = field(init=False)

    def __post_init__(self) -> None:
        self._initial = min(0.7 * self.conservativeness, 1.0)
        self._lowest = min(self._initial * 0.14, 1.0)
        self._decay = (self._initial - self._lowest) / 600
        self.current = self._initial

    def decay(self) -> None:
        """Expect a little less, after a decode step without retraction."""
        self.current = max(self.current - self._decay, self._lowest)

    def reset(self) -> None:
        """Start again, when idle."""
        self.current = self._initial

    def estimate(self, generated: IntArray, limits: IntArray, steps: int) -> None:
        """Expect what the requests kept after a retraction have used, `steps` later."""
        done = int(generated.sum()) + steps * generated.shape[0]
        self.current = min(1.0, done / (int(limits.sum()) + 1))


class Admission:
    """The budgets of one prefill step, and the requests added to it so far.

    Args:
        tree: Locks the prefix of what is added.
        allocator: Reserved slots count as free here: they are given back before a request waits.
        remaining: int64 [n], output tokens that each running request has left. Those that
            finished since the batch was last filtered are among them, as in SGLang.
        ratio: See `TokenRatio`.
        options: Step sizes.
    """

    def __init__(
        self,
        tree: RadixTree,
        allocator: SlotAllocator,
        remaining: IntArray,
        ratio: float,
        options: EngineOptions,
    ) -> None:
        self.extends: list[Extend] = []
        self.chunked: Job | None = None
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self.redone_tokens = 0
        self._tree = tree
        self._allocator = allocator
        # Summed one by one: the order of rounding is SGLang's.
        expected: npt.NDArray[np.float64] = np.minimum(remaining, CLIP_OUTPUT) * ratio
        self._later: float = sum(expected.tolist())
        self._now = 0
        self._input_left = options.max_prefill
        self._chunk_left = options.chunked_prefill

    def continue_chunked(self, job: Job, start: int) -> None:
        """Add the next chunk of a request in mid-prefill; sets `chunked` unless it is the last."""
        room = min(self._chunk_left, int(self._slots_left))
        if room <= 0:
            room = self._chunk_left
        size = min(job.fill_len - start, room)
        truncated = size < job.fill_len - start
        self.chunked = job if truncated else None
        self._add(job, start, start + size, 0 if truncated else min(job.limit, CLIP_OUTPUT), 0)

    def add(self, job: Job) -> Verdict:
        """Try to add a waiting request whose prefix has been matched, and lock that prefix."""
        total = job.fill_len - job.matched
        total += min(max(job.limit - job.generated, 0), CLIP_OUTPUT) + SLACK
        if total >= self._slots_left:
            return Verdict.NO_SLOTS
        self._tree.lock(job.node)
        # Locking may have taken its prefix out of what could be evicted.
        if total >= self._slots_left:
            self._tree.unlock(job.node)
            return Verdict.NO_SLOTS
        size = job.fill_len - job.matched
        if size <= self._chunk_left:
            self._add(job, job.matched, job.fill_len, min(job.limit, CLIP_OUTPUT), job.matched)
            return self._verdict()
        if self._chunk_left <= 0:
            self._tree.unlock(job.node)
            return Verdict.STEP_FULL
        self.chunked = job
        self._add(job, job.matched, job.matched + self._chunk_left, 0, job.matched)
        return self._verdict()

    @property
    def _slots_left(self) -> float:
        return self._obtainable() - self._later

    def _obtainable(self) -> int:
        free = self._allocator.available_size()
        return free + self._tree.evictable_size

    def _add(self, job: Job, start: int, end: int, outputs: int, hits: int) -> None:
        size = end - start
        self.extends.append(Extend(job, start, end))
        self._later += size + outputs + SLACK
        self._now += size + SLACK
        self._input_left -= size
        self._chunk_left -= size
        if job.retracted:
            self.redone_tokens += size
        else:
            self.prompt_tokens += size
            self.hit_tokens += hits

    def _verdict(self) -> Verdict:
        if self._slots_left <= 0 or self._obtainable() - self._now <= 0:
            return Verdict.NO_SLOTS
        if self._input_left <= 0 or self._chunk_left <= 0:
            return Verdict.STEP_FULL
        return Verdict.CONTINUE
