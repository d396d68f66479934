"""Tells logs and Prometheus every so many steps what was done and how the slots lie."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvdefrag.config import Config
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.report import StepReport
from kvdefrag.core.view import EngineView, to_device
from kvdefrag.metrics import Figures, LogSink, PrometheusSink, Sink, Tally

logger = logging.getLogger(__name__)

_NEVER = 1 << 62


class Layout(NamedTuple):
    """How the running requests lie: tokens, runs, tokens in aligned pages."""

    tokens: int
    runs: int
    covered: int


Measured = Callable[[], Layout]


class Telemetry:
    """Counts steps, measures the layout now and then, and passes both on; never raises.

    A step costs a comparison and two additions. Every `interval` steps the rows are measured, on
    a GPU in one launch whose result is told an interval later.

    Args:
        tally: The totals.
        sinks: Who is told.
        interval: Steps between two times.
        measure: Starts a measurement and returns what gives its result; None if nobody runs.
        figures: Returns how things stand, given the layout last measured.
        late: Whether a measurement's result is there only by the next time.
    """

    def __init__(
        self,
        tally: Tally,
        sinks: list[Sink],
        *,
        interval: int,
        measure: Callable[[], Measured | None],
        figures: Callable[[Layout | None], Figures],
        late: bool,
    ) -> None:
        self.tally = tally
        self._sinks, self._interval, self._left = sinks, interval, interval
        self._measure, self._figures, self._late = measure, figures, late
        self._coming: Measured | None = None
        self.layout: Layout | None = None

    def step(self, report: StepReport, seconds: float) -> None:
        """Count one step."""
        self.tally.add(report, seconds)
        self._left -= 1
        if self._left <= 0:
            self._left = self._interval
            self._tell(measured=True)

    def fault(self) -> None:
        """Count a fault, after which there are no more steps."""
        self.tally.errors += 1
        self._tell(measured=False)

    def _tell(self, *, measured: bool) -> None:
        try:
            if measured:
                self._look()
            self.tally.settle()
            figures = self._figures(self.layout)
            for sink in self._sinks:
                sink.publish(self.tally, figures)
        except Exception:
            self._interval = self._left = _NEVER
            logger.exception("kvdefrag: metrics are off after a fault; serving goes on")

    def _look(self) -> None:
        started = self._measure()
        found, self._coming = (self._coming, started) if self._late else (started, None)
        self.layout = None if found is None else found()


def sinks_of(scheduler: Any, config: Config) -> list[Sink]:
    """Return who is told: the log of one rank, and Prometheus where SGLang exports as well."""
    context = scheduler.metrics_collector_context
    found: list[Sink] = []
    if context.is_stats_logging_rank:
        found.append(LogSink(logger))
    if config.observe.prometheus and context.current_scheduler_metrics_enabled:
        found.append(PrometheusSink(context.collector.labels))
    return found


class LayoutProbe:
    """Measures the layout of running requests.

    Args:
        table: int32 [rows, width].
        page: Slots to an aligned page.
    """

    def __init__(self, table: Tensor, *, page: int) -> None:
        self._table, self._page = table, page
        self._device = None
        if table.device.type == "cuda":
            from kvdefrag.gpu import DeviceStats

            rows, width = table.shape
            self._device = DeviceStats(rows, width, page=page, device=table.device)
            nobody = torch.zeros(1, dtype=torch.int64, device=table.device)
            self._device.measure(table, nobody, nobody)  # builds the kernel

    def start(self, view: EngineView) -> Measured | None:
        """Measure; on a GPU the result may be asked for once the stream is past."""
        if not view.rows.size:
            return None
        tokens = int(view.committed.sum())
        rows, lengths = (to_device(a, self._table.device) for a in (view.rows, view.committed))
        if self._device is None:
            stats = layout_stats(self._table, rows, lengths, page_sizes=(self._page,))
            covered = int(stats.covered[self._page].sum())
            layout = Layout(tokens, int(stats.runs.sum()), covered)
            return lambda: layout
        found = self._device.measure(self._table, rows, lengths)
        return lambda: Layout(tokens, int(found.runs.sum()), int(found.covered.sum()))
