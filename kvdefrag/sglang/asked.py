"""A compaction that an operator asked for, on a live scheduler."""

from __future__ import annotations

import logging
from threading import Thread
from typing import Any, Protocol

from kvdefrag.config import Config
from kvdefrag.control.command import Command
from kvdefrag.control.compaction import Compaction, Parts
from kvdefrag.control.preview import effect_of, preview
from kvdefrag.core.view import EngineView
from kvdefrag.errors import Busy, ConfigError
from kvdefrag.sglang.answers import Answers
from kvdefrag.sglang.compat import requests_of
from kvdefrag.sglang.frozen import Frozen

logger = logging.getLogger(__name__)

_PATIENCE = 10_000  # steps


class Work(Protocol):
    """Something that takes several steps.

    Attributes:
        name: Id of the command.
        moves: Whether rows may move, so that nothing else may move any meanwhile.
    """

    name: str
    moves: bool

    def advance(self) -> bool:
        """Do a step's worth, behind the defragmenter's; return whether it is over."""
        ...

    def forbidden(self, config: Config) -> str:
        """Return which of other settings forbids this work, empty if none does."""
        ...

    def stop(self) -> None:
        """Leave everything as it would be without this work."""
        ...


class Asked:
    """Carries a compaction out, or says what it would do.

    What the tables look like before and after is copied between two steps, as little as that is,
    and evaluated by a thread of its own.

    Args:
        attachment: Whose rows move.
        scheduler: SGLang's.
        command: What is asked.
        answers: Are told how it went.

    Raises:
        ConfigError: Says why nothing can be done.
    """

    def __init__(self, attachment: Any, scheduler: Any, command: Command, answers: Answers) -> None:
        self._attachment, self._scheduler = attachment, scheduler
        self._command, self._answers, self.name = command, answers, command.id
        _check(attachment.config, command)
        if attachment.allocator.core is None or attachment.allocator.core.two_ended is None:
            raise ConfigError("placement.free_list: nothing can be moved without two_ended")
        self._row, self._target = self._find(command)
        self.moves = not command.dry_run
        self._before: Frozen | None = None
        self._job: Compaction | None = None
        self._steps = 0

    def advance(self) -> bool:
        """Do a step's worth."""
        self._steps += 1
        attachment = self._attachment
        if attachment.allocator.core.in_free_group:
            return self._gives_up("a free group stayed open")
        try:
            view = attachment._look()
        except Busy as busy:
            return self._gives_up(str(busy))
        if self._before is None:
            self._before = Frozen(attachment, view)
            if self._command.dry_run:
                self._in_a_thread(self._preview, self._place(view))
                return True
            self._job = self._start()
        assert self._job is not None
        self._job.advance(view)
        if not self._job.done:
            return False
        self._in_a_thread(self._report, self._job, Frozen(attachment, attachment._look()))
        return True

    def forbidden(self, config: Config) -> str:
        """Return which of other settings forbids this compaction, empty if none does."""
        try:
            _check(config, self._command)
        except ConfigError as error:
            return str(error)
        return ""

    def stop(self) -> None:
        """Do nothing: between two slices all is as it should be."""

    def _start(self) -> Compaction:
        found = self._attachment
        parts = Parts(
            found.config,
            found.allocator.core,
            found.mover,
            found.readback,
            found.defragmenter.tracker,
            found.programs,
        )
        how, target = self._command.how, self._target
        job = Compaction(parts, how, rows=self._command.rows, target=target)
        moved_by = found.defragmenter.moved_by
        name = "evacuation" if how == "evacuate" else how

        def count(rows: int) -> None:
            moved_by[name] += rows

        job.on_moved = count
        return job

    def _gives_up(self, why: str) -> bool:
        if self._steps < _PATIENCE:
            return False
        self._answers.refuse(self._command.id, f"not possible for {_PATIENCE} steps: {why}")
        return True

    def _find(self, command: Command) -> tuple[int, tuple[int, int]]:
        if command.how != "gather":
            return 0, (0, 0)
        compat = self._attachment.compat
        for request in requests_of(self._scheduler):
            if request.rid == command.request and compat.lengths(request) is not None:
                row = compat.row(request)
                generation = self._scheduler.req_to_token_pool.req_generation[row]
                return row, (row, int(generation))
        raise ConfigError(f"request {command.request}: does not run now")

    def _place(self, view: EngineView) -> int:
        return int((view.rows == self._row).argmax()) if self._row else 0

    def _in_a_thread(self, work: Any, *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except Exception as fault:
                logger.exception("kvdefrag: the effect of a compaction could not be told")
                said = f"{type(fault).__name__}: {fault}"
                self._answers.fail(self._command.id, said)

        Thread(target=run, name="kvdefrag-effect", daemon=True).start()

    def _preview(self, place: int) -> None:
        assert self._before is not None
        snapshot, command = self._before.wait(), self._command
        config = self._attachment.config
        rows, after = preview(snapshot, config, command.how, rows=command.rows, at=place)
        self._close(rows, effect_of(snapshot).plain(), after.plain())

    def _report(self, job: Compaction, after: Frozen) -> None:
        assert self._before is not None
        before = effect_of(self._before.wait()).plain()
        self._close(job.moved, before, effect_of(after.wait()).plain(), slices=job.slices)

    def _close(self, rows: int, before: object, after: object, **more: Any) -> None:
        size = rows * self._attachment.mover.row_bytes
        facts = {"rows": rows, "bytes": size, "before": before, "after": after}
        self._answers.close(self._command.id, **facts, **more)


def _check(config: Any, command: Command) -> None:
    if command.dry_run:
        return
    rules = config.relocation
    allowed = {
        "tenure": ("tenure", rules.mechanisms.tenure),
        "evacuate": ("evacuation", rules.mechanisms.evacuation),
    }.get(command.how, ("on_demand", rules.mechanisms.on_demand))
    if config.kill_switch:
        raise ConfigError("kill_switch: it is on, and nothing may move")
    if rules.mode == "off":
        raise ConfigError("relocation.mode: it is off; on_demand moves rows when asked alone")
    if rules.dry_run:
        raise ConfigError("relocation.dry_run: it is on, and nothing may move")
    if not allowed[1]:
        raise ConfigError(f"relocation.mechanisms.{allowed[0]}: it is false")
