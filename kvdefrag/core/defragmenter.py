"""The pipeline: observe, decide, plan, check, move, remap, substitute, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdefrag.config import Config
from kvdefrag.core.allocator import SlotAllocator, TwoEnded
from kvdefrag.core.commit import commit_groups, commit_slots
from kvdefrag.core.holders import Holder, ValueTensors, live_rows, range_index
from kvdefrag.core.lifetimes import Lifetimes
from kvdefrag.core.mover import Mover
from kvdefrag.core.payback import PayBack
from kvdefrag.core.plan import MovePlan, check_plan, violation
from kvdefrag.core.plan_evacuate import plan_evacuation
from kvdefrag.core.plan_gather import any_missing, plan_gather, plan_lower
from kvdefrag.core.plan_tenure import TenurePlan, plan_tenure
from kvdefrag.core.policy import Decision, Demanded, Gather, Lower, Mechanism, Policy, Situation
from kvdefrag.core.profile import DeviceProfile
from kvdefrag.core.readback import Readback
from kvdefrag.core.report import StepReport
from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView
from kvdefrag.errors import ConfigError, IntegrityError

_SAMPLED = 64


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
    ) -> None:
        self._allocator, self._mover, self._readback = allocator, mover, readback
        self._profile, self._verify = profile, verify
        self.tracker = Tracker(table_rows, page=config.page)
        self._lifetimes = Lifetimes(table_rows)
        self._plans = 0
        self.faults = 0
        self.config = config
        self._policy = self._make_policy(config)

    def configure(self, config: Config) -> None:
        """Use other settings from the next step on; what was learnt of the requests stays.

        Raises:
            ConfigError: The page is another one; nothing has changed.
        """
        policy = self._make_policy(config)
        policy.demands.extend(self._policy.demands)
        self.config, self._policy = config, policy

    def request(self, demand: Demanded) -> None:
        """Ask for a gathering or a lower high-water mark; served in order, over steps."""
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
            look: Returns the running requests; called only if something may be done.
            gates: Names of reasons why nothing may move now; empty if the way is free.

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
            return self._report(step, gates, blocked, _Outcome())
        view = look()
        self.tracker.observe(view)
        self._lifetimes.observe(view)
        decision = self._policy.decide(self._situation(view))
        outcome = self._act(view, decision)
        return self._report(step, gates, decision, outcome, self.tracker.coverage(view))

    def clear(self) -> None:
        """Forget every request and everything under way."""
        self.tracker.clear()
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

    def _situation(self, view: EngineView) -> Situation:
        free, size = self._allocator.available_size(), self._allocator.size
        pages = self._allocator.two_ended
        whole = pages.whole_pages() * self.config.page if pages else 0
        return Situation(
            running=view.rows.shape[0],
            groups_ready=self.tracker.groups_ready(view),
            coverage=self.tracker.coverage(view),
            whole_free_share=whole / size,
            unusable_free_share=1 - whole / free if free else 0.0,
            remaining_steps=self._lifetimes.remaining(),
        )

    def _act(self, view: EngineView, decision: Decision) -> _Outcome:
        pages = self._allocator.two_ended
        if decision.mechanism is Mechanism.NONE or pages is None:
            return _Outcome()
        if pages.dirty:
            pages.reorder()
        if decision.mechanism is Mechanism.TENURE:
            return self._tenure(view, decision, pages)
        if decision.mechanism is Mechanism.GATHER:
            return self._gather(view, decision, pages)
        if decision.mechanism is Mechanism.LOWER:
            return self._lower(view, decision)
        return self._evacuate(view, decision, pages)

    def _tenure(self, view: EngineView, decision: Decision, pages: TwoEnded) -> _Outcome:
        page = self.config.page
        starts = self.tracker.tenured(view)
        plan = plan_tenure(view, starts, pages, page=page, max_groups=decision.rows // page)
        if plan is None:
            return _Outcome()
        plan = plan.voided_if(self._refused(plan.moves))
        if not self.config.relocation.dry_run:
            commit_groups(view, plan, self._mover, pages)
            self._allocator.commit_moves(plan.moves.src, plan.moves.dst)
            self._confirm(view, plan)
        return self._count(view, plan.moves, triggered=True)

    def _evacuate(self, view: EngineView, decision: Decision, pages: TwoEnded) -> _Outcome:
        page, most = self.config.page, min(self.config.relocation.max_live_per_page, decision.rows)
        values = view.shared_values()
        plan = plan_evacuation(
            self._movable(view, values),
            pages,
            page=page,
            max_pages=max(1, decision.rows // most),
            max_live=most,
        )
        return self._move(view, plan, values, triggered=True)

    def _lower(self, view: EngineView, decision: Decision) -> _Outcome:
        demand = self._policy.demands[0]
        assert isinstance(demand, Lower)
        values = view.shared_values()
        rows = min(decision.rows, demand.rows)
        plan = plan_lower(self._movable(view, values), self._allocator.free_slots(), rows=rows)
        demand.rows -= rows
        if demand.rows <= 0:
            self._policy.demands.popleft()
        return self._move(view, plan, values, triggered=False)

    def _gather(self, view: EngineView, decision: Decision, pages: TwoEnded) -> _Outcome:
        demand = self._policy.demands[0]
        assert isinstance(demand, Gather)
        found = (view.rows == demand.row) & (view.generations == demand.generation)
        if not found.any():
            self._policy.demands.popleft()
            return _Outcome()
        values, i = view.shared_values(), int(found.argmax())
        begin = max(demand.position, 0 if values else int(view.protected[i]))
        end = min(
            int(view.committed[i]), begin + decision.rows // self.config.page * self.config.page
        )
        demand.position = end
        if end >= int(view.committed[i]):
            self._policy.demands.popleft()
        if end <= begin:
            return _Outcome()
        stretch = view.table[demand.row, max(begin - 1, 0) : end].long()
        previous, slots = (stretch[0], stretch[1:]) if begin else (None, stretch)
        plan = plan_gather(slots, previous, pages, page=self.config.page)
        if begin < view.protected[i]:
            # Shared slots move only if the tree gave all of them out.
            movable = self._movable(view, values)
            plan = plan.voided_if(any_missing(slots, movable, self._allocator.size))
        return self._move(view, plan, values, triggered=False)

    def _movable(self, view: EngineView, values: Sequence[Tensor]) -> Tensor:
        # Each slot once: private ranges by their row, shared ones by their tree node.
        index = range_index(view.table, view.rows, view.protected, view.allocated)
        return torch.cat([view.table.view(-1)[index].long(), *(v.long() for v in values)])

    def _move(
        self, view: EngineView, plan: MovePlan, values: Sequence[Tensor], *, triggered: bool
    ) -> _Outcome:
        plan = plan.voided_if(self._refused(plan))
        if not self.config.relocation.dry_run:
            book = self._allocator.reservations
            holders: list[Holder] = [live_rows(view, book.held if book else None)]
            holders.append(ValueTensors(values))
            pages = self._allocator.two_ended
            assert pages is not None
            commit_slots(plan, self._mover, holders, pages, self._allocator.size)
            self._allocator.commit_moves(plan.src, plan.dst)
            self.tracker.moved(view.rows)
        return self._count(view, plan, triggered=triggered)

    def _confirm(self, view: EngineView, plan: TenurePlan) -> None:
        rows, generations = view.rows[plan.of], view.generations[plan.of]

        def deliver(reached: Tensor) -> None:
            self.tracker.confirm(rows, generations, reached.numpy()[: rows.shape[0]])

        self._readback.submit_tensor(plan.reached, deliver)
        self.tracker.moved_private(rows)

    def _count(self, view: EngineView, plan: MovePlan, *, triggered: bool) -> _Outcome:
        # Charged in full at once, and put right when the device says how many rows moved.
        learnt: list[int] = []
        if not self.config.relocation.dry_run:
            self._policy.spend(plan.capacity)

        def deliver(moved: int) -> None:
            learnt.append(moved)
            if not self.config.relocation.dry_run:
                self._policy.spend(moved - plan.capacity)
            if triggered:
                self._policy.moved(view.step, moved)

        self._readback.submit(plan.moved_rows(), deliver)
        return _Outcome(plan.capacity, learnt[0] if learnt else None)

    def _refused(self, plan: MovePlan) -> Tensor | None:
        # Whether the plan breaks a rule: a flag on the device, or None if it was not looked at.
        self._plans += 1
        mode = self.config.relocation.check_plans
        if mode == "never" or (mode == "sampled" and self._plans % _SAMPLED):
            return None
        size, device = self._allocator.size, plan.src.device
        is_free = torch.zeros(size + 1, dtype=torch.bool, device=device)
        is_free[self._allocator.free_list.slots()] = True
        if device.type == "cpu":
            check_plan(plan, is_free, size)
            return None
        refused = violation(plan, is_free, size)
        self._readback.submit(refused, self._flagged)
        return refused

    def _flagged(self, broken: int) -> None:
        if broken:
            self.faults += 1
            raise IntegrityError("a plan named a slot twice, a free source or a live destination")

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
