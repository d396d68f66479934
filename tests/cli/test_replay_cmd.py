"""`kvdefrag replay`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvdefrag.cli.app import build_app
from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.sim.metrics import repeatable

SMALL = ("--limit", "6", "--pool-slots", "120000", "--max-running", "8")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), list(map(str, arguments)))


@pytest.fixture(scope="module", params=["log.jsonl", "log.jsonl.gz"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of six requests of the embedded slice under the stock policy, and its figures."""
    path = tmp_path_factory.mktemp("log") / str(request.param)
    json_path = path.parent / "direct.json"
    result = invoke("simulate", *SMALL, "--arms", "stock", "--record", path, "--json", json_path)
    assert result.exit_code == 0, result.output
    return path


def test_the_recorded_policy_replays_to_its_own_figures(recorded: Path, tmp_path: Path) -> None:
    out, html = tmp_path / "out" / "r.json", tmp_path / "out" / "r.html"

    result = invoke(
        "replay", recorded, "--arms", "stock,placement+reservation", "--json", out, "--html", html
    )

    assert result.exit_code == 0, result.output
    direct = json.loads((recorded.parent / "direct.json").read_text(encoding="utf-8"))
    again = json.loads(out.read_text(encoding="utf-8"))
    names = [arm["name"] for arm in again["arms"]]
    assert names == ["stock", "placement+reservation"]
    metrics = again["arms"][0]["metrics"]
    assert repeatable(metrics) == repeatable(direct["arms"][0]["metrics"])
    assert again["arms"][1]["metrics"]["page_coverage_mean"] > metrics["page_coverage_mean"]
    assert again["trace"]["name"] == recorded.name
    assert html.read_text(encoding="utf-8").lower().startswith("<!doctype html>")


def test_the_table_is_that_of_a_simulation_with_what_a_replay_cannot_know(recorded: Path) -> None:
    result = invoke("replay", recorded, "--arms", "stock,packed")

    lines = result.output.splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in ("stock", "packed"))
    assert "those of the recorded run (stock)" in " ".join(result.output.split())


def test_a_policy_file_and_another_page_can_be_tried(recorded: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "mine.yaml", tmp_path / "r.json"
    config.write_text("page: 128\n", encoding="utf-8")

    result = invoke(
        "replay", recorded, "--arms", "stock", "--config", config, "--page", 128, "--json", out
    )

    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["options"]["page"] == 128
    assert [arm["name"] for arm in document["arms"]] == ["stock", "mine"]


def test_a_policy_file_for_another_page_is_refused(recorded: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("page: 128\n", encoding="utf-8")

    result = invoke("replay", recorded, "--config", config)

    assert isinstance(result.exception, ConfigError)
    assert "differs from --page 64" in str(result.exception)


def test_wrong_logs_are_refused_by_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"event":"header","version":1,"size":"many"}\n', encoding="ascii")

    result = invoke("replay", path)

    assert isinstance(result.exception, TraceError)
    assert str(result.exception).startswith("row 1, field 'size': ")


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = invoke("replay", tmp_path / "missing.jsonl")

    assert isinstance(result.exception, TraceError)
    assert "cannot read" in str(result.exception)


def test_an_unknown_arm_is_refused(recorded: Path) -> None:
    result = invoke("replay", recorded, "--arms", "stok")

    assert isinstance(result.exception, ConfigError)
    assert "'stok' is not one of" in str(result.exception)
