"""Writes the trace that defeats reservation: a full pool, short shared prefixes, long outputs.

Requests come in bursts. Each shares a prefix of 96 tokens, which ends off page borders, with a
random few of the others, adds a short prompt of its own and decodes for thousands of tokens; three
in ten are cut short at a random point, as aborted ones are. Decode then outgrows the pool: whole
free pages run out while slots are free, and reserved slots have to be given back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK = 96


@dataclass(frozen=True)
class Adversary:
    """Shape of the load.

    Attributes:
        requests: How many.
        prefixes: Distinct shared prefixes.
        burst, gap_ms: Requests that come at once, and time to the next burst.
        own: Tokens of a prompt behind the prefix, at most.
        outputs: Fewest and most output tokens.
        cut_short: Share of requests that end at a random point of their output.
        seed: Seed of the generator.
    """

    requests: int = 300
    prefixes: int = 200
    burst: int = 40
    gap_ms: int = 4000
    own: int = 200
    outputs: tuple[int, int] = (2000, 6000)
    cut_short: float = 0.3
    seed: int = 0

    def write(self, path: Path) -> None:
        """Write the trace in Mooncake's format, with blocks of `BLOCK` tokens."""
        rng = np.random.default_rng(self.seed)
        next_id, lines = self.prefixes, []
        for i in range(self.requests):
            own = int(rng.integers(1, self.own + 1))
            blocks = -(-own // BLOCK)
            output = int(rng.integers(self.outputs[0], self.outputs[1] + 1))
            if rng.random() < self.cut_short:
                output = max(1, int(output * rng.random()))
            row = {
                "timestamp": i // self.burst * self.gap_ms,
                "input_length": BLOCK + own,
                "output_length": output,
                "hash_ids": [int(rng.integers(self.prefixes)), *range(next_id, next_id + blocks)],
            }
            next_id += blocks
            lines.append(json.dumps(row))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
