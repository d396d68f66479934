"""Who is told of a step, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvdefrag.core.report import StepReport


class Observer(Protocol):
    """Is told of every step, after it."""

    def on_step(self, report: StepReport) -> None:
        """Take note of one step; must neither wait for the device nor change anything."""


class FanOut:
    """Tells several observers, in the order given.

    An error in one is the caller's to handle: those behind it are not told.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def on_step(self, report: StepReport) -> None:
        for observer in self._observers:
            observer.on_step(report)
