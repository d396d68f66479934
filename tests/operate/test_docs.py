"""The commands on the page on operation that need no server print what the page says."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvdefrag.cli.app import build_app
from tests.adapter.harness.pages import PAGE, transcripts

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_commands_print_what_the_page_says(tmp_path: Path) -> None:
    found = list(transcripts(TEXT, ""))
    assert found

    for command, lines in found:
        command, _, target = command.partition(" > ")
        words = shlex.split(command)
        assert words[0] == "kvdefrag"
        done = subprocess.run(
            [sys.executable, "-m", "kvdefrag", *words[1:]],
            cwd=tmp_path,
            env=os.environ | {"COLUMNS": "160"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if target:
            (tmp_path / target).write_text(done.stdout)
            assert lines == []
        else:
            printed = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
            assert printed == lines


def test_every_command_that_steers_is_on_the_page_and_every_option_exists() -> None:
    from typer.main import get_command

    known = get_command(build_app()).commands  # type: ignore[attr-defined]
    used = [
        shlex.split(command) for kind in ("", "server") for command, _ in transcripts(TEXT, kind)
    ]
    used = [words for words in used if words[0] == "kvdefrag"]

    assert {words[1] for words in used} >= {
        *("doctor", "top", "compact", "pause", "resume", "reload", "advise")
    }
    for words in used:
        if words[1] != "config":
            options = {o for parameter in known[words[1]].params for o in parameter.opts}
            assert {word for word in words if word.startswith("--") and " " not in word} <= options


@pytest.mark.parametrize("link", ["metrics.md", "compatibility.md", "grafana-dashboard.json"])
def test_what_the_page_points_to_exists(link: str) -> None:
    assert f"({link})" in TEXT
    assert (PAGE.parent / link).exists()
