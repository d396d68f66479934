"""Serves an operator's commands in the scheduler's process, between two of its steps."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from kvdefrag.config import Config
from kvdefrag.control.command import Command, decode
from kvdefrag.control.update import updated
from kvdefrag.core.report import StepReport
from kvdefrag.errors import ConfigError
from kvdefrag.sglang.answers import Answers
from kvdefrag.sglang.asked import Asked, Work
from kvdefrag.sglang.live_recording import LiveLog

logger = logging.getLogger(__name__)

_MOST_WAITING = 16
PAUSED = ("paused",)
ASKED = ("a compaction was asked for",)


class Control:
    """The commands to one scheduler.

    SGLang hands a command to every rank of a group in the same iteration, so all of them serve it
    at the same step. The attachment calls `step` only while something is due.

    Args:
        attachment: Whose steps these are.
        scheduler: SGLang's.
    """

    def __init__(self, attachment: Any, scheduler: Any) -> None:
        self._attachment, self._scheduler = attachment, scheduler
        self._start: Config = attachment.config
        self._waiting: list[tuple[int, Command]] = []
        self._work: Work | None = None
        # Apart: how long a recording takes is told by one rank's clock, and what moves must not
        # depend on it.
        self._log: Work | None = None
        self._answers = Answers()
        self.paused = False

    def receive(self, text: str) -> bool:
        """Take a command; say whether it will be served. The state shows how it went."""
        try:
            command = decode(text)
        except ConfigError as error:
            logger.warning("kvdefrag: a command is refused: %s", error)
            return False
        if self._answers.known(command.id):
            logger.warning("kvdefrag: command %s has come before", command.id)
            return False
        refusal = self._refusal(command)
        self._answers.open(command, self._attachment.steps)
        if refusal:
            self._answers.refuse(command.id, refusal)
            logger.warning("kvdefrag: %s is refused: %s", command.action, refusal)
            return False
        logger.info("kvdefrag: %s was asked for (%s)", command.action, command.id)
        delay = command.after_steps if command.action == "reload" else 0
        self._waiting.append((self._attachment.steps + delay, command))
        self._attachment.due = self
        return True

    def step(self) -> StepReport:
        """Do one step of the attachment with everything that is due in it."""
        attachment = self._attachment
        self._begin()
        attachment.held = self._gate()
        report: StepReport = attachment.defragmenter.step(
            attachment.steps, attachment._look, gates=attachment._gates()
        )
        held_up = self.paused and self._work is not None and self._work.moves
        if self._work is not None and not held_up and self._advance(self._work):
            self._work = None
        if self._log is not None and self._advance(self._log):
            self._log = None
        attachment.held = self._gate()
        if not self._waiting and self._work is None and self._log is None:
            attachment.due = None
        return report

    def _advance(self, work: Work) -> bool:
        try:
            return work.advance()
        except Exception as fault:
            if work.moves:
                raise  # relocation itself is at fault
            logger.exception("kvdefrag: a command has failed; relocation goes on")
            self._answers.fail(work.name, f"{type(fault).__name__}: {fault}")
            work.stop()
            return True

    def fault(self, error: Exception) -> None:
        """Note that there will be no more steps."""
        self._answers.fail_all(f"{type(error).__name__}: {error}")
        self._waiting, self._work, self._log = [], None, None

    def state(self) -> dict[str, Any]:
        """Return what `/server_info` shows, in plain values."""
        return {"paused": self.paused, "commands": self._answers.plain()}

    def _refusal(self, command: Command) -> str:
        if self._attachment.error is not None:
            return f"kvdefrag has stopped after a fault: {self._attachment.error}"
        if len(self._waiting) >= _MOST_WAITING:
            return f"{_MOST_WAITING} commands wait already"
        try:
            if command.action == "reload":
                updated(self._start, command.settings)
        except ConfigError as error:
            return str(error)
        return ""

    def _gate(self) -> tuple[str, ...]:
        if self.paused:
            return PAUSED
        return ASKED if self._work is not None and self._work.moves else ()

    def _begin(self) -> None:
        # In the order in which they came; one piece of work at a time.
        left: list[tuple[int, Command]] = []
        for due, command in self._waiting:
            busy = command.action == "compact" and self._work is not None
            if busy or due > self._attachment.steps:
                left.append((due, command))
            else:
                self._serve(command)
        self._waiting = left

    def _serve(self, command: Command) -> None:
        attachment, answers = self._attachment, self._answers
        if command.action == "reload":
            attachment.configure(updated(self._start, command.settings))
            answers.close(command.id, active_from=attachment.steps)
            logger.info("kvdefrag: other settings from step %d on", attachment.steps)
            self._end_what_is_forbidden()
        elif command.action in ("pause", "resume"):
            self.paused = command.action == "pause"
            answers.close(command.id, active_from=attachment.steps)
        else:
            try:
                self._begin_work(command)
            except ConfigError as error:
                answers.refuse(command.id, str(error))

    def _begin_work(self, command: Command) -> None:
        if command.action == "record":
            if self._log is not None:
                raise ConfigError("observe.events_path: events are being recorded already")
            self._log = LiveLog(self._attachment, self._scheduler, command, self._answers)
            return
        if self.paused and not command.dry_run:
            raise ConfigError("paused: resume first")
        self._work = Asked(self._attachment, self._scheduler, command, self._answers)

    def _end_what_is_forbidden(self) -> None:
        work = self._work
        why = work.forbidden(self._attachment.config) if work is not None else ""
        if work is not None and why:
            self._answers.fail(work.name, f"ended by other settings: {why}")
            work.stop()
            self._work = None


class Hooked(Protocol):
    """What SGLang calls with a message for the scheduler."""

    def __call__(self, scheduler: Any, message: Any, /) -> Any: ...


def around_set_internal_state(original: Hooked, scheduler: Any, message: Any) -> Any:
    """Wrap `Scheduler.set_internal_state`: a message that names kvdefrag is a command.

    Its route carries numbers alone, and an id in words: the command travels as the id.
    """
    attachment = getattr(scheduler, "kvdefrag", None)
    if attachment is None or attachment.control is None or "kvdefrag" not in message.server_args:
        return original(scheduler, message)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    try:
        taken = attachment.control.receive(message.rid or "")
    except Exception:
        logger.exception("kvdefrag: a command could not be taken")
        taken = False
    return SetInternalStateReqOutput(updated=taken)
