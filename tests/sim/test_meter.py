"""The metrics of a run small enough to compute by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvdefrag.core.tracker import Tracker
from kvdefrag.core.view import EngineView
from kvdefrag.profiles import default_profile
from kvdefrag.sim.cost import StepTimer
from kvdefrag.sim.meter import Meter
from kvdefrag.sim.metrics import METRICS, undocumented

POOL = 40


def view(served) -> EngineView:
    rows = served.engine.rows
    live = rows.live_rows()
    return EngineView(
        served.engine.totals.steps,
        served.table,
        live,
        rows.generation[live],
        rows.protected_len[live],
        rows.committed_len[live],
        rows.allocated_len[live],
    )


@pytest.fixture
def mini(serve, make_request):
    """Prompts of 6, 3 and 9 tokens and 4 output tokens each; every step takes a second.

    The prompts take 1..6, 7..9 and 10..18 and are there at second 1; the decode steps that end at
    seconds 2, 3 and 4 take 19..21, 22..24 and 25..27.
    """
    prompts = [range(100, 106), range(200, 203), range(300, 309)]
    return serve([make_request(i, list(p), 4) for i, p in enumerate(prompts)], pool=POOL)


def measure(served, *, packed: bool = False, moved: int = 0):
    timer = StepTimer(default_profile(), verify=False)
    meter = Meter(
        served.engine,
        served.allocator,
        Tracker(served.table.shape[0], page=4),
        timer,
        page=4,
        packed=packed,
    )
    for _ in range(2):
        served.until("decode")
        meter.sample(view(served), moved)
    served.run()
    return meter.result("mini", "By hand.", moved, [], 0.5)


def test_metrics_are_as_defined(mini) -> None:
    found = measure(mini, moved=6).metrics

    # At second 2 the rows are 1..6,19 / 7..9,20 / 10..18,21: of 21 tokens those in 12..15 fill a
    # page of 4. At second 3 they have one token and one run more each. Both last a second.
    expected = {
        "page_coverage_mean": (4 / 21 + 4 / 24) / 2,
        "page_coverage_p10": 4 / 24,
        "page_coverage_request_mean": (4 / 10 / 3 + 4 / 11 / 3) / 2,
        "page_coverage_request_p10": 0.0,
        "mean_run": (21 / 6 + 24 / 9) / 2,
        "runs_per_4096": 4096 * (6 / 21 + 9 / 24) / 2,
        "descriptors_per_request": (2 + 3) / 2,
        "decode_coverage": 0.0,
        "utilization_mean": (21 + 24) / 2 / POOL,
        "live_utilization_mean": (21 + 24) / 2 / POOL,
        "cached_utilization_mean": 0.0,
        "peak_utilization": 24 / POOL,
        "reserved_share": 0.0,
        # Free are 22..40, looked at in the first sample: the pages of 24..39 are whole.
        "whole_free_share": 16 / 19,
        "largest_free_run": 19,
        "prefix_hit_rate": 0.0,
        "requests_finished": 3,
        "requests_rejected": 0,
        "retractions": 0,
        "decode_tokens": 12,
        "moved_rows_per_decoded_token": 6 / 12,
        "bytes_moved": 6 * default_profile().bytes_per_slot,
        "steps": 4,
        "simulated_s": 4,
        "wall_s": 0.5,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name


def test_every_metric_is_documented_and_finite(mini) -> None:
    found = measure(mini).metrics

    assert undocumented(found) == []
    assert {metric.name for metric in METRICS} == set(found)
    assert all(np.isfinite(value) for value in found.values())


def test_run_lengths_are_counted_by_powers_of_two(mini) -> None:
    found = measure(mini)

    # Looked at in the first sample: runs of 6, 1, 3, 1, 9 and 1.
    assert found.run_histogram.tolist()[:5] == [3, 1, 1, 1, 0]
    assert found.run_histogram.sum() == 6


def test_series_say_what_each_sample_saw(mini) -> None:
    series = measure(mini, moved=6).series

    assert series["time_s"].tolist() == [2, 3]
    assert series["running"].tolist() == [3, 3]
    assert series["coverage"].tolist() == [4 / 21, 4 / 24]
    assert series["moved_rows"].tolist() == [6, 6]
    assert "request_coverage" not in series


def test_the_bound_covers_all_but_each_request_s_last_page(mini) -> None:
    found = measure(mini, packed=True)

    # Of 7, 4 and 10 tokens 4, 4 and 8 fill pages; then of 8, 5 and 11 tokens 8, 4 and 8 do.
    metrics = found.metrics
    assert metrics["page_coverage_mean"] == pytest.approx((16 / 21 + 20 / 24) / 2)
    assert metrics["mean_run"] == pytest.approx((21 / 3 + 24 / 3) / 2)
    # Of 1, 1 and 1 decoded tokens, those at positions 4..7 of the first and 0..3 of the second.
    assert metrics["decode_coverage"] == pytest.approx((1 / 3 + 3 / 6) / 2)
    assert found.run_histogram.tolist()[:4] == [0, 0, 2, 1]


def test_a_map_of_the_pool_is_taken(mini) -> None:
    (found,) = measure(mini).maps

    assert found.time_s == 2
    assert len(found.owners) == 11


def test_without_samples_the_figures_are_zero_and_not_missing(serve, make_request) -> None:
    s = serve([make_request(0, [1, 2], 1)], pool=POOL)
    timer = StepTimer(default_profile(), verify=False)
    meter = Meter(
        s.engine, s.allocator, Tracker(s.table.shape[0], page=4), timer, page=4, packed=False
    )
    s.run()

    found = meter.result("mini", "", 0, [], 0.0)

    assert found.metrics["page_coverage_mean"] == 0.0
    assert found.metrics["requests_finished"] == 1
    assert all(np.isfinite(value) for value in found.metrics.values())


def test_cached_and_live_slots_are_told_apart(serve, make_request) -> None:
    early = make_request(0, list(range(50, 60)), 1)
    late = make_request(1, [1, 2], 4, arrival=2.0)
    s = serve([early, late], pool=POOL)
    meter = Meter(
        s.engine,
        s.allocator,
        Tracker(s.table.shape[0], page=4),
        StepTimer(default_profile(), verify=False),
        page=4,
        packed=False,
    )
    s.until("decode")
    meter.sample(view(s), 0)
    s.run()

    found = meter.result("mini", "", 0, [], 0.0).metrics

    # The first prompt's 10 slots are cached; 3 tokens of the second run.
    assert found["cached_utilization_mean"] == pytest.approx(10 / POOL)
    assert found["live_utilization_mean"] == pytest.approx(3 / POOL)
