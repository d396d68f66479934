"""A policy for tests: every step a mechanism and a budget drawn at random, back-off or not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvdefrag.config import Config
from kvdefrag.core.payback import PayBack
from kvdefrag.core.policy import Decision, Gather, Lower, Mechanism, Policy, Situation

MECHANISMS = tuple(m for m in Mechanism if m is not Mechanism.NONE)


class ChaosPolicy(Policy):
    """Decides at random, the same way for the same seed.

    Args:
        config, row_bytes, payback: As for `Policy`.
        seed: Fixes the decisions.
        rows: Returns table row and generation of each running request, in a fixed order.

    Attributes:
        chosen: How often each mechanism was chosen.
    """

    def __init__(
        self,
        config: Config,
        *,
        row_bytes: int,
        payback: PayBack,
        seed: int,
        rows: Callable[[], Sequence[tuple[int, int]]],
    ) -> None:
        super().__init__(config, row_bytes=row_bytes, payback=payback)
        self._draw, self._page, self._running = random.Random(seed), config.page, rows
        self.chosen: Counter[str] = Counter()

    @property
    def may_tenure(self) -> bool:
        return True

    def blocked(self, step: int, gates: tuple[str, ...]) -> Decision | None:
        if gates:
            return Decision(Mechanism.NONE, 0, "gate closed", gates[0])
        return None

    def decide(self, now: Situation) -> Decision:
        mechanism = self._draw.choice(MECHANISMS)
        rows = self._draw.choice((self._page, 2 * self._page, 5 * self._page, 1000))
        self.demands.clear()
        if mechanism is Mechanism.GATHER:
            running = self._running()
            if not running:
                return Decision(Mechanism.NONE, 0, "idle")
            row, generation = self._draw.choice(running)
            self.demands.append(Gather(row, generation, self._draw.choice((0, 0, 7, 20))))
        if mechanism is Mechanism.LOWER:
            self.demands.append(Lower(self._draw.choice((3, 40, 1000))))
        self.chosen[mechanism.value] += 1
        return Decision(mechanism, rows, "chaos")

    def moved(self, step: int, rows: int) -> None:
        pass


def disturb(scheduler: Any, attachment: Any, seed: int) -> ChaosPolicy:
    """Let a policy that decides at random take the place of an attachment's; return it."""
    from kvdefrag.sglang.census import owners_of
    from kvdefrag.sglang.compat import compat

    defragmenter, names = attachment.defragmenter, compat()
    generations = scheduler.req_to_token_pool.req_generation

    def rows() -> list[tuple[int, int]]:
        numbers = sorted(k.row for k, _ in owners_of(scheduler, names))
        return [(row, int(generations[row])) for row in numbers]

    old = defragmenter._policy
    policy = ChaosPolicy(
        defragmenter.config, row_bytes=old._row_bytes, payback=old._payback, seed=seed, rows=rows
    )
    defragmenter._policy = policy
    return policy
