"""What is measured while the engine runs: layout of the running requests, time of our step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from kvdefrag.core.layout import layout_stats
from kvdefrag.sglang.compat import compat, requests_of


class Layout:
    """Samples page coverage and runs of the running requests, read from the live server's table.

    Args:
        scheduler: SGLang's.
        page: Slots to a page.
        every: Iterations between samples; 0 never samples.
    """

    def __init__(self, scheduler: Any, *, page: int, every: int) -> None:
        self._scheduler, self._page, self._every = scheduler, page, every
        self._names = compat()
        self.clear()

    def clear(self) -> None:
        self._covered: list[float] = []
        self._bound: list[float] = []
        self._run: list[float] = []
        self._used: list[float] = []
        self._busy: list[float] = []

    def look(self, iteration: int) -> None:
        """Take a sample if one is due."""
        if not self._every or iteration % self._every:
            return
        s = self._scheduler
        if s.forward_stream is not None and s.device != "cpu":
            torch.cuda.synchronize()
        found = [self._names.lengths(r) for r in requests_of(s) if not r.finished()]
        kept = {k.row: min(k.committed, k.allocated) for k in found if k is not None}
        kept = {row: n for row, n in kept.items() if n > 0}
        if not kept:
            return
        rows, lengths = torch.tensor(list(kept)), torch.tensor(list(kept.values()))
        table = s.req_to_token_pool.req_to_token.cpu()
        stats = layout_stats(table, rows, lengths, page_sizes=(self._page,))
        total = float(lengths.sum())
        self._covered.append(float(stats.covered[self._page].sum()) / total)
        self._bound.append(float((lengths // self._page * self._page).sum()) / total)
        self._run.append(total / float(stats.runs.sum()))
        allocator = s.token_to_kv_pool_allocator
        free = allocator.available_size() / allocator.size
        self._used.append(1 - free)
        self._busy.append(1 - free - s.tree_cache.evictable_size() / allocator.size)

    def result(self) -> dict[str, float] | None:
        """Return the means, and the tenth percentile of coverage; None without samples."""
        if not self._covered:
            return None
        return {
            "coverage_mean": round(float(np.mean(self._covered)), 4),
            "coverage_p10": round(float(np.quantile(self._covered, 0.1)), 4),
            "bound_mean": round(float(np.mean(self._bound)), 4),
            "mean_run": round(float(np.mean(self._run)), 1),
            "utilization_mean": round(float(np.mean(self._used)), 4),
            "unevictable_mean": round(float(np.mean(self._busy)), 4),
            "samples": len(self._covered),
        }


class StepTimer:
    """Times our step on the host; keeps apart steps that are idle, that look and that compact.

    A step that looks waits for the forward on the device; one that compacts also plans and copies.

    Args:
        attachment: The plugin's, or None under stock.
        strict: Let any synchronisation within the step raise.
    """

    def __init__(self, attachment: Any, *, strict: bool) -> None:
        self.clear()
        if attachment is None:
            return
        step, look = attachment.step, attachment._look

        def looked() -> Any:
            self._looked = True
            return look()

        def timed() -> None:
            self._looked = False
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            begun = time.perf_counter()
            step()
            spent = time.perf_counter() - begun
            if strict:
                torch.cuda.set_sync_debug_mode("default")
            acted = self._looked and attachment.last.mechanism != "none"
            self.latest = "compacts" if acted else "looks" if self._looked else "idle"
            self._spent[self.latest].append(spent * 1e6)

        attachment._look, attachment.step = looked, timed

    def clear(self) -> None:
        self.latest = "idle"
        self._spent: dict[str, list[float]] = {"idle": [], "looks": [], "compacts": []}

    def result(self) -> dict[str, dict[str, float]]:
        """Return microseconds of host time by kind of step."""
        return {kind: quantiles(us) for kind, us in self._spent.items() if us}


def quantiles(values: list[float]) -> dict[str, float]:
    """Return count, p50, p90, p99 and the largest."""
    points = np.quantile(np.array(values), (0.5, 0.9, 0.99, 1.0))
    names = ("p50", "p90", "p99", "max")
    return {"count": len(values)} | {
        name: round(float(v), 2) for name, v in zip(names, points, strict=True)
    }
