"""Options of the engine model, and what it says about each of its steps."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvdefrag.core.demand import IntArray
from kvdefrag.errors import ConfigError


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is started; names in brackets are SGLang's.

    Attributes:
        pool_slots: Slots of the pool [max_total_tokens].
        max_running: Requests that hold a table row at once [max_running_requests].
        context: Longest sequence of the model [context_length].
        chunked_prefill: Prompt tokens of one prefill step [chunked_prefill_size].
        max_prefill: Prompt tokens after which a prefill step takes no further request
            [max_prefill_tokens].
        spec_window: Draft tokens verified per request and step; 0 without speculation.
        overlap: Whether a step is launched before the results of the one before it are taken in
            [not disable_overlap_schedule]: what finishes takes part in one step more.
        page: Slots to an aligned page; only widens the table, the engine itself has pages of 1.
        conservativeness: Factor on the share of its output that a running request is expected to
            still need [schedule_conservativeness].
    """

    pool_slots: int
    max_running: int = 64
    context: int = 131_072
    chunked_prefill: int = 8192
    max_prefill: int = 16_384
    spec_window: int = 0
    overlap: bool = True
    page: int = 64
    conservativeness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("pool_slots", "max_running", "context", "chunked_prefill", "max_prefill"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not allowed; at least 1")
        if self.spec_window < 0:
            raise ConfigError(f"spec_window: {self.spec_window} is not allowed; 0 or more")

    @property
    def table_shape(self) -> tuple[int, int]:
        """Rows and columns of the table that the engine needs; row 0 is never used."""
        return self.max_running + 1, self.context + 4 + 2 * self.spec_window + self.page

    @property
    def longest_sequence(self) -> int:
        """Prompt and output together never exceed this."""
        return min(self.context, self.pool_slots) - 1

    def fits(self, prompt_len: int) -> bool:
        """Say whether a prompt is admissible at all: shorter than pool and context by a margin."""
        return 0 < prompt_len < self.longest_sequence - 5

    def clip_output(self, prompt_len: int, output_len: int) -> int:
        """Return how many tokens may be generated after such a prompt."""
        room = min(self.longest_sequence - prompt_len - 1, self.pool_slots - prompt_len - 2)
        return max(0, min(output_len, room))


class StepKind(enum.Enum):
    """What a step did."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, eq=False)
class StepInfo:
    """One pass of the scheduler. Arrays are int64, in batch order, and not reused afterwards.

    What was launched is in `rows`, `starts` and `counts`; what came of a launch (`output_tokens`,
    `finished_rows`) is told by the step that takes it in: the same one, or with overlap the next.

    Attributes:
        index: Steps before this one.
        kind: Prefill, decode, or idle: nothing was launched.
        start_s: Simulated time at which it began.
        idle_s: Seconds waited for the next arrival.
        rows: [n], table rows of the batch.
        starts: [n], tokens already in the pool for each: cached prefix or context.
        counts: [n], tokens the model computes for each: prompt tokens, 1, or the window.
        hit_tokens: Prefix tokens found in the tree, first attempts only.
        prompt_tokens: Prompt tokens computed, first attempts only.
        redone_tokens: Tokens computed again for requests that were retracted.
        output_tokens: Tokens generated.
        new_rows: Rows given out in this step.
        finished_rows, retracted_rows, aborted_rows: Rows given back in this step, by reason.
        evicted_tokens: Slots that cached prefixes lost.
        running, waiting: Requests in the running batch and in the queue afterwards.
    """

    index: int
    kind: StepKind
    start_s: float
    rows: IntArray
    starts: IntArray
    counts: IntArray
    idle_s: float = 0.0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    redone_tokens: int = 0
    output_tokens: int = 0
    new_rows: tuple[int, ...] = ()
    finished_rows: tuple[int, ...] = ()
    retracted_rows: tuple[int, ...] = ()
    aborted_rows: tuple[int, ...] = ()
    evicted_tokens: int = 0
    running: int = 0
    waiting: int = 0


@dataclass
class Totals:
    """Counts over a run so far."""

    steps: int = 0
    arrived: int = 0
    finished: int = 0
    rejected: int = 0
    clipped: int = 0
    aborted: int = 0
    retractions: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    redone_tokens: int = 0
    output_tokens: int = 0
    evicted_tokens: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in the tree, first attempts only; 0 before any."""
        asked = self.hit_tokens + self.prompt_tokens
        return self.hit_tokens / asked if asked else 0.0

    def add(self, step: StepInfo) -> None:
        """Count one step."""
        self.steps += 1
        self.finished += len(step.finished_rows)
        self.retractions += len(step.retracted_rows)
        self.aborted += len(step.aborted_rows)
        self.hit_tokens += step.hit_tokens
        self.prompt_tokens += step.prompt_tokens
        self.redone_tokens += step.redone_tokens
        self.output_tokens += step.output_tokens
        self.evicted_tokens += step.evicted_tokens


class AcceptanceSource(Protocol):
    """Says how many tokens a verification keeps."""

    def draw(self, request_turns: IntArray) -> IntArray:
        """Return accepted lengths, int64 [n] in 1..window, for requests of the given turns."""
        ...


StepCost = Callable[[StepInfo], float]
"""Gives the seconds that a step takes; not asked for idle ones."""
