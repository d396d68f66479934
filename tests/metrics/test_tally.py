"""Totals add up, whether steps share a report or not."""

from __future__ import annotations

from collections.abc import Callable

from kvdefrag.core.report import StepReport
from kvdefrag.metrics import Figures, Tally

Build = Callable[..., StepReport]


def test_steps_that_share_a_report_are_counted_each(report: Build) -> None:
    tally, quiet = Tally(8), report(reason="not due", gates=())
    for _ in range(3):
        tally.add(quiet, 0.25)
    tally.settle()
    assert tally.skips == {"not due": 3}
    tally.add(quiet, 0.25)
    tally.settle()
    tally.settle()

    assert tally.skips == {"not due": 4}
    assert tally.steps == {"none": 4}
    assert tally.seconds == 1.0


def test_every_kind_of_step_has_its_total(report: Build) -> None:
    tally = Tally(8)
    tally.add(report(mechanism="tenure", planned_rows=128), 0.0)
    tally.add(report(reason="gate closed", gates=("a", "b")), 0.0)
    tally.add(report(reason="gate closed", gates=("b",)), 0.0)
    tally.settle()

    assert tally.steps == {"tenure": 1, "none": 2}
    assert tally.planned_rows == {"tenure": 128}
    assert tally.skips == {"gate closed": 2}
    assert tally.gates_closed == {"a": 1, "b": 2}


def test_bytes_follow_from_the_rows_that_moved() -> None:
    tally = Tally(576)
    tally.moved_rows.update(tenure=2, gather=1)

    assert tally.moved_bytes == {"tenure": 1152, "gather": 576}


def test_coverage_is_unknown_without_tokens() -> None:
    assert Figures().coverage is None
    assert Figures(tokens=8, covered=2).coverage == 0.25
