"""Samples one arm's engine and turns the samples into its metrics."""

from __future__ import annotations

import numpy as np
import torch

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.free_stats import free_stats
from kvdefrag.core.host_counter import Counts
from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView
from kvdefrag.sim.cost import StepTimer
from kvdefrag.sim.measured import Measured
from kvdefrag.sim.pool_map import Album, draw
from kvdefrag.sim.results import ArmResult, FloatArray, Slice
from kvdefrag.sim.sampling import Series, TimeSeries

_RARELY = 16
_MOST_POINTS = 600
_BINS = 10_000
_RUN_BINS = 24


class Meter:
    """Measures one arm.

    Args:
        engine, allocator, tracker: The arm's.
        timer: Prices its steps; learns the coverage here.
        page: Slots to an aligned page.
        packed: Take the layout to be perfect.
    """

    def __init__(
        self,
        engine: Measured,
        allocator: SlotAllocator,
        tracker: Tracker,
        timer: StepTimer,
        *,
        page: int,
        packed: bool,
    ) -> None:
        self._engine, self._allocator, self._tracker = engine, allocator, tracker
        self._timer, self._page, self._packed = timer, page, packed
        self._series = Series()
        self._album = Album()
        self._request_coverage = np.zeros(_BINS + 1, dtype=np.int64)
        self._runs = np.zeros(_RUN_BINS, dtype=np.int64)
        self._row_bytes = timer.row_bytes
        self._free = {"whole_free_share": 1.0, "largest_free_run": 0.0}

    def sample(self, view: EngineView, moved_rows: int) -> None:
        """Take one sample of the running requests."""
        counts = self._counts(view)
        tokens = max(1, int(counts.tokens.sum()))
        share = counts.covered / counts.tokens.clip(1)
        np.add.at(self._request_coverage, (share * _BINS).astype(np.int64), 1)
        self._timer.coverage = int(counts.covered.sum()) / tokens
        if len(self._series) % _RARELY == 0:
            self._look_closely(view)
        size, tree = self._allocator.size, self._engine.tree
        used = size - self._allocator.available_size() - self._allocator.reserved_size()
        runs = max(1, int(counts.runs.sum()))
        private = int(counts.private.sum())
        self._series.add(
            self._engine.now,
            {
                "step": self._engine.totals.steps,
                "coverage": self._timer.coverage,
                "request_coverage": float(share.mean()),
                "decode_coverage": int(counts.private_covered.sum()) / private if private else 1.0,
                "mean_run": tokens / runs,
                "runs_per_4096": 4096 * runs / tokens,
                "descriptors": runs / view.rows.shape[0],
                "utilization": used / size,
                "live_share": (used - tree.evictable_size) / size,
                "cached_share": tree.evictable_size / size,
                "reserved_share": self._allocator.reserved_size() / size,
                "running": view.rows.shape[0],
                "moved_rows": moved_rows,
                **self._free,
            },
        )

    def result(
        self, name: str, description: str, moved_rows: int, slices: list[Slice], wall_s: float
    ) -> ArmResult:
        """Return what the arm did."""
        series = self._series.finish(self._engine.now)
        return ArmResult(
            name=name,
            description=description,
            metrics=self._metrics(series, moved_rows) | {"wall_s": wall_s},
            series=_shown(series),
            run_histogram=self._runs,
            maps=tuple(self._album.maps),
            slices=tuple(slices),
        )

    def _counts(self, view: EngineView) -> Counts:
        if not self._packed:
            return self._tracker.measure(view)
        tokens, private = view.committed, view.committed - view.protected
        covered = tokens // self._page * self._page
        inside = (covered - view.protected).clip(0)
        return Counts(tokens, (tokens > 0).astype(np.int64), covered, private, inside)

    def _look_closely(self, view: EngineView) -> None:
        free = self._allocator.free_slots()
        if self._packed:
            whole = free.shape[0] // self._page * self._page
            self._free = {
                "whole_free_share": whole / free.shape[0] if free.shape[0] else 1.0,
                "largest_free_run": float(free.shape[0]),
            }
            lengths = view.committed
        else:
            stats = free_stats(free, self._allocator.size, page=self._page)
            self._free = {
                "whole_free_share": stats.whole_share,
                "largest_free_run": float(stats.largest_run),
            }
            lengths = _run_lengths(view)
        bins = np.log2(lengths[lengths > 0]).astype(np.int64).clip(0, _RUN_BINS - 1)
        self._runs += np.bincount(bins, minlength=_RUN_BINS)
        if self._album.due():
            self._album.add(draw(self._engine, self._allocator, page=self._page))

    def _metrics(self, series: TimeSeries, moved_rows: int) -> dict[str, float]:
        totals, timer = self._engine.totals, self._timer
        decoded = max(1, totals.output_tokens)
        means = {
            "page_coverage_mean": "coverage",
            "page_coverage_request_mean": "request_coverage",
            "decode_coverage": "decode_coverage",
            "mean_run": "mean_run",
            "runs_per_4096": "runs_per_4096",
            "descriptors_per_request": "descriptors",
            "utilization_mean": "utilization",
            "live_utilization_mean": "live_share",
            "cached_utilization_mean": "cached_share",
            "reserved_share": "reserved_share",
            "whole_free_share": "whole_free_share",
            "largest_free_run": "largest_free_run",
        }
        steps = max(1, timer.decode_steps)
        return {name: series.mean(column) for name, column in means.items()} | {
            "page_coverage_p10": series.quantile("coverage", 0.1),
            "page_coverage_request_p10": _quantile(self._request_coverage, 0.1),
            "peak_utilization": series.max("utilization"),
            "prefix_hit_rate": totals.prefix_hit_rate,
            "moved_rows_per_decoded_token": moved_rows / decoded,
            "bytes_moved": moved_rows * self._row_bytes,
            "relocation_time_share": timer.relocation_s / timer.step_s if timer.step_s else 0.0,
            "requests_finished": totals.finished,
            "requests_rejected": totals.rejected,
            "retractions": totals.retractions,
            "attention_us_stock": timer.attention_stock_us / steps,
            "attention_us_paged": timer.attention_paged_us / steps,
            "modelled_tokens_per_second": _rate(totals.output_tokens, timer.step_s),
            "modelled_tokens_per_second_paged": _rate(totals.output_tokens, timer.paged_s),
            "steps": totals.steps,
            "decode_tokens": totals.output_tokens,
            "simulated_s": self._engine.now,
        }


def _shown(series: TimeSeries) -> dict[str, FloatArray]:
    thinned = series.thinned(_MOST_POINTS)
    hidden = ("request_coverage", "runs_per_4096", "descriptors", "largest_free_run")
    return {name: values for name, values in thinned.items() if name not in hidden}


def _run_lengths(view: EngineView) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    lengths = [torch.zeros(0, dtype=torch.int64).numpy()]
    table = view.table.numpy()
    for row, tokens in zip(view.rows.tolist(), view.committed.tolist(), strict=True):
        breaks = np.flatnonzero(np.diff(table[row, :tokens]) != 1) + 1
        lengths.append(np.diff(breaks, prepend=0, append=tokens))
    return np.concatenate(lengths)


def _quantile(histogram: np.ndarray[tuple[int], np.dtype[np.int64]], share: float) -> float:
    total = int(histogram.sum())
    if not total:
        return 0.0
    return int(np.searchsorted(histogram.cumsum(), share * total)) / (histogram.shape[0] - 1)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0
