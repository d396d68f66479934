"""Observers are told in order, and nothing is hidden from the caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvdefrag.core.report import StepReport
from kvdefrag.metrics import FanOut

Build = Callable[..., StepReport]


class Recorder:
    def __init__(self, name: str, told: list[tuple[str, StepReport]]) -> None:
        self._name = name
        self._told = told

    def on_step(self, report: StepReport) -> None:
        self._told.append((self._name, report))


class Failing:
    def on_step(self, report: StepReport) -> None:
        raise OSError("disk full")


def test_observers_are_told_in_the_order_given(report: Build) -> None:
    step = report()
    told: list[tuple[str, StepReport]] = []

    FanOut(Recorder(name, told) for name in "cab").on_step(step)

    assert told == [("c", step), ("a", step), ("b", step)]


def test_an_error_in_an_observer_reaches_the_caller_at_once(report: Build) -> None:
    step = report()
    told: list[tuple[str, StepReport]] = []
    fan_out = FanOut([Recorder("before", told), Failing(), Recorder("behind", told)])

    with pytest.raises(OSError, match="disk full"):
        fan_out.on_step(step)

    assert [name for name, _ in told] == ["before"]


def test_a_fan_out_to_nobody_does_nothing(report: Build) -> None:
    FanOut([]).on_step(report())
