"""Counters and gauges follow the totals, under names that begin with `kvdefrag:`."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from kvdefrag.core.report import StepReport
from kvdefrag.metrics import Figures, PrometheusSink, Tally
from kvdefrag.metrics.prometheus import COUNTERS, GAUGES

Build = Callable[..., StepReport]
Value = Callable[..., float | None]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def sink(registry: CollectorRegistry) -> PrometheusSink:
    return PrometheusSink({"rank": "3"}, registry)


@pytest.fixture
def value(registry: CollectorRegistry) -> Value:
    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvdefrag:{name}", {"rank": "3", **labels})

    return read


def test_totals_become_counters(sink: PrometheusSink, report: Build, value: Value) -> None:
    tally = Tally(32)
    tally.add(report(mechanism="tenure", planned_rows=128), 0.5)
    tally.add(report(reason="not due", gates=("pd", "free group")), 0.25)
    tally.settle()
    tally.moved_rows["tenure"] += 64
    tally.errors += 1
    sink.publish(tally, Figures())

    assert value("steps_total", mechanism="tenure") == 1
    assert value("planned_rows_total", mechanism="tenure") == 128
    assert value("moved_rows_total", mechanism="tenure") == 64
    assert value("moved_bytes_total", mechanism="tenure") == 2048
    assert value("skips_total", reason="not due") == 1
    assert value("gates_closed_total", gate="free group") == 1
    assert value("errors_total") == 1
    assert value("step_seconds_total") == 0.75


def test_a_total_is_told_once(sink: PrometheusSink, report: Build, value: Value) -> None:
    tally, quiet = Tally(32), report(reason="not due")
    for _ in range(3):
        tally.add(quiet, 0.5)
        tally.settle()
        sink.publish(tally, Figures())
    sink.publish(tally, Figures())

    assert value("skips_total", reason="not due") == 3
    assert value("step_seconds_total") == 1.5


def test_figures_become_gauges(sink: PrometheusSink, value: Value) -> None:
    figures = Figures(
        active=True,
        backoff_steps=4,
        tokens=40,
        runs=5,
        covered=30,
        whole_free_pages=7,
        reserved_slots=9,
        available_slots=1000,
    )
    sink.publish(Tally(1), figures)

    wanted = {"active": 1, "backoff_steps": 4, "page_coverage": 0.75, "runs": 5, "tokens": 40}
    wanted |= {"whole_free_pages": 7, "reserved_slots": 9, "available_slots": 1000}
    assert {name: value(name) for name in GAUGES} == wanted


def test_what_is_not_known_is_shown_as_such(sink: PrometheusSink, value: Value) -> None:
    sink.publish(Tally(1), Figures())

    assert math.isnan(value("page_coverage") or 0)
    assert math.isnan(value("whole_free_pages") or 0)
    assert value("errors_total") == 0
    assert value("active") == 0


def test_metrics_without_labels_of_the_server_work_too(registry: CollectorRegistry) -> None:
    tally = Tally(1)
    tally.errors += 1
    tally.moved_rows["idle"] += 2
    PrometheusSink({}, registry).publish(tally, Figures())

    assert registry.get_sample_value("kvdefrag:errors_total") == 1
    assert registry.get_sample_value("kvdefrag:moved_rows_total", {"mechanism": "idle"}) == 2


def test_every_metric_carries_the_prefix_and_a_description(
    sink: PrometheusSink, registry: CollectorRegistry
) -> None:
    families = list(registry.collect())

    assert {f.name for f in families} == {f"kvdefrag:{n}" for n in (*COUNTERS, *GAUGES)}
    assert all(family.documentation for family in families)


def test_importing_the_package_does_not_import_prometheus() -> None:
    code = "import sys, kvdefrag.metrics; sys.exit('prometheus_client' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
