"""Time series and time averages of one arm."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvdefrag.sim.results import FloatArray


class Series:
    """Samples of several quantities, each weighed by the simulated time until the next one."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {}
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        """Add one sample; every sample names the same quantities."""
        self._times.append(time_s)
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)

    def finish(self, end_s: float) -> TimeSeries:
        """Return the samples with their weights, the last lasting until `end_s`."""
        times = np.array(self._times, dtype=np.float64)
        weights = np.diff(times, append=max(end_s, times[-1] if len(times) else 0.0))
        # A run of one sample, or of no length, still has an average.
        weights = weights if weights.sum() > 0 else np.ones_like(times)
        columns = {k: np.array(v, dtype=np.float64) for k, v in self._columns.items()}
        return TimeSeries(times, columns, weights)


class TimeSeries:
    """Finished samples.

    Attributes:
        time_s: float64 [n].
        columns: float64 [n] by quantity.
        weights: float64 [n], seconds that each sample stands for.
    """

    def __init__(self, time_s: FloatArray, columns: dict[str, FloatArray], weights: FloatArray):
        self.time_s, self.columns, self.weights = time_s, columns, weights

    def mean(self, name: str) -> float:
        """Return the time average; 0 without samples."""
        if not len(self.time_s):
            return 0.0
        return float(np.average(self.columns[name], weights=self.weights))

    def max(self, name: str) -> float:
        """Return the highest sample; 0 without samples."""
        return float(self.columns[name].max()) if len(self.time_s) else 0.0

    def quantile(self, name: str, share: float) -> float:
        """Return the value that the quantity is at or below for `share` of the time."""
        if not len(self.time_s):
            return 0.0
        order = np.argsort(self.columns[name], kind="stable")
        reached = np.cumsum(self.weights[order]) / self.weights.sum()
        at = min(int(np.searchsorted(reached, share)), len(order) - 1)
        return float(self.columns[name][order[at]])

    def thinned(self, most: int) -> dict[str, FloatArray]:
        """Return time and columns at up to `most` samples, evenly spread."""
        keep = np.unique(np.linspace(0, max(len(self.time_s) - 1, 0), most).astype(np.int64))
        keep = keep[: len(self.time_s)]
        return {"time_s": self.time_s[keep]} | {k: v[keep] for k, v in self.columns.items()}
