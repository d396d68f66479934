"""The log has a line for each interval in which something happened, and none otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvdefrag.core.report import StepReport
from kvdefrag.metrics import Figures, LogSink, Tally

Build = Callable[..., StepReport]


@pytest.fixture
def sink(caplog: pytest.LogCaptureFixture) -> LogSink:
    caplog.set_level(logging.INFO)
    return LogSink(logging.getLogger("kvdefrag.test"))


def test_an_interval_in_which_nothing_happened_is_silent(
    sink: LogSink, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    tally = Tally(8)
    tally.add(report(), 0.0)
    tally.settle()
    sink.publish(tally, Figures())

    assert caplog.messages == []


def test_a_summary_says_what_moved_since_the_one_before(
    sink: LogSink, caplog: pytest.LogCaptureFixture
) -> None:
    tally = Tally(8)
    tally.moved_rows.update(tenure=64, idle=3)
    sink.publish(tally, Figures(step=100, tokens=40, covered=10, available_slots=5))
    tally.moved_rows["tenure"] += 1
    sink.publish(tally, Figures(step=200, reserved_slots=2))
    sink.publish(tally, Figures(step=300))

    assert caplog.messages == [
        "step 100: 67 rows and 536 bytes moved since the last summary; page coverage 0.250, "
        "5 slots free, 0 reserved",
        "step 200: 1 rows and 8 bytes moved since the last summary; page coverage unknown, "
        "0 slots free, 2 reserved",
    ]


def test_steps_kept_by_a_gate_are_told(
    sink: LogSink, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    tally = Tally(8)
    tally.add(report(gates=("free group",)), 0.0)
    tally.settle()
    sink.publish(tally, Figures())

    assert ", 1 steps kept by gates; " in caplog.messages[0]
