"""Counters and gauges follow the reports, under names that begin with `kvdefrag:`."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from kvdefrag.core.report import StepReport
from kvdefrag.metrics import PrometheusObserver

Build = Callable[..., StepReport]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def observer(registry: CollectorRegistry) -> PrometheusObserver:
    return PrometheusObserver(registry, {"rank": "3"})


@pytest.fixture
def value(registry: CollectorRegistry) -> Callable[..., float | None]:
    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvdefrag:{name}", {"rank": "3", **labels})

    return read


def test_a_move_is_counted_in_rows_and_bytes_by_mechanism(
    observer: PrometheusObserver, report: Build, value: Callable[..., float | None]
) -> None:
    for _ in range(2):
        observer.on_step(report(mechanism="tenure", planned_rows=128, moved_rows=64, bytes=4096))

    assert value("steps_total", mechanism="tenure") == 2
    assert value("planned_rows_total", mechanism="tenure") == 256
    assert value("moved_rows_total", mechanism="tenure") == 128
    assert value("copied_bytes_total", mechanism="tenure") == 8192


def test_a_dry_run_counts_as_planned_and_never_as_moved(
    observer: PrometheusObserver, report: Build, value: Callable[..., float | None]
) -> None:
    observer.on_step(
        report(mechanism="idle", planned_rows=64, moved_rows=None, bytes=4096, dry_run=True)
    )

    assert value("planned_rows_total", mechanism="idle") == 64
    assert value("moved_rows_total", mechanism="idle") is None
    assert value("copied_bytes_total", mechanism="idle") is None


def test_a_step_without_a_plan_is_a_skip_under_its_reason(
    observer: PrometheusObserver, report: Build, value: Callable[..., float | None]
) -> None:
    observer.on_step(report(reason="no_consumer"))

    assert value("skips_total", reason="no_consumer") == 1


def test_each_closed_gate_is_counted(
    observer: PrometheusObserver, report: Build, value: Callable[..., float | None]
) -> None:
    observer.on_step(report(gates=("hicache", "pd")))
    observer.on_step(report(gates=("pd",)))

    assert value("gates_closed_total", gate="hicache") == 1
    assert value("gates_closed_total", gate="pd") == 2


def test_gauges_show_the_last_step(
    observer: PrometheusObserver, report: Build, value: Callable[..., float | None]
) -> None:
    observer.on_step(
        report(step=10, backoff_until=14, coverage=0.5, whole_free_pages=7, reserved_slots=9)
    )
    observer.on_step(report(step=20, backoff_until=14))

    assert value("backoff_steps") == 0
    assert value("page_coverage") == 0.5
    assert value("whole_free_pages") == 7
    assert value("reserved_slots") == 0
    assert value("available_slots") == 1000


def test_what_is_not_known_yet_is_shown_as_such(
    value: Callable[..., float | None], observer: PrometheusObserver, report: Build
) -> None:
    observer.on_step(report(backoff_until=5))

    coverage, pages = value("page_coverage"), value("whole_free_pages")
    assert coverage is not None
    assert pages is not None
    assert math.isnan(coverage)
    assert math.isnan(pages)
    assert value("backoff_steps") == 4


def test_activity_is_off_until_it_is_said_to_be_on(
    observer: PrometheusObserver, value: Callable[..., float | None]
) -> None:
    before = value("active")
    observer.set_active(active=True)
    during = value("active")
    observer.set_active(active=False)

    assert (before, during, value("active")) == (0, 1, 0)


def test_faults_are_counted(
    observer: PrometheusObserver, report: Build, value: Callable[..., float | None]
) -> None:
    observer.on_step(report(error="boom"))

    assert value("errors_total") == 1


def test_metrics_without_labels_of_the_process_work_too(
    registry: CollectorRegistry, report: Build
) -> None:
    PrometheusObserver(registry, {}).on_step(report(error="boom"))

    assert registry.get_sample_value("kvdefrag:errors_total") == 1
    assert registry.get_sample_value("kvdefrag:skips_total", {"reason": "nothing_to_do"}) == 1


def test_every_metric_carries_the_prefix_and_a_description(
    observer: PrometheusObserver, registry: CollectorRegistry
) -> None:
    families = list(registry.collect())

    assert families
    assert [family.name for family in families if not family.name.startswith("kvdefrag:")] == []
    assert [family.name for family in families if not family.documentation] == []


def test_importing_the_observers_does_not_import_prometheus() -> None:
    code = "import sys, kvdefrag.metrics; sys.exit('prometheus_client' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
