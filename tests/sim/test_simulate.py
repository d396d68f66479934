"""All arms over one trace: the same for any number of processes, formats and equal seeds."""

from __future__ import annotations

import json
import math
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.sim.arms import built_in
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.metrics import repeatable, undocumented
from kvdefrag.sim.options import RunOptions, TraceOptions
from kvdefrag.sim.readers import Selection
from kvdefrag.sim.report import write_json
from kvdefrag.sim.results import RunResult
from kvdefrag.sim.simulate import request_count, simulate


def embedded(limit: int = 12, **changes: Any) -> RunOptions:
    return RunOptions(
        trace=TraceOptions(selection=Selection(limit=limit)),
        engine=EngineOptions(pool_slots=120_000, max_running=8),
        **changes,
    )


def arms(*names: str):
    return [built_in(name, page=64) for name in names]


def figures(result: RunResult) -> list[dict[str, float]]:
    return [repeatable(arm.metrics) for arm in result.arms]


def numbers(value: Any):
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, float):
        yield value
    elif not isinstance(value, str | int | None):
        for inner in value:
            yield from numbers(inner)


def test_the_result_does_not_depend_on_the_number_of_processes() -> None:
    chosen, seen = arms("stock", "all", "packed"), set()

    alone = simulate(chosen, embedded(3), processes=1)
    together = simulate(chosen, embedded(3), processes=2, progress=lambda *at: seen.add(at))

    assert figures(alone) == figures(together)
    assert (alone.trace, alone.options, alone.verdict, alone.warnings) == (
        together.trace,
        together.options,
        together.verdict,
        together.warnings,
    )
    for one, other in zip(alone.arms, together.arms, strict=True):
        assert one.series["coverage"].tolist() == other.series["coverage"].tolist()
        assert [m.owners.tolist() for m in one.maps] == [m.owners.tolist() for m in other.maps]
    assert {position for position, _ in seen} == {0, 1, 2}
    assert {done for _, done in seen} <= set(range(4))


@pytest.mark.parametrize(
    "error", [ConfigError("--page 3"), TraceError("missing", row=4, field="timestamp")]
)
def test_a_fault_travels_from_another_process_with_all_it_says(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_arms_serve_the_same_requests_and_keep_their_order() -> None:
    result = simulate(arms("packed", "stock", "default"), embedded())

    assert [arm.name for arm in result.arms] == ["packed", "stock", "default"]
    assert {arm.metrics["requests_finished"] for arm in result.arms} == {12}
    assert len({arm.metrics["decode_tokens"] for arm in result.arms}) == 1


def test_every_number_of_the_json_output_is_finite(tmp_path: Path) -> None:
    result = simulate(arms("stock", "default"), embedded(3))
    write_json(result, tmp_path / "out.json")

    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))

    assert all(undocumented(arm.metrics) == [] for arm in result.arms)
    assert None not in [v for arm in document["arms"] for v in arm["metrics"].values()]
    found = list(numbers(document))
    assert len(found) > 100
    assert all(math.isfinite(number) for number in found)


def test_the_result_names_its_trace_options_and_versions() -> None:
    result = simulate(arms("stock"), embedded(2, seed=5))

    assert result.trace["name"] == "mooncake_conversation_1200.jsonl"
    assert result.trace["requests"] == 1200
    assert len(str(result.trace["sha256"])) == 64
    assert (result.options["seed"], result.options["limit"]) == (5, 2)
    assert set(result.versions) == {"kvdefrag", "python", "torch", "numpy"}


def test_azure_rows_give_the_same_figures_in_vidur_s_format(tmp_path: Path) -> None:
    rng = random.Random(1)
    azure, vidur, ticks = ["TIMESTAMP,ContextTokens,GeneratedTokens"], [], 466_805_900
    vidur.append("arrived_at,num_prefill_tokens,num_decode_tokens")
    first = ticks
    for _ in range(40):
        prompt, output = rng.randint(1, 900), rng.randint(0, 120)
        seconds, fraction = divmod(ticks, 10**7)
        azure.append(f"2023-11-16 18:15:{seconds:02d}.{fraction:07d},{prompt},{output}")
        vidur.append(f"{(ticks - first) / 10**7!r},{prompt},{output}")
        ticks += rng.randint(0, 2 * 10**6)
    results = []
    for name, lines in (("azure", azure), ("vidur", vidur)):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(lines) + "\n", encoding="ascii")
        options = RunOptions(
            TraceOptions(path=path, format=name), EngineOptions(pool_slots=9000, context=4096)
        )
        results.append(simulate(arms("stock", "placement+reservation"), options))

    assert figures(results[0]) == figures(results[1])
    assert results[0].arms[0].metrics["requests_finished"] == 40


def ramp(tmp_path: Path) -> Path:
    """Small requests for ten minutes, then large ones a second apart."""
    rows = [(n * 1000, 30) for n in range(20)] + [(600_000 + n * 1000, 800) for n in range(20)]
    lines = [
        json.dumps(
            {
                "timestamp": at,
                "input_length": size,
                "output_length": 20,
                "hash_ids": [at * 10 + i for i in range(-(-size // 512))],
            }
        )
        for at, size in rows
    ]
    path = tmp_path / "ramp.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


@pytest.mark.parametrize(
    ("selection", "requests", "warned"),
    [
        (Selection(limit=20), 20, True),
        (Selection(start=20), 20, False),
        (Selection(window=(600.0, 610.0)), 10, False),
        (Selection(window=(0.0, 600.0)), 20, True),
    ],
)
def test_case_67_a_quiet_part_of_a_trace_is_warned_of_and_can_be_skipped(
    tmp_path: Path, selection: Selection, requests: int, warned: bool
) -> None:
    options = RunOptions(
        TraceOptions(path=ramp(tmp_path), selection=selection),
        EngineOptions(pool_slots=16_384, context=4096),
        sample_every=1,
    )

    result = simulate(arms("stock"), options)

    peak = result.arms[0].metrics["peak_utilization"]
    assert request_count(options) == result.arms[0].metrics["requests_finished"] == requests
    assert any("of the pool was ever used" in text for text in result.warnings) == warned
    assert (peak < 0.1) == warned


def test_a_higher_rate_brings_the_same_requests_sooner(tmp_path: Path) -> None:
    engine, trace = EngineOptions(pool_slots=16_384, context=4096), ramp(tmp_path)
    slow, fast = (
        simulate(
            arms("stock"),
            RunOptions(TraceOptions(path=trace, selection=Selection(rate_scale=rate)), engine),
        )
        .arms[0]
        .metrics
        for rate in (1.0, 10.0)
    )

    assert fast["decode_tokens"] == slow["decode_tokens"]
    assert fast["simulated_s"] < slow["simulated_s"] / 5


def test_a_selection_can_be_empty() -> None:
    options = replace(embedded(), trace=TraceOptions(selection=Selection(start=5000)))

    assert request_count(options) == 0
    result = simulate(arms("stock", "all"), options)
    assert result.arms[0].metrics["steps"] == 0
    assert all(math.isfinite(v) for arm in result.arms for v in arm.metrics.values())


def test_progress_comes_with_the_arm_s_position() -> None:
    seen: list[tuple[int, int]] = []

    simulate(arms("stock", "packed"), embedded(3), progress=lambda *at: seen.append(at))

    assert {position for position, _ in seen} == {0, 1}
    assert seen[-1] == (1, 3)


def test_a_wrong_row_of_the_trace_is_refused_by_row_and_field(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 4, "output_length": 1, "hash_ids": [1]}\n', encoding="ascii")

    with pytest.raises(TraceError, match="row 1, field 'timestamp'"):
        simulate(arms("stock"), replace(embedded(), trace=TraceOptions(path=path)))
