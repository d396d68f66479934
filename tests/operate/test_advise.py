"""What `kvdefrag advise` says of a recording."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvdefrag.cli.app import build_app
from kvdefrag.config import load_config
from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.operate.advice import settings_for
from kvdefrag.operate.server import ServerError
from kvdefrag.sim.arms import NAMES, built_in

SMALL = ("--limit", "6", "--pool-slots", "120000", "--max-running", "8")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), list(map(str, arguments)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of six requests."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    assert invoke("simulate", *SMALL, "--arms", "stock", "--record", path).exit_code == 0
    return path


def test_policies_are_ranked_and_the_cheapest_good_one_is_suggested(
    recorded: Path, tmp_path: Path
) -> None:
    out = tmp_path / "config.yaml"
    found = invoke("advise", recorded, "--out", out)

    assert found.exit_code == 0, found.output
    rows = [line.split() for line in found.stdout.splitlines()]
    ranked = [(row[0], float(row[1])) for row in rows if len(row) == 6 and row[0] in NAMES]
    assert {name for name, _ in ranked} == set(NAMES) - {"packed"}
    assert [c for _, c in ranked] == sorted((c for _, c in ranked), reverse=True)
    chosen = next(line.split()[1].rstrip(":") for line in found.stdout.splitlines()
                  if line.startswith("use "))  # fmt: skip
    coverage = dict(ranked)
    assert coverage[chosen] >= ranked[0][1] - 1.01
    assert f"the policy '{chosen}'" in out.read_text()
    assert invoke("config", "check", out).exit_code == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "packed"])
def test_the_suggested_settings_are_those_of_the_arm(name: str, tmp_path: Path) -> None:
    arm, path = built_in(name, page=32), tmp_path / "config.yaml"
    path.write_text(settings_for(arm))
    config = load_config(path, {})

    assert config.enabled == (name != "stock")
    if name != "stock":
        kept = {"checks", "bytes_per_step", "duty_bytes_per_step"}
        for section in ("placement", "relocation"):
            mine, its = (getattr(c, section).model_dump() for c in (config, arm.config))
            assert {k for k in mine if mine[k] != its[k]} <= kept
        assert config.placement.checks == "lenient"
        assert config.relocation.bytes_per_step == 64 << 20


def test_a_policy_of_ones_own_takes_part(recorded: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("placement:\n  reservation: false\n")

    assert "\nmine " in invoke("advise", recorded, "--config", mine).stdout


def test_a_recording_without_decode_says_so(recorded: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    lines = recorded.read_text().splitlines(keepends=True)
    short.write_text("".join(lines[:2]))

    found = invoke("advise", short)
    assert isinstance(found.exception, TraceError)
    assert "too short" in str(found.exception)


@pytest.mark.parametrize("arguments", [(), ("x.jsonl", "--url", "localhost:1")])
def test_one_source_is_wanted(arguments: tuple[str, ...]) -> None:
    found = invoke("advise", *arguments)

    assert isinstance(found.exception, ConfigError)
    assert "give one of them" in str(found.exception)


def test_a_live_server_records_and_its_file_is_read(
    stand_in: Any, recorded: Path, tmp_path: Path
) -> None:
    path = tmp_path / "live.jsonl"
    control: dict[str, Any] = {"paused": False, "commands": []}
    stand_in.shows(active=True, control=control)

    def record(command: dict[str, Any]) -> list[bool]:
        shutil.copy(recorded, path)
        control["commands"] = [command | {"status": "done", "path": str(path)}]
        return [True]

    stand_in.on_command = record
    found = invoke("advise", "--url", stand_in.url, "--seconds", "0.5")
    assert found.exit_code == 0, found.output
    assert "\nuse " in found.stdout
    assert stand_in.commands[0]["seconds"] == 0.5
    path.unlink()
    stand_in.on_command = lambda command: [
        control.update(commands=[command | {"status": "done", "path": str(path)}]) is None
    ]
    found = invoke("advise", "--url", stand_in.url)
    assert isinstance(found.exception, ServerError)
    assert "copy it here" in str(found.exception)
