"""Synthetic results with the shape of real ones; the numbers are made up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvdefrag.sim.metrics import METRICS
from kvdefrag.sim.results import ArmResult, FloatArray, PoolMap, RunResult, Slice

Make = Callable[..., RunResult]

# coverage, p10, mean run, moved rows per token, run length of the maps
ARMS: dict[str, tuple[float, float, float, float, int]] = {
    "stock": (0.408, 0.141, 1.9, 0.0, 1),
    "sorted": (0.640, 0.488, 5.6, 0.0, 4),
    "placement": (0.956, 0.941, 44.0, 0.0, 32),
    "placement+reservation": (0.990, 0.986, 255.0, 0.0, 128),
    "placement+tenure": (0.991, 0.986, 211.0, 0.88, 128),
    "default": (0.9915, 0.987, 258.0, 0.02, 128),
    "my policy": (0.985, 0.970, 180.0, 0.1, 64),
    "packed": (0.996, 0.995, 2900.0, 0.0, 4096),
}


def make_result(
    *, samples: int = 40, maps: int = 3, cells: int = 256, steps: int = 2, seed: int = 0
) -> RunResult:
    """Make a result with all arms of `ARMS`."""
    rng = np.random.default_rng(seed)
    arms = tuple(
        _arm(rng, name, samples=samples, maps=maps, cells=cells, steps=steps) for name in ARMS
    )
    return RunResult(
        trace={"name": "conversation, first 1,200", "sha256": "ab" * 32, "requests": 1200},
        options={"pool_slots": cells * 64, "page": 64, "seed": seed, "window": None, "rate": 1.0},
        versions={"kvdefrag": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
        arms=arms,
        verdict=("Sorting adds something.",),
        warnings=("The pool was nearly empty.",),
    )


def make_arm(name: str, **metrics: float) -> ArmResult:
    """Make an arm that has nothing but scalars."""
    series = {"time_s": np.zeros(0), "step": np.zeros(0)}
    return ArmResult(name, f"what {name} does", metrics, series, np.zeros(24, np.int64))


@pytest.fixture(name="make_result")
def make_result_fixture() -> Make:
    """Give tests the generator, since test modules cannot import each other."""
    return make_result


@pytest.fixture(name="make_arm")
def make_arm_fixture() -> Callable[..., ArmResult]:
    """Give tests `make_arm`."""
    return make_arm


def _arm(
    rng: np.random.Generator, name: str, *, samples: int, maps: int, cells: int, steps: int
) -> ArmResult:
    coverage, p10, run, moved, length = ARMS[name]
    metrics = {metric.name: float(rng.random()) for metric in METRICS}
    metrics.update(
        page_coverage_mean=coverage,
        page_coverage_p10=p10,
        mean_run=run,
        runs_per_4096=4096 / run,
        moved_rows_per_decoded_token=moved,
        bytes_moved=moved * 400_000 * 1152,
        attention_us_stock=2484.0 - 8 * coverage,
        attention_us_paged=430.0 - 100 * coverage,
        modelled_tokens_per_second=9100 + 40 * coverage,
        modelled_tokens_per_second_paged=15_000 + 800 * coverage - 100 * moved,
        requests_finished=1200.0,
        requests_rejected=0.0,
        retractions=3.0,
        steps=float(steps),
        decode_tokens=400_000.0,
        largest_free_run=4096.0,
        descriptors_per_request=8000 / run,
    )
    histogram = np.zeros(24, np.int64)
    histogram[:14] = 1e6 * np.exp(-0.5 * (np.arange(14) - np.log2(run)) ** 2)
    return ArmResult(
        name=name,
        description=f"What {name} does that the arm before it does not.",
        metrics=metrics,
        series=_series(rng, samples, coverage, run, moved),
        run_histogram=histogram,
        maps=tuple(
            PoolMap(float(400 * i / maps), _owners(rng, cells, length, i / maps), 64)
            for i in range(maps)
        ),
        slices=tuple(Slice("decode", i * 5e3, 4e3, {"batch": 64.0}) for i in range(steps)),
    )


def _series(
    rng: np.random.Generator, samples: int, coverage: float, run: float, moved: float
) -> dict[str, FloatArray]:
    time = np.linspace(0, 400, samples)
    fill = 1 - np.exp(-time / 60)
    noise = rng.normal(0, 0.01, samples)
    return {
        "time_s": time,
        "step": np.arange(samples, dtype=np.float64),
        "coverage": np.clip(1 - (1 - coverage) * fill + noise * (1 - coverage), 0, 1),
        "mean_run": run * (1 + 3 * np.exp(-time / 40)) + np.abs(noise),
        "whole_free_share": 1 - 0.5 * fill + noise,
        "utilization": 0.95 * fill,
        "live_share": 0.35 * fill + np.abs(noise),
        "cached_share": 0.6 * fill,
        "reserved_share": np.full(samples, 0.002),
        "running": np.round(64 * fill),
        "moved_rows": 1000 * moved * time,
    }


def _owners(
    rng: np.random.Generator, cells: int, length: int, fill: float
) -> npt.NDArray[np.uint16]:
    """Fill cells in stretches of about `length` slots with one owner each."""
    stretch = max(1, length // 8)
    count = -(-cells // stretch)
    private = rng.integers(4, 68, count)
    kind = rng.choice(
        5, count, p=[1 - 0.95 * fill, 0.55 * fill, 0.01 * fill, 0.04 * fill, 0.35 * fill]
    )
    owners = np.where(kind == 4, private, kind)
    return np.repeat(owners, stretch)[:cells].astype(np.uint16)
