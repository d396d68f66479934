"""The log has a line for each step that moved, for each change of gates, and summaries."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvdefrag.core.report import StepReport
from kvdefrag.metrics import LogObserver

Build = Callable[..., StepReport]


@pytest.fixture
def observer(caplog: pytest.LogCaptureFixture) -> LogObserver:
    caplog.set_level(logging.INFO)
    return LogObserver(logging.getLogger("kvdefrag.test"), interval=100)


def test_a_step_that_moved_says_what_it_moved_and_why(
    observer: LogObserver, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    observer.on_step(
        report(
            mechanism="tenure", reason="groups_ready", planned_rows=128, moved_rows=64, bytes=4096
        )
    )

    assert caplog.messages == ["step 1: tenure moved 64 rows, 4096 bytes, because groups_ready"]


def test_a_step_that_moved_nothing_is_silent(
    observer: LogObserver, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    observer.on_step(report())
    observer.on_step(report(mechanism="tenure", planned_rows=64, moved_rows=0))

    assert caplog.messages == []


def test_rows_not_read_back_yet_are_given_as_an_upper_bound(
    observer: LogObserver, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    observer.on_step(report(mechanism="idle", planned_rows=64, moved_rows=None, bytes=9))

    assert caplog.messages == ["step 1: idle moves up to 64 rows, 9 bytes, because nothing_to_do"]


def test_a_dry_run_does_not_claim_to_have_moved(
    observer: LogObserver, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    observer.on_step(report(mechanism="tenure", planned_rows=64, bytes=9, dry_run=True))
    observer.on_step(report(step=100))

    assert "tenure would move 64 rows" in caplog.messages[0]
    assert "0 rows and 0 bytes moved" in caplog.messages[1]


def test_gates_are_logged_when_they_close_and_when_they_open(
    observer: LogObserver, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 4):
        observer.on_step(report(step=step, gates=("hicache", "pd")))
    observer.on_step(report(step=4))
    observer.on_step(report(step=5))

    assert caplog.messages == [
        "step 1: refuses to move, closed: hicache, pd",
        "step 4: may move again after 3 refused steps",
    ]


def test_a_fault_is_logged_as_an_error(
    observer: LogObserver, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    observer.on_step(report(error="PlanError: slot 7 twice"))

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "step 1: failed: PlanError: slot 7 twice")
    ]


def test_a_summary_adds_up_what_moved_since_the_last_one(
    observer: LogObserver, report: Build, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (98, 99):
        observer.on_step(
            report(step=step, mechanism="tenure", planned_rows=64, moved_rows=64, bytes=100)
        )
    observer.on_step(report(step=100, coverage=0.98765, reserved_slots=3))
    observer.on_step(report(step=200))

    assert caplog.messages[2:] == [
        "step 100: 128 rows and 200 bytes moved since the last summary; page coverage 0.988, "
        "1000 slots free, 3 reserved",
        "step 200: 0 rows and 0 bytes moved since the last summary; page coverage unknown, "
        "1000 slots free, 0 reserved",
    ]
