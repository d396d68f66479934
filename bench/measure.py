"""Time device work honestly: cold cache, events, spread, and a roof measured in the same run."""

from __future__ import annotations

import datetime
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import triton

Run = Callable[[], object]
FLUSH_BYTES = 512 << 20
# Clock cycles (about half a millisecond) for which the device is kept busy before each call, so
# that what the host needs to launch it does not show as device time.
AHEAD_CYCLES = 1_000_000
ROOF_BYTES = 4 << 30


@dataclass(frozen=True)
class Entry:
    """One line of a result: a provider on one case. `make` builds its inputs and gives the call.

    `moved` counts bytes read plus bytes written. `check`, run once after the first call, raises if
    the provider's result is wrong. `absent` says why a provider cannot run.
    """

    case: str
    params: dict[str, Any]
    provider: str
    moved: int
    make: Callable[[], Run] | None = None
    check: Run | None = None
    ceiling: float | None = None
    host: bool = False
    absent: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class Clock:
    """Times calls on the current stream behind a flushed cache."""

    def __init__(self, *, budget_s: float = 0.4) -> None:
        # Read, not written: a cache full of dirty lines would bill their write-back to the call.
        self.flusher = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.budget_s = budget_s

    def flush(self) -> None:
        """Fill the cache with clean lines of other memory (about 0.15 ms on an H200)."""
        self.flusher.sum()

    def quantiles(self, run: Run, *, least: int = 7, most: int = 60) -> tuple[float, float, float]:
        """Return p20, p50, p80 of the device time of one call, in microseconds."""
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = time.perf_counter() - begin
        repeat = max(least, min(most, int(self.budget_s / max(once, 1e-6))))
        pairs = []
        for _ in range(repeat):
            torch.cuda._sleep(AHEAD_CYCLES)
            self.flush()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            first.record()
            run()
            last.record()
            pairs.append((first, last))
        torch.cuda.synchronize()
        return quantiles_of([a.elapsed_time(b) * 1e3 for a, b in pairs])

    def host_us(self, run: Run, *, repeat: int = 40) -> float:
        """Return the median time until the call returns, on an idle device, in microseconds."""
        spent = []
        for _ in range(repeat):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            spent.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
        return median(spent)

    def roof_gbps(self) -> float:
        """Measure a device-to-device copy of 4 GiB, bytes read plus written."""
        one, two = (torch.empty(ROOF_BYTES, dtype=torch.uint8, device="cuda") for _ in "ab")
        one.random_(0, 256)
        two.copy_(one)
        p50 = self.quantiles(lambda: two.copy_(one), least=30)[1]
        return 2 * ROOF_BYTES / p50 / 1e3


def quantiles_of(values: list[float]) -> tuple[float, float, float]:
    """Return p20, p50, p80."""
    ordered = sorted(values)
    return (
        ordered[int(0.2 * (len(ordered) - 1))],
        median(ordered),
        ordered[round(0.8 * (len(ordered) - 1))],
    )


def machine() -> dict[str, Any]:
    """Name the GPU, driver, versions, date and commit."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": _output(ask),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _output(["git", "describe", "--always", "--dirty"]),
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
