"""Options of a run: how they are shown, and that they travel to other processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.options import RunOptions, TraceOptions
from kvdefrag.sim.readers import Selection


def options(**changes: object) -> RunOptions:
    return RunOptions(TraceOptions(), EngineOptions(pool_slots=1000), **changes)  # type: ignore[arg-type]


def test_options_are_shown_by_the_names_of_the_command_line() -> None:
    selection = Selection(start=3, limit=20, window=(10.0, 600.5), rate_scale=2.0)
    run = RunOptions(
        TraceOptions(selection=selection),
        EngineOptions(pool_slots=1000, max_running=7, spec_window=4, page=32),
        prefix_jitter=9,
        profile=Path("mine.json"),
        seed=11,
    )

    shown = run.as_dict()

    expected = {
        "pool_slots": 1000,
        "max_running": 7,
        "spec_window": 4,
        "page": 32,
        "start": 3,
        "limit": 20,
        "window": "10:600.5",
        "rate_scale": 2.0,
        "prefix_jitter": 9,
        "profile": "mine.json",
        "seed": 11,
    }
    assert {key: shown[key] for key in expected} == expected


def test_what_is_not_given_is_shown_as_none() -> None:
    shown = options().as_dict()

    assert (shown["limit"], shown["window"], shown["profile"]) == (None, None, None)


def test_recording_and_tracing_are_no_options_that_shape_the_numbers() -> None:
    assert options(slices=True, record=Path("x")).as_dict() == options().as_dict()


def test_options_travel_to_another_process() -> None:
    run = options(seed=3)

    assert pickle.loads(pickle.dumps(run)) == run


def test_the_embedded_slice_is_the_trace_without_a_path() -> None:
    source = TraceOptions().open()

    assert (source.rows, source.format) == (1200, "mooncake")


def test_a_trace_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        TraceOptions(path=tmp_path / "missing").open()
    with pytest.raises(ConfigError, match="--format 'parquet' is not one of"):
        TraceOptions(path=tmp_path / "missing", format="parquet").open()


@pytest.mark.parametrize("name", ["pool_slots", "max_running", "spec_window"])
def test_sizes_of_the_engine_are_checked_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: -1 is not allowed"):
        EngineOptions(**{"pool_slots": 1000, name: -1})
