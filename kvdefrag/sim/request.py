"""What the engine model is asked to serve, and how far it has got with each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvdefrag.core.demand import IntArray
from kvdefrag.sim.radix_node import Node
from kvdefrag.sim.readers import TraceRequest
from kvdefrag.sim.workload import Workload, output_tokens


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request as the workload gives it.

    Attributes:
        index: Position in order of arrival; names the request everywhere, below 2**31.
        arrival_s: Simulated seconds; requests come in order of it.
        prompt_len: Tokens of the prompt.
        output_len: Tokens to generate; 0 is allowed (see `Engine`).
        tokens: Gives the identities of the prompt's tokens, int64 [prompt_len], all >= 0. Two
            prompts share a prefix exactly as far as these are equal. Called when the request is
            looked at for admission, so that a long queue does not hold them.
        turn: What its accepted lengths are drawn for, with speculation.
    """

    index: int
    arrival_s: float
    prompt_len: int
    output_len: int
    tokens: Callable[[], IntArray]
    turn: int = 0


def sim_requests(
    trace: Iterable[TraceRequest], workload: Workload, turn: Callable[[], int] | None = None
) -> Iterator[SimRequest]:
    """Go through a trace as requests to an engine; `turn` is asked once for each, in order."""
    for request in trace:
        yield SimRequest(
            request.index,
            request.arrival_s,
            workload.prompt_length(request),
            request.output_tokens,
            partial(workload.prompt_tokens, request),
            turn() if turn is not None else 0,
        )


class Job:
    """A request that has arrived: what the scheduler knows of it between its steps.

    Attributes:
        request: What was asked.
        limit: Output tokens at which it finishes, after clipping to pool and context.
        generated: Output tokens so far; the row's own count is ahead of it while it runs.
        row: Its table row, 0 while it waits.
        node: Deepest tree node it has locked (or matched, while it waits).
        matched: Tokens of its prefix that were in the tree when it was last matched.
        end: Tokens its latest prefill chunk reaches.
        retracted: Whether it lost its slots once; its prefix hits no longer count then.
    """

    __slots__ = ("_prompt", "end", "generated", "limit", "matched", "node", "request", "retracted",
                 "row")  # fmt: skip

    def __init__(self, request: SimRequest, limit: int, root: Node) -> None:
        self.request = request
        self.limit = limit
        self.generated = 0
        self.row = 0
        self.node = root
        self.matched = 0
        self.end = 0
        self.retracted = False
        self._prompt: IntArray | None = None

    @property
    def fill_len(self) -> int:
        """Tokens that must be in the pool before it can decode: prompt and outputs so far."""
        return self.request.prompt_len + self.generated

    def tokens(self, start: int, end: int) -> IntArray:
        """Return the identities of tokens `[start, end)` of prompt and output, int64.

        Output tokens are negative numbers that no other request has: a generated text is taken
        to be nobody's prompt unless the workload's later prompts say so.
        """
        if self._prompt is None:
            self._prompt = self.request.tokens()
        prompt_len = self.request.prompt_len
        if end <= prompt_len:
            return self._prompt[start:end]
        begin = max(start, prompt_len)
        outputs = output_tokens(self.request.index, begin - prompt_len, end - begin)
        if start >= prompt_len:
            return outputs
        return np.concatenate([self._prompt[start:], outputs])

    def forget_tokens(self) -> None:
        """Drop the cached identities; `tokens` asks the workload again."""
        self._prompt = None
