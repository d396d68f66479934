"""Step reports as Prometheus counters and gauges, all named `kvdefrag:...`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvdefrag.core.report import StepReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

_COUNTERS = {
    "steps": ("Steps seen, by what they planned.", "mechanism"),
    "planned_rows": ("Rows that plans may move, dry runs included.", "mechanism"),
    "moved_rows": ("Rows confirmed to have moved.", "mechanism"),
    "copied_bytes": ("Bytes that plans copy, each counted once; no dry runs.", "mechanism"),
    "skips": ("Steps that planned nothing.", "reason"),
    "gates_closed": ("Steps that a closed gate kept from moving.", "gate"),
    "errors": ("Faults inside kvdefrag.", None),
}
_GAUGES = {
    "active": "1 while kvdefrag works in this process, 0 when off or disabled.",
    "backoff_steps": "Steps until a plan may be made again.",
    "page_coverage": "Share of the running requests' tokens in aligned pages.",
    "whole_free_pages": "Pages with every slot free.",
    "reserved_slots": "Slots that requests hold beyond their allocated length.",
    "available_slots": "Free slots.",
}


class PrometheusObserver:
    """Keeps counters and gauges in a registry.

    Args:
        registry: Where they are registered; a second observer needs a registry of its own.
        labels: Put on every metric, for example the rank.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        # Imported here, so that a process without metrics does not pay for it.
        from prometheus_client import Counter, Gauge

        self._labels = dict(labels)
        names = tuple(labels)
        self._counters: dict[str, Counter] = {
            name: Counter(
                f"kvdefrag:{name}", text, (*names, label) if label else names, registry=registry
            )
            for name, (text, label) in _COUNTERS.items()
        }
        self._gauges: dict[str, Gauge] = {
            name: Gauge(f"kvdefrag:{name}", text, names, registry=registry)
            for name, text in _GAUGES.items()
        }
        self._set("active", 0)
        for not_yet_known in ("page_coverage", "whole_free_pages"):
            self._set(not_yet_known, math.nan)

    def set_active(self, *, active: bool) -> None:
        """Say whether kvdefrag works in this process; the engine side knows, a report does not."""
        self._set("active", int(active))

    def on_step(self, report: StepReport) -> None:
        mechanism = report.mechanism
        self._add("steps", 1, mechanism=mechanism)
        if report.planned_rows:
            self._add("planned_rows", report.planned_rows, mechanism=mechanism)
        else:
            self._add("skips", 1, reason=report.reason)
        if report.moved_rows:
            self._add("moved_rows", report.moved_rows, mechanism=mechanism)
        if report.moves:
            self._add("copied_bytes", report.bytes, mechanism=mechanism)
        for gate in report.gates:
            self._add("gates_closed", 1, gate=gate)
        if report.error is not None:
            self._add("errors", 1)
        self._set("backoff_steps", max(0, report.backoff_until - report.step))
        self._set("page_coverage", report.coverage)
        self._set("whole_free_pages", report.whole_free_pages)
        self._set("reserved_slots", report.reserved_slots)
        self._set("available_slots", report.available)

    def _add(self, name: str, amount: int, **labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(**self._labels, **labels) if self._labels or labels else counter).inc(
            amount
        )

    def _set(self, name: str, value: float | None) -> None:
        if value is None:
            return
        gauge = self._gauges[name]
        (gauge.labels(**self._labels) if self._labels else gauge).set(value)
