"""Draw how many tokens each verify step of speculative decoding commits.

Measured: for each of 160 turns of MT-bench (EAGLE, Llama-2-chat-70B, temperature 0) the tokens
committed and the verify steps taken, hence the turn's mean tokens per step. The tree that was used
has 5 draft levels, so a step commits 1 to 6 tokens, the target model's own token included. No
lengths of single steps were published.

Assumed: within a turn every draft level is accepted with the same probability a, independently of
the others, so P(length > k) = a**k for k < the tree's levels: a geometric law cut off at the top.
For each turn, a is the one value whose mean 1 + a + ... + a**5 is the turn's measured mean. A
window of w tokens cuts the same law off at w: means at w = 6 are the measured ones, at w < 6 they
are smaller, at w > 6 they go beyond what was measured. Which turn a request behaves like is
drawn uniformly over the turns.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdefrag.data import EAGLE_MTBENCH, open_data
from kvdefrag.errors import ConfigError

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_HALVINGS = 60


@dataclass(frozen=True)
class AcceptanceData:
    """What was measured, one entry per turn.

    Attributes:
        tokens: int64 [turns], tokens committed.
        steps: int64 [turns], verify steps taken.
        longest: Most tokens that one step could commit in the measurement.
    """

    tokens: Int64Array
    steps: Int64Array
    longest: int

    @property
    def means(self) -> FloatArray:
        """float64 [turns], tokens committed per verify step."""
        return self.tokens / self.steps


def load_eagle_mtbench() -> AcceptanceData:
    """Return the shipped EAGLE measurement: 160 turns, 3.62 tokens per step over all of them."""
    with open_data(EAGLE_MTBENCH) as file:
        rows = list(csv.DictReader(file.read().decode().splitlines()))
    return AcceptanceData(
        tokens=np.array([int(row["new_tokens"]) for row in rows], dtype=np.int64),
        # `idx` numbers the turn's last step from 0.
        steps=np.array([int(row["idx"]) + 1 for row in rows], dtype=np.int64),
        longest=6,
    )


def acceptance_rates(means: FloatArray, longest: int) -> FloatArray:
    """Return the rate a in [0, 1] with 1 + a + ... + a**(longest - 1) equal to each mean.

    Raises:
        ValueError: A mean outside 1..longest, which no rate gives.
    """
    if np.any(means < 1) or np.any(means > longest):
        raise ValueError(f"means must be in 1..{longest}, got {means.min()}..{means.max()}")
    low, high = np.zeros_like(means), np.ones_like(means)
    powers = np.arange(longest)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        under = (middle[:, None] ** powers).sum(axis=1) < means
        low, high = np.where(under, middle, low), np.where(under, high, middle)
    rates: FloatArray = (low + high) / 2
    return rates


class AcceptedLengths:
    """Draws accepted lengths in 1..window; equal seeds and calls give equal draws.

    Args:
        window: Most tokens a step may commit, the target model's own token included.
        data: The measurement to follow.
        rng: The only source of randomness; it is advanced by `assign` and `draw`.

    Raises:
        ConfigError: The window is below 1.
    """

    def __init__(self, window: int, data: AcceptanceData, rng: np.random.Generator) -> None:
        if window < 1:
            raise ConfigError(f"--spec-window {window} must be at least 1")
        self.window = window
        self.turns = len(data.steps)
        self._rng = rng
        rates = acceptance_rates(data.means, data.longest)
        # float64 [turns, window - 1]: P(length > k) for k = 1 .. window - 1.
        self._exceeds = rates[:, None] ** np.arange(1, window)

    def mean(self, turn: int) -> float:
        """Return the expected length of a step of a request that behaves like `turn`."""
        return float(1 + self._exceeds[turn].sum())

    def assign(self, requests: int) -> Int64Array:
        """Draw the turn each of `requests` requests behaves like: int64 [requests]."""
        return self._rng.integers(0, self.turns, size=requests, dtype=np.int64)

    def draw(self, request_turns: Int64Array) -> Int64Array:
        """Draw one step: int64, the shape of `request_turns`, in 1..window.

        Args:
            request_turns: int64 [running], the turn of each request, in 0..turns-1.
        """
        turns = np.asarray(request_turns, dtype=np.int64)
        if turns.size and not 0 <= turns.min() <= turns.max() < self.turns:
            raise IndexError(f"turns must be in 0..{self.turns - 1}")
        chance = self._rng.random(turns.shape)
        accepted = (chance[..., None] < self._exceeds[turns]).sum(axis=-1, dtype=np.int64)
        lengths: Int64Array = accepted + 1
        return lengths
