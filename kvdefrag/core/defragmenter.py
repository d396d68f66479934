"""The pipeline: observe, decide, plan, check, move, remap, substitute, report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvdefrag.config import Config
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.lifetimes import Lifetimes
from kvdefrag.core.mover import Mover
from kvdefrag.core.payback import PayBack
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.policy import Decision, Demanded, Gather, Lower, Mechanism, Policy, Situation
from kvdefrag.core.profile import DeviceProfile
from kvdefrag.core.programs import Programs, TorchPrograms
from kvdefrag.core.readback import Readback
from kvdefrag.core.relocator import Relocator
from kvdefrag.core.report import StepReport
from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView
from kvdefrag.errors import Busy, ConfigError, IntegrityError

_GATE = Decision(Mechanism.NONE, 0, "gate closed")


@dataclass(frozen=True)
class _Outcome:
    """What a planner made: pairs, and what is known of how many of them are real."""

    planned: int = 0
    moved: int | None = 0


class Defragmenter:
    """Relocates live rows of an engine between its steps.

    Holds no slot numbers of its own. An exception leaves the engine's tables, the tree values and
    the free list either all as before or all as after the move.

    Args:
        config: The settings.
        allocator: The engine's allocator; with a free list of one end nothing is ever moved.
        table_rows: Rows of the engine's table.
        mover: Copies the rows.
        profile: Prices of this GPU.
        readback: Brings device results back; shared with the allocator's free list.
        verify: Whether steps verify drafts.
        programs: Tenure and the rewriting of holders; by default in torch, on any device.

    Attributes:
        moved_by: Rows moved so far by each mechanism, as far as the device has said.

    Raises:
        ConfigError: The settings and the allocator disagree on the page.
    """

    def __init__(
        self,
        config: Config,
        *,
        allocator: SlotAllocator,
        table_rows: int,
        mover: Mover,
        profile: DeviceProfile,
        readback: Readback,
        verify: bool = False,
        programs: Programs | None = None,
    ) -> None:
        self._allocator, self._mover, self._readback = allocator, mover, readback
        self._profile, self._verify = profile, verify
        self.tracker = Tracker(table_rows, page=config.page)
        self._lifetimes = Lifetimes(table_rows)
        self.moved_by: Counter[str] = Counter()
        self._quiet: StepReport | None = None
        self.config = config
        self._policy = self._make_policy(config)
        programs = programs or TorchPrograms(mover, page=config.page)
        self._programs = programs
        self._relocator = Relocator(config, allocator, mover, readback, self.tracker, programs)

    def configure(self, config: Config) -> None:
        """Use other settings from the next step on; what was learnt of the requests stays.

        Raises:
            ConfigError: The page is another one; nothing has changed.
        """
        policy = self._make_policy(config)
        policy.demands.extend(self._policy.demands)
        self.config, self._policy = config, policy
        self._relocator.config = config

    def request(self, demand: Demanded) -> None:
        """Ask for a gathering or a lower high-water mark; served in order, over steps.

        With a free list of one end (`fifo`, `sorted`) it is dropped: nothing can move.
        """
        if self._allocator.two_ended is not None:
            self._policy.demands.append(demand)

    @property
    def demands(self) -> int:
        """Requests made and not served in full yet."""
        return len(self._policy.demands)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held to follow the requests."""
        return self.tracker.nbytes + self._lifetimes.nbytes

    def step(
        self, step: int, look: Callable[[], EngineView], *, gates: tuple[str, ...] = ()
    ) -> StepReport:
        """Do what the policy decides for this step.

        Args:
            step: Number of the step, the same on every rank.
            look: Returns the running requests; called only if something may be done. Raises
                `Busy` with the name of a gate that turns out to be closed.
            gates: Names of reasons why nothing may move now; empty if the way is free.

        Returns:
            What was done. Steps in a row that do nothing for the same reason share one report,
            of the first of them.

        Raises:
            PlanError: A planned move breaks a rule (CPU); nothing has moved.
            IntegrityError: The device flagged a plan some steps ago, which moved nothing, or a
                wrong free.
        """
        self._readback.advance()
        if self._allocator.two_ended is not None and self._allocator.two_ended.violated:
            raise IntegrityError("a slot was freed twice, or a slot out of range was freed")
        blocked = self._policy.blocked(step, gates)
        if blocked is not None:
            return self._nothing(step, gates, blocked)
        try:
            view = look()
        except Busy as busy:
            return self._nothing(step, (str(busy),), _GATE)
        self.tracker.observe(view)
        self._lifetimes.observe(view)
        if self._policy.heeds_coverage and view.rows.size:
            self._measure(view)
        decision = self._policy.decide(self._situation(view))
        outcome = self._act(view, decision)
        self._quiet = None
        return self._report(step, gates, decision, outcome, self.tracker.coverage(view))

    def clear(self) -> None:
        """Forget every request and everything under way."""
        self.tracker.clear()
        self._lifetimes.clear()
        self._readback.clear()
        self._policy.demands.clear()

    def _make_policy(self, config: Config) -> Policy:
        if config.page != self._allocator.page:
            raise ConfigError(
                f"page: {config.page} is not allowed; the free list has pages of "
                f"{self._allocator.page}"
            )
        policy = Policy(
            config,
            row_bytes=self._mover.row_bytes,
            payback=PayBack(config.consumers, self._profile),
            verify=self._verify,
        )
        self._allocator.whole_groups = policy.may_tenure
        return policy

    def _measure(self, view: EngineView) -> None:
        if self._readback.delay == 0 and view.device.type == "cpu":
            self.tracker.measure(view)
            return
        self._readback.submit_tensor(
            self._programs.measure(view),
            lambda host: self.tracker.learn_late(view, host),
        )

    def _situation(self, view: EngineView) -> Situation:
        free, size = self._allocator.available_size(), self._allocator.size
        pages = self._allocator.two_ended
        whole = pages.whole_pages() * self.config.page if pages else 0
        return Situation(
            running=view.rows.shape[0] if view.at_work is None else view.at_work,
            groups_ready=self.tracker.groups_ready(view),
            packed=self.tracker.packed(view),
            whole_free_share=whole / size,
            unusable_free_share=1 - whole / free if free else 0.0,
            remaining_steps=self._lifetimes.remaining(),
        )

    def _act(self, view: EngineView, decision: Decision) -> _Outcome:
        pages = self._allocator.two_ended
        if decision.mechanism is Mechanism.NONE or pages is None:
            return _Outcome()
        relocator = self._relocator
        if decision.mechanism is Mechanism.TENURE:
            plan = relocator.tenure(view, pages, rows=decision.rows)
            return _Outcome() if plan is None else self._count(view.step, plan, decision.mechanism)
        if pages.dirty:
            pages.reorder()
        if decision.mechanism is Mechanism.GATHER:
            plan = self._gather(view, pages, decision.rows)
        elif decision.mechanism is Mechanism.LOWER:
            plan = self._lower(view, pages, decision.rows)
        else:
            plan = relocator.evacuate(view, pages, rows=decision.rows)
        return _Outcome() if plan is None else self._count(view.step, plan, decision.mechanism)

    def _lower(self, view: EngineView, pages: TwoEnded, most: int) -> MovePlan:
        demand = self._policy.demands[0]
        assert isinstance(demand, Lower)
        rows = min(most, demand.rows)
        plan = self._relocator.lower(view, pages, rows=rows)
        demand.rows -= rows
        if demand.rows <= 0:
            self._policy.demands.popleft()
        return plan

    def _gather(self, view: EngineView, pages: TwoEnded, most: int) -> MovePlan | None:
        demand = self._policy.demands[0]
        assert isinstance(demand, Gather)
        found = (view.rows == demand.row) & (view.generations == demand.generation)
        if not found.any():
            self._policy.demands.popleft()
            return None
        at, page = int(found.argmax()), self.config.page
        plan, demand.position = self._relocator.gather(
            view, pages, at, begin=demand.position, rows=most // page * page
        )
        if demand.position >= int(view.committed[at]):
            self._policy.demands.popleft()
        return plan

    def _count(self, step: int, plan: MovePlan, mechanism: Mechanism) -> _Outcome:
        # Charged in full at once, and put right when the device says how many rows moved.
        learnt: list[int] = []
        triggered = mechanism not in (Mechanism.GATHER, Mechanism.LOWER)
        spends = not self.config.relocation.dry_run
        policy = self._policy
        if spends:
            policy.spend(plan.capacity)

        def deliver(moved: int) -> None:
            learnt.append(moved)
            if spends:
                policy.spend(moved - plan.capacity)
                self.moved_by[mechanism.value] += moved
            if triggered:
                policy.moved(step, moved)

        self._readback.submit(plan.moved_rows(), deliver)
        return _Outcome(plan.capacity, learnt[0] if learnt else None)

    def _nothing(self, step: int, gates: tuple[str, ...], why: Decision) -> StepReport:
        # Almost every step ends here, on the decode path: one report serves a streak of them.
        quiet = self._quiet
        if quiet is None or quiet.reason != why.reason or quiet.gates != gates:
            quiet = self._quiet = self._report(step, gates, why, _Outcome())
        return quiet

    def _report(
        self,
        step: int,
        gates: tuple[str, ...],
        decision: Decision,
        outcome: _Outcome,
        coverage: float | None = None,
    ) -> StepReport:
        pages = self._allocator.two_ended
        return StepReport(
            step=step,
            mechanism=decision.mechanism.value,
            reason=decision.reason,
            planned_rows=outcome.planned,
            moved_rows=outcome.moved,
            bytes=outcome.planned * self._mover.row_bytes,
            dry_run=self.config.relocation.dry_run,
            gates=gates,
            backoff_until=self._policy.backoff_until,
            coverage=coverage,
            whole_free_pages=pages.whole_pages() if pages else None,
            reserved_slots=self._allocator.reserved_size(),
            available=self._allocator.available_size(),
            error=None,
        )
