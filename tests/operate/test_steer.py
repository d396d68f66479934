"""`kvdefrag compact`, `pause`, `resume` and `reload` against a server of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvdefrag.cli import main
from kvdefrag.operate import steer

BEFORE = {"tokens": 4096, "runs": 400, "coverage": 0.25, "whole_free_pages": 3}
AFTER = {"tokens": 4096, "runs": 64, "coverage": 0.9375, "whole_free_pages": 2}


class Operated:
    """A server that serves every command at once.

    Args:
        stand_in: The server.
        ranks: Data-parallel ranks.
        facts: Added to the answer of each.
    """

    def __init__(self, stand_in: Any, *, ranks: int = 1, **facts: Any) -> None:
        self.commands = stand_in.commands
        control: dict[str, Any] = {"paused": False, "commands": []}
        state = {"active": True, "control": control}
        stand_in.info["internal_states"] = [{"kvdefrag": state} for _ in range(ranks)]

        def serve(command: dict[str, Any]) -> list[bool]:
            answer = {"status": "done", "active_from": 7} | command | facts
            control["commands"] = [answer]
            return [answer["status"] == "done"] * ranks

        stand_in.on_command = serve


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    monkeypatch.setattr("sys.argv", ["kvdefrag", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_a_dry_run_says_what_would_move_and_what_for(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Operated(stand_in, rows=3072, bytes=3 << 20, before=BEFORE, after=AFTER)

    assert run(monkeypatch, "compact", "--url", stand_in.url, "--dry-run", "--rows", 4000) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tenure would move 3,072 rows, 3,145,728 bytes",
        "                        before       after",
        "page coverage            0.250       0.938",
        "runs                       400          64",
        "whole free pages             3           2",
        "tokens                   4,096       4,096",
    ]
    (command,) = made.commands
    assert (command["dry_run"], command["rows"], command["how"]) == (True, 4000, "tenure")


def test_every_rank_is_told_of(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Operated(stand_in, ranks=2, rows=0, bytes=0, before=BEFORE, after=BEFORE)

    assert run(monkeypatch, "compact", "--url", stand_in.url, "--how", "lower") == 0
    out = capsys.readouterr().out
    assert "rank 0: lower moved 0 rows" in out
    assert "rank 1: lower moved 0 rows" in out


@pytest.mark.parametrize(("action", "said"), [("pause", "paused"), ("resume", "resumed")])
def test_pause_and_resume_say_from_when(
    stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: str,
    said: str,
) -> None:
    Operated(stand_in)

    assert run(monkeypatch, action, "--url", stand_in.url) == 0
    assert capsys.readouterr().out == f"{said}, active from step 7\n"


def test_a_reload_sends_the_content_of_the_file(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Operated(stand_in)
    file = tmp_path / "policy.yaml"
    file.write_text("relocation:\n  mode: off\n  bytes_per_step: 2MiB\n")

    assert run(monkeypatch, "reload", file, "--url", stand_in.url, "--after-steps", 9) == 0
    (command,) = made.commands
    assert command["settings"] == {"relocation": {"mode": "off", "bytes_per_step": "2MiB"}}
    assert command["after_steps"] == 9


def test_a_bad_file_is_not_even_sent(
    stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    made = Operated(stand_in)
    file = tmp_path / "policy.yaml"
    file.write_text("relocation:\n  mode: sometimes\n")

    assert run(monkeypatch, "reload", file, "--url", stand_in.url) == 1
    assert "relocation.mode: sometimes" in capsys.readouterr().err
    assert made.commands == []


def test_a_gathering_needs_a_request(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "compact", "--url", stand_in.url, "--how", "gather") == 1
    assert "a gathering needs the id of a request" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "kvdefrag is not loaded there"),
        ({"active": True, "control": None}, "KVDEFRAG_CONTROL__ENABLED=1"),
        ({"active": False, "refused": "--pp-size 2: x"}, "not active there: --pp-size 2"),
    ],
)
def test_why_nothing_can_be_asked_is_said(
    stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: Any,
    said: str,
) -> None:
    if state:
        stand_in.shows(**state)

    assert run(monkeypatch, "pause", "--url", stand_in.url) == 1
    assert said in capsys.readouterr().err


def test_a_refusal_is_passed_on(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Operated(stand_in, status="refused", said="paused: resume first")

    assert run(monkeypatch, "compact", "--url", stand_in.url) == 1
    assert capsys.readouterr().err == "kvdefrag: refused: paused: resume first\n"


def test_without_the_key_nothing_is_answered(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Operated(stand_in)
    stand_in.admin_key = "secret"

    assert run(monkeypatch, "pause", "--url", stand_in.url) == 1
    assert "/set_internal_state: refused (401)" in capsys.readouterr().err
    assert made.commands == []
    assert run(monkeypatch, "pause", "--url", stand_in.url, "--admin-key", "secret") == 0
    stand_in.admin_key, stand_in.api_key = None, "other"
    assert run(monkeypatch, "pause", "--url", stand_in.url, "--api-key", "other") == 0


def test_a_server_that_does_not_come_to_an_end_is_not_waited_for(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Operated(stand_in, status="waiting")
    monkeypatch.setattr(steer, "_EVERY_S", 0.01)
    taken = stand_in.on_command

    stand_in.on_command = lambda command: [not taken(command)[0]]
    assert run(monkeypatch, "compact", "--url", stand_in.url, "--wait", 0.05) == 1
    assert "is not done after 0.05 s" in capsys.readouterr().err
    stand_in.on_command = lambda command: [False]
    assert run(monkeypatch, "pause", "--url", stand_in.url) == 1
    assert "does not know this command" in capsys.readouterr().err
