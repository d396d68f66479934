"""The page on operation against a whole server with its HTTP front end, keys and load."""

from __future__ import annotations

from typing import Any

import pytest
from harness.pages import PAGE, comparable, transcripts
from harness.served import FILES

DOCUMENTED = list(transcripts(PAGE.read_text(encoding="utf-8"), "server"))


@pytest.mark.children("operated")
@pytest.mark.parametrize("at", range(len(DOCUMENTED)), ids=[c for c, _ in DOCUMENTED])
def test_a_documented_command_prints_what_the_page_says(children: Any, at: int) -> None:
    command, lines = DOCUMENTED[at]
    ran = children.served("operated", "documented")["ran"][at]

    assert ran["command"] == command
    printed = (ran["err"] + ran["out"]).splitlines()
    assert comparable(printed) == comparable(lines)


@pytest.mark.children("operated")
def test_exit_codes_tell_what_was_done(children: Any) -> None:
    ran = children.served("operated", "documented")["ran"]
    wrong = [r["command"] for r in ran if r["code"] != 0]

    refused = ("wrong.yaml", "restart.yaml", "--admin-key guessed", "--page-size 64")
    paused = [r for r in ran if "paused: resume first" in r["err"]]
    assert len(paused) == 1
    assert len(wrong) == len(refused) + 1
    assert all(any(word in command for command in wrong) for word in refused)


@pytest.mark.children("operated")
def test_the_server_is_as_it_was_told_to_be(children: Any) -> None:
    found = children.served("operated", "documented")
    (state,) = found["states"]

    assert (state["active"], state["error"], state["mode"]) == (True, None, "threshold")
    assert state["control"]["paused"] is False
    ids = [command["action"] for command in state["control"]["commands"]]
    assert ids.count("pause") == 1
    moves = [c for c in state["control"]["commands"] if c["action"] == "compact"]
    assert any(c["status"] == "done" and c["rows"] > 0 for c in moves if not c["dry_run"])


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = {command: lines for command, lines in DOCUMENTED if command.startswith("cat ")}

    assert {f"cat {name}" for name in FILES} == set(shown)
