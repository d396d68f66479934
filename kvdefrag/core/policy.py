"""Decides, from host numbers alone, whether a step relocates, how, and how much."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from kvdefrag.config import Config
from kvdefrag.core.budget import DutyBudget
from kvdefrag.core.payback import PayBack


class Mechanism(enum.Enum):
    """Ways to relocate."""

    NONE = "none"
    TENURE = "tenure"
    EVACUATION = "evacuation"
    GATHER = "gather"
    LOWER = "lower"
    IDLE = "idle"


@dataclass
class Gather:
    """Somebody wants one request in one run.

    Attributes:
        row, generation: The request.
        position: Tokens already dealt with.
    """

    row: int
    generation: int
    position: int = 0


@dataclass
class Lower:
    """Somebody wants the top of the pool: at most `rows` more rows are moved downward."""

    rows: int


Demanded = Gather | Lower


@dataclass(frozen=True)
class Situation:
    """What the policy looks at.

    Attributes:
        running: Requests that run or wait to run.
        groups_ready: Groups of a page that may wait for tenure.
        packed: Page coverage last measured as a share of a perfect layout's, None if never.
        whole_free_share: Share of the pool in whole free pages, at least.
        unusable_free_share: Share of the free slots outside whole pages, at most.
        remaining_steps: Steps a running request has left on the average, None if unknown.
    """

    running: int
    groups_ready: int
    packed: float | None
    whole_free_share: float
    unusable_free_share: float
    remaining_steps: float | None


@dataclass(frozen=True)
class Decision:
    """What a step does: at most `rows` rows by `mechanism`.

    `reason` is one of a few fixed texts, fit for a label; `detail` may hold numbers.
    """

    mechanism: Mechanism
    rows: int
    reason: str
    detail: str = ""


class Mark:
    """A mark with hysteresis: on below `low`, off from `high` on."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high
        self.on = False

    def update(self, value: float) -> bool:
        """Return whether the mark is on, given the newest value."""
        self.on = value < (self._high if self.on else self._low)
        return self.on


class Policy:
    """Triggers, budget, back-off and pay-back.

    Deterministic: the same situations give the same decisions, on every rank.

    Args:
        config: The settings.
        row_bytes: Bytes of one slot over all buffers.
        payback: Prices relocation in mode `auto`.
        verify: Whether steps verify drafts.
    """

    def __init__(
        self, config: Config, *, row_bytes: int, payback: PayBack, verify: bool = False
    ) -> None:
        rules = config.relocation
        self._config, self._rules = config, rules
        self._row_bytes, self._payback, self._verify = row_bytes, payback, verify
        self._budget = DutyBudget(
            bytes_per_step=rules.bytes_per_step, duty_bytes_per_step=rules.duty_bytes_per_step
        )
        self._coverage = Mark(rules.coverage_low, rules.coverage_high)
        self._whole_free = Mark(rules.whole_free_low, rules.whole_free_high)
        self._shift = -1
        self.backoff_until = 0
        self.demands: deque[Demanded] = deque()

    @property
    def heeds_coverage(self) -> bool:
        """Whether coverage decides anything."""
        rules = self._rules
        pays = rules.mode == "threshold" or (rules.mode == "auto" and self._payback.may_pay)
        return pays and rules.mechanisms.tenure

    @property
    def may_tenure(self) -> bool:
        """Whether tenure may happen without being asked for."""
        stopped = self._config.kill_switch or self._rules.dry_run
        return self.heeds_coverage and not stopped

    def blocked(self, step: int, gates: tuple[str, ...]) -> Decision | None:
        """Return why this step does nothing, without a look at the requests; None to look.

        Called once a step: it counts the step for the budget.
        """
        self._budget.advance()
        rules = self._rules
        if self._config.kill_switch:
            return _none("kill switch")
        if rules.mode == "off":
            return _none("relocation is off")
        if gates:
            return _none("gate closed", gates[0])
        if self.demands and rules.mechanisms.on_demand:
            return None
        if rules.mode == "on_demand":
            return _none("nothing was asked for")
        if rules.mode == "auto" and not self._payback.may_pay:
            return _none(self._payback.unpaid)
        if step < self.backoff_until:
            return _none("backing off")
        if step % rules.tenure_interval:
            return _none("not due")
        return None if self._rows() >= self._config.page else _none("budget spent")

    def decide(self, now: Situation) -> Decision:
        """Return what to do in a step that is not blocked."""
        if self.demands and self._rules.mechanisms.on_demand:
            return self._on_demand()
        low_coverage = now.packed is None or self._coverage.update(now.packed)
        few_pages = self._whole_free.update(now.whole_free_share)
        if self._rules.mode == "auto":
            verdict = self._payback.judge(now.remaining_steps, verify=self._verify)
            if not verdict.pays:
                return _none(verdict.reason, verdict.detail)
        mechanisms, rows = self._rules.mechanisms, self._rows()
        if now.running == 0:
            return self._idle(rows)
        scattered = now.unusable_free_share >= self._rules.unusable_free_min
        if mechanisms.evacuation and few_pages and scattered:
            return Decision(Mechanism.EVACUATION, rows, "whole free pages run short")
        if mechanisms.tenure and low_coverage and now.groups_ready:
            return Decision(Mechanism.TENURE, rows, "groups outside aligned pages")
        return _none("no trigger")

    def moved(self, step: int, rows: int) -> None:
        """Learn what a triggered step moved: sets or resets the back-off."""
        if rows >= self._rules.min_gain_rows:
            self._shift = -1
            return
        self._shift = min(self._shift + 1, self._rules.backoff_max_shift)
        self.backoff_until = step + (1 << self._shift)

    def spend(self, rows: int) -> None:
        """Note that `rows` rows were moved, or that so many fewer were if negative."""
        self._budget.spend(rows * self._row_bytes)

    def _rows(self) -> int:
        return max(0, self._budget.credit) // self._row_bytes

    def _on_demand(self) -> Decision:
        rows = max(self._rules.bytes_per_step // self._row_bytes, self._config.page)
        if isinstance(self.demands[0], Gather):
            return Decision(Mechanism.GATHER, rows, "asked to gather a request")
        return Decision(Mechanism.LOWER, rows, "asked to lower the high-water mark")

    def _idle(self, rows: int) -> Decision:
        if not self._rules.mechanisms.on_demand:
            return _none("idle")
        return Decision(Mechanism.IDLE, min(rows, self._rules.idle_rows_per_slice), "idle")


def _none(reason: str, detail: str = "") -> Decision:
    return Decision(Mechanism.NONE, 0, reason, detail)
