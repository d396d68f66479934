"""Requests that share prefixes, and what happens to them on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """One request: arrives in iteration `at`, wants `count` tokens behind `tokens`."""

    rid: str
    at: int
    tokens: tuple[int, ...]
    count: int
    session: str | None = None


@dataclass(frozen=True)
class Workload:
    """Requests, and when some are aborted.

    Attributes:
        asks: In order of arrival.
        aborts: Request and iteration.
        flush: Empty the cache once all is served, and serve it all again.
    """

    asks: tuple[Ask, ...]
    aborts: tuple[tuple[str, int], ...] = ()
    flush: bool = False

    @property
    def aborted(self) -> frozenset[str]:
        """Requests whose output may be cut short."""
        return frozenset(rid for rid, _ in self.aborts)


def shared_prefixes(
    *,
    requests: int,
    count: int,
    seed: int,
    groups: int = 4,
    prefix: int = 48,
    own: tuple[int, int] = (4, 24),
    spread: int = 40,
    abort: float = 0.0,
    flush: bool = False,
) -> Workload:
    """Return requests in `groups` that share their first `prefix` tokens.

    Args:
        requests: How many.
        count: Tokens each asks for, half to all of it.
        seed: Fixes everything.
        groups: Number of prefixes.
        prefix: Tokens of each.
        own: Shortest and longest rest of a prompt.
        spread: Iterations over which they arrive; the first half arrive at once.
        abort: Share that is aborted.
        flush: See `Workload`.
    """
    draw = random.Random(seed)
    heads = [_tokens(draw, prefix) for _ in range(groups)]
    asks = []
    for i in range(requests):
        at = 1 if i < requests // 2 else draw.randrange(1, spread)
        tokens = heads[i % groups] + _tokens(draw, draw.randint(*own))
        asks.append(Ask(f"r{i}", at, tokens, draw.randint(count // 2, count)))
    aborts = tuple((a.rid, a.at + draw.randrange(1, count)) for a in asks if draw.random() < abort)
    return Workload(tuple(sorted(asks, key=lambda a: a.at)), aborts, flush)


def sessions(*, turns: int, count: int, seed: int) -> Workload:
    """Return two conversations of `turns` turns among other requests."""
    draw = random.Random(seed)
    asks = []
    for turn in range(turns):
        for name in ("s0", "s1"):
            tokens = _tokens(draw, 30 if turn == 0 else 9)
            asks.append(Ask(f"{name}t{turn}", 1 + 60 * turn, tokens, count, session=name))
    for i in range(2 * turns):
        asks.append(Ask(f"r{i}", 1 + 25 * i, _tokens(draw, draw.randint(20, 70)), count))
    return Workload(tuple(sorted(asks, key=lambda a: a.at)))


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, 1000) for _ in range(count))
