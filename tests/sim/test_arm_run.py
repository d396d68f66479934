"""One arm over a small trace: every glue between engine, policy, cost and meter."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvdefrag.sim.arm_run import ArmRun
from kvdefrag.sim.arms import built_in
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.metrics import METRICS, repeatable, undocumented
from kvdefrag.sim.options import RunOptions, TraceOptions

BLOCK, PAGE = 16, 16


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 requests of up to 12 blocks, the first of which many of them share."""
    rng, rows = random.Random(3), []
    for number in range(40):
        length = rng.randint(20, 190)
        blocks = -(-length // BLOCK)
        shared = list(range(rng.randint(0, blocks)))
        own = [10**6 + number * 100 + i for i in range(blocks - len(shared))]
        row = {
            "timestamp": number * 50,
            "input_length": length,
            "output_length": rng.choice([1, 20, 60]),
            "hash_ids": shared + own,
        }
        rows.append(json.dumps(row))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="ascii")
    return path


@pytest.fixture
def options(trace: Path) -> RunOptions:
    return RunOptions(
        trace=TraceOptions(path=trace, block=BLOCK),
        engine=EngineOptions(pool_slots=1600, max_running=8, context=512, page=PAGE),
        sample_every=4,
    )


def run(name: str, options: RunOptions):
    return ArmRun(built_in(name, page=PAGE), options).run()


@pytest.mark.parametrize("name", ["stock", "default", "all", "packed"])
def test_every_figure_is_documented_and_finite(name: str, options: RunOptions) -> None:
    result = run(name, options)

    assert undocumented(result.metrics) == []
    assert {metric.name for metric in METRICS} == set(result.metrics)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert {len(column) for column in result.series.values()} == {len(result.series["time_s"])}
    assert result.metrics["requests_finished"] == 40


def test_the_mechanisms_raise_coverage_in_the_order_of_the_arms(options: RunOptions) -> None:
    names = ("stock", "placement", "placement+reservation", "packed")
    coverage = [run(name, options).metrics["page_coverage_mean"] for name in names]

    assert coverage == sorted(coverage)
    assert coverage[0] < coverage[-1]


def test_copies_are_counted_and_charged(options: RunOptions) -> None:
    still, moving = (run(n, options).metrics for n in ("placement", "placement+tenure"))

    assert still["moved_rows_per_decoded_token"] == still["relocation_time_share"] == 0
    assert moving["moved_rows_per_decoded_token"] > 0
    rows = moving["moved_rows_per_decoded_token"] * moving["decode_tokens"]
    assert rows == pytest.approx(round(rows))
    assert moving["bytes_moved"] == pytest.approx(rows * 61 * 1152)
    assert 0 < moving["relocation_time_share"] < 1
    assert moving["page_coverage_mean"] > still["page_coverage_mean"]


def test_the_pool_is_sound_and_everything_is_given_back(options: RunOptions) -> None:
    for name in ("stock", "all"):
        arm = ArmRun(built_in(name, page=PAGE), options)
        arm.run()

        arm.engine.check_integrity()
        assert not arm.engine.rows.live.any()
        assert arm.allocator.reserved_size() == 0
        held = arm.engine.tree.total_size + arm.allocator.available_size()
        assert held == options.engine.pool_slots


def test_equal_runs_give_equal_figures(options: RunOptions) -> None:
    first, second = (run("all", options) for _ in range(2))

    assert repeatable(first.metrics) == repeatable(second.metrics)
    assert first.series["coverage"].tolist() == second.series["coverage"].tolist()


@pytest.mark.parametrize("name", ["stock", "all"])
def test_speculation_runs_and_depends_on_the_seed_alone(name: str, options: RunOptions) -> None:
    engine = replace(options.engine, spec_window=4)
    seeds = [replace(options, engine=engine, seed=seed) for seed in (1, 1, 2)]

    first, again, other = (run(name, o).metrics for o in seeds)

    assert repeatable(first) == repeatable(again)
    assert repeatable(first) != repeatable(other)
    assert first["decode_tokens"] == other["decode_tokens"]
    plain = run(name, options).metrics
    assert first["steps"] < plain["steps"]


def test_jittered_prefixes_end_off_page_boundaries(options: RunOptions) -> None:
    plain = run("placement+reservation", options).metrics
    jittered = run("placement+reservation", replace(options, prefix_jitter=7)).metrics
    again = run("placement+reservation", replace(options, prefix_jitter=7)).metrics

    assert repeatable(jittered) == repeatable(again)
    assert jittered["page_coverage_mean"] < plain["page_coverage_mean"]
    assert jittered["requests_finished"] == 40


def test_case_73_a_prompt_larger_than_the_pool_is_rejected_at_arrival_and_the_run_ends(
    tmp_path: Path,
) -> None:
    rows = [
        {"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]},
        {"timestamp": 1, "input_length": 9000, "output_length": 3, "hash_ids": list(range(18))},
        {"timestamp": 2, "input_length": 200, "output_length": 3, "hash_ids": [2]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    options = RunOptions(TraceOptions(path=path), EngineOptions(pool_slots=8209, context=16_384))

    metrics = ArmRun(built_in("default", page=64), options).run().metrics

    assert (metrics["requests_finished"], metrics["requests_rejected"]) == (2, 1)
    assert metrics["decode_tokens"] == 6


def test_steps_are_kept_for_a_trace_only_when_asked_for(options: RunOptions) -> None:
    assert run("stock", options).slices == ()

    result = run("stock", replace(options, slices=True))

    assert len(result.slices) == result.metrics["steps"]
    assert {s.name for s in result.slices} >= {"prefill", "decode"}
    ends = [s.start_us + s.duration_us for s in result.slices]
    starts = [s.start_us for s in result.slices]
    assert starts[1:] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(result.metrics["simulated_s"] * 1e6)


def test_progress_rises_to_the_number_of_requests(options: RunOptions) -> None:
    seen: list[int] = []

    ArmRun(built_in("stock", page=PAGE), options).run(seen.append)

    assert seen == sorted(seen)
    assert seen[-1] == 40


def test_an_idle_engine_is_not_sampled(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 40, "output_length": 9, "hash_ids": [t]} for t in
            (0, 3_600_000)]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    options = RunOptions(TraceOptions(path=path), EngineOptions(pool_slots=4096), sample_every=1)

    result = ArmRun(built_in("stock", page=64), options).run()

    assert result.metrics["simulated_s"] > 3600
    assert result.series["running"].tolist() == [1.0] * len(result.series["running"])
