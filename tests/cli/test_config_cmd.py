"""`kvdefrag config show` and `check`, as a user runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvdefrag import __version__
from kvdefrag.cli import main
from kvdefrag.cli.app import build_app
from kvdefrag.config import Config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVDEFRAG_")]:
        monkeypatch.delenv(name)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["kvdefrag", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_show_prints_each_setting_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("page: 32\n", encoding="utf-8")
    monkeypatch.setenv("KVDEFRAG_PLACEMENT__FREE_LIST", "fifo")

    result = CliRunner().invoke(build_app(), ["config", "show", "--config", str(path)])

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert f"page: 32  # {path}" in lines
    assert "  free_list: fifo  # KVDEFRAG_PLACEMENT__FREE_LIST" in lines
    assert "  bytes_per_step: 64MiB  # default" in lines


def test_show_prints_yaml_that_can_be_used_as_a_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(build_app(), ["config", "show"])

    assert Config(**yaml.safe_load(result.stdout)) == Config()


def test_check_accepts_a_good_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "config.yaml"

    assert run_main(monkeypatch, "config", "check", path) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"


def test_check_judges_the_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDEFRAG_NONSENSE", "1")

    assert run_main(monkeypatch, "config", "check", ROOT / "config.yaml") == 0


def test_check_refuses_a_bad_file_in_one_line_each_and_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("pgae: 32\nenabled: 7\n", encoding="utf-8")

    code = run_main(monkeypatch, "config", "check", path)

    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == ""
    assert captured.err.startswith("kvdefrag: enabled: 7 ")
    assert "did you mean page?" in captured.err
    assert "Traceback" not in captured.err


def test_check_refuses_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "config", "check", tmp_path / "missing.yaml") == 1
    assert "cannot be read" in capsys.readouterr().err


def test_version_is_printed() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])

    assert (result.exit_code, result.stdout) == (0, f"kvdefrag {__version__}\n")


def test_a_command_whose_module_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdefrag.cli.app._COMMANDS", ("no_such",))

    result = CliRunner().invoke(build_app(), ["no_such"])

    assert result.exit_code == 2
