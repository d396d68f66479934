"""Records events of a scheduler that has been at work for long, for some seconds."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvdefrag.config import Config
from kvdefrag.control.command import Command
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.errors import Busy, ConfigError
from kvdefrag.sglang.answers import Answers
from kvdefrag.sglang.recorder import LiveAllocator
from kvdefrag.sglang.recording import Recording, recording_to

_PATIENCE_S = 30.0


class LiveLog:
    """Switches the recording on and, once its time is over, off.

    Of a group of ranks one records; the time is its own, since no slot depends on it.

    Args:
        attachment: Whose events.
        scheduler: SGLang's.
        command: How long, and the name of the file.
        answers: Are told how it went.

    Raises:
        ConfigError: Events are being recorded already, or the file cannot be written.
    """

    moves = False

    def __init__(self, attachment: Any, scheduler: Any, command: Command, answers: Answers) -> None:
        self._attachment, self._scheduler = attachment, scheduler
        self._command, self._answers, self.name = command, answers, command.id
        if attachment.recording is not None:
            raise ConfigError("observe.events_path: events are being recorded already")
        self._recording: Recording | None = None
        self._until = 0.0
        self._began = time.monotonic()
        self._tells = scheduler.metrics_collector_context.is_stats_logging_rank
        folder = attachment.config.control.events_dir or Path(tempfile.gettempdir())
        self._path = folder / f"kvdefrag-{command.id}.jsonl"

    def advance(self) -> bool:
        """Begin, go on, or end; return whether it is over."""
        if not self._tells:
            self._answers.close(self._command.id, said="another rank records")
            return True
        if self._recording is None:
            return self._start()
        recorder = self._recording.recorder
        goes_on = self._attachment.recording is self._recording and not recorder.dropped
        if goes_on and time.monotonic() < self._until:
            return False
        self.stop()
        if not recorder.ended:
            return False
        dropped = recorder.dropped
        path, steps = str(self._recording.path), self._recording.steps
        self._answers.close(self._command.id, path=path, steps=steps, dropped=dropped)
        return True

    def _start(self) -> bool:
        attachment = self._attachment
        core: SlotAllocator | None = attachment.allocator.core
        try:
            if core is None:
                raise ConfigError("placement is stock after a fault")
            if core.in_free_group:
                raise Busy("a free group is open")
            view = attachment.looker.view(attachment.steps)
            made = recording_to(self._path, self._scheduler, attachment.config, attachment.compat)
        except Busy as busy:
            if time.monotonic() - self._began < _PATIENCE_S:
                return False
            self._answers.refuse(self._command.id, str(busy))
            return True
        except ConfigError as error:
            self._answers.refuse(self._command.id, str(error))
            return True
        self._recording = made
        parts = [core.free_slots()]
        if core.reservations is not None:
            parts.append(core.reservations.reserved())
        made.open(view, torch.cat(parts))
        LiveAllocator.listen(core, made.recorder)
        attachment.recording = made
        self._until = time.monotonic() + self._command.seconds
        self._answers.add(self._command.id, path=str(made.path))
        return False

    def forbidden(self, config: Config) -> str:
        """Return nothing: no setting of the policy is about recordings."""
        return ""

    def stop(self) -> None:
        """Tell nobody any more, and end the file."""
        attachment = self._attachment
        core = attachment.allocator.core
        if isinstance(core, LiveAllocator):
            core.leave()
        attachment.recording = None
        if self._recording is not None:
            self._recording.recorder.close(wait_s=0.0)
