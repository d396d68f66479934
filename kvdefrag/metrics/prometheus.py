"""Totals as Prometheus counters and gauges, all named `kvdefrag:...`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdefrag.metrics.tally import Figures, Tally

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge


class Described(NamedTuple):
    """A metric's meaning.

    Attributes:
        text: What it is, in one line.
        label: Its own label beside those of the server; empty if none.
    """

    text: str
    label: str = ""


COUNTERS = {
    "steps": Described("Steps of the scheduler, by what they planned.", "mechanism"),
    "planned_rows": Described("Rows that plans might move, dry runs included.", "mechanism"),
    "moved_rows": Described("Rows that have moved, as the device confirmed.", "mechanism"),
    "moved_bytes": Described("Moved rows times the bytes of a row over all buffers.", "mechanism"),
    "skips": Described("Steps that planned nothing.", "reason"),
    "gates_closed": Described("Steps that a closed gate kept from moving.", "gate"),
    "errors": Described("Faults inside kvdefrag; the first one turns relocation off."),
    "step_seconds": Described("Host time spent in kvdefrag's part of the scheduler's steps."),
}
GAUGES = {
    "active": Described("1 while kvdefrag works in this process, 0 when off or disabled."),
    "backoff_steps": Described("Steps until a plan may be made again: max(0, until - step)."),
    "page_coverage": Described(
        "Tokens of running requests that fill aligned pages in token order, divided by all their "
        "tokens; NaN when nobody runs."
    ),
    "runs": Described("Longest stretches of running requests' tokens whose slots rise by 1."),
    "tokens": Described("Tokens of running requests that the two above are measured over."),
    "whole_free_pages": Described("Aligned pages with every slot free; a lower bound on a GPU."),
    "reserved_slots": Described("Slots that requests hold beyond their allocated length."),
    "available_slots": Described("Free slots, reserved ones not among them."),
}


class PrometheusSink:
    """Keeps counters and gauges as SGLang keeps its own.

    Args:
        labels: Put on every metric: SGLang's, so that they can be joined with its metrics.
        registry: Where they are registered; by default the process's own.
    """

    def __init__(
        self, labels: Mapping[str, Any], registry: CollectorRegistry | None = None
    ) -> None:
        # Imported here: it decides on import whether processes share a directory.
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if registry is None else registry
        self._labels, names = dict(labels), tuple(labels)
        self._counters: dict[str, Counter] = {
            name: Counter(
                f"kvdefrag:{name}",
                found.text,
                (*names, found.label) if found.label else names,
                registry=registry,
            )
            for name, found in COUNTERS.items()
        }
        self._gauges: dict[str, Gauge] = {
            name: Gauge(
                f"kvdefrag:{name}",
                found.text,
                names,
                registry=registry,
                multiprocess_mode="mostrecent",
            )
            for name, found in GAUGES.items()
        }
        self._told: dict[tuple[str, str], float] = {}

    def publish(self, tally: Tally, figures: Figures) -> None:
        for name in ("steps", "planned_rows", "moved_rows", "moved_bytes", "skips", "gates_closed"):
            for value, count in getattr(tally, name).items():
                self._raise(name, count, value)
        self._raise("errors", tally.errors)
        self._raise("step_seconds", tally.seconds)
        known = figures.whole_free_pages
        self._set("active", int(figures.active))
        self._set("backoff_steps", figures.backoff_steps)
        self._set("page_coverage", math.nan if figures.coverage is None else figures.coverage)
        self._set("runs", figures.runs)
        self._set("tokens", figures.tokens)
        self._set("whole_free_pages", math.nan if known is None else known)
        self._set("reserved_slots", figures.reserved_slots)
        self._set("available_slots", figures.available_slots)

    def _raise(self, name: str, total: float, value: str = "") -> None:
        more = total - self._told.get((name, value), 0)
        self._told[name, value] = total
        if not value or more:
            labels = self._labels | ({COUNTERS[name].label: value} if value else {})
            counter = self._counters[name]
            (counter.labels(**labels) if labels else counter).inc(more)

    def _set(self, name: str, value: float) -> None:
        gauge = self._gauges[name]
        (gauge.labels(**self._labels) if self._labels else gauge).set(value)
