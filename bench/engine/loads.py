"""What the engine is asked for: requests by iteration or as fast as it takes them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 30_000  # fewer than any model of `checkpoints` has


@dataclass(frozen=True)
class Ask:
    """One request: `count` tokens behind `tokens`, from iteration `at` on."""

    rid: str
    at: int
    tokens: Sequence[int]
    count: int


def load(spec: Mapping[str, Any]) -> Iterator[Ask]:
    """Return the requests that a description names, in order of arrival.

    `mixed`: `requests` prompts of `shortest` to `longest` tokens, every second one behind a
    shared beginning of `shared` tokens, for `count` tokens each, or for `fewest` to `count`; they
    arrive over the first `spread` iterations.
    `trace`: requests of a trace in Mooncake's or Azure's format, lengths divided by `divide`;
    the next one arrives as soon as the engine has nothing waiting.
    """
    kinds = {"mixed": _mixed, "trace": _trace}
    return kinds[spec["kind"]](**{k: v for k, v in spec.items() if k != "kind"})


def _mixed(
    *,
    requests: int,
    count: int,
    shortest: int = 50,
    longest: int = 680,
    shared: int = 60,
    spread: int = 1,
    seed: int = 0,
    fewest: int = 0,
    vocabulary: int = VOCABULARY,
) -> Iterator[Ask]:
    draw = random.Random(seed)
    head = _tokens(draw, shared, vocabulary)
    for i in range(requests):
        own = _tokens(draw, draw.randint(shortest, longest), vocabulary)
        at = 1 + i * spread // requests
        wanted = draw.randint(fewest, count) if fewest else count
        yield Ask(f"r{seed}-{i}", at, head + own if i % 2 else own, wanted)


def _trace(
    *, path: str, form: str, divide: int = 1, skip: int = 0, limit: int = 1_000_000, most: int = 0
) -> Iterator[Ask]:
    rows = {"mooncake": _mooncake, "azure": _azure}[form](Path(path))
    for number, (prompt, count) in enumerate(rows):
        if number < skip:
            continue
        if number >= skip + limit:
            return
        tokens = [t for seed, n in prompt for t in _tokens(random.Random(seed), n)]
        tokens = tokens[: max(1, len(tokens) // divide)]
        tokens = tokens[:most] if most else tokens
        yield Ask(f"t{number}", 0, tokens, max(1, count // divide))


def _mooncake(path: Path) -> Iterator[tuple[list[tuple[int, int]], int]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            left, blocks = row["input_length"], []
            for block in row["hash_ids"]:
                blocks.append((block, min(512, left)))
                left -= 512
            yield blocks, row["output_length"]


def _azure(path: Path) -> Iterator[tuple[list[tuple[int, int]], int]]:
    with path.open(encoding="utf-8") as file:
        next(file)
        for number, line in enumerate(file):
            _, prompt, answer = line.rsplit(",", 2)
            yield [(1_000_000 + number, int(prompt))], int(answer)


def _tokens(draw: random.Random, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    return [3 + int(vocabulary * draw.random()) for _ in range(count)]
