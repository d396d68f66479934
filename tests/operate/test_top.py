"""What `kvdefrag top` shows."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from kvdefrag.cli import top_cmd
from kvdefrag.cli.app import build_app
from kvdefrag.operate.glance import Glance, lines_of

STATE: dict[str, Any] = {
    "active": True,
    "description": "kvdefrag 0.1.0 active: sglang 0.5.23",
    "error": None,
    "size": 6399,
    "page": 64,
    "steps": 1000,
    "seconds": 0.005,
    "reason": "not due",
    "backoff_steps": 3,
    "moved_rows": 640,
    "moved_bytes": 640 << 10,
    "moved_by": {"tenure": 640},
    "skips": {"not due": 900, "no trigger": 90, "backing off": 9},
    "gates_closed": {"beam search": 2},
    "tokens": 3200,
    "runs": 50,
    "coverage": 0.875,
    "whole_free_pages": 25,
    "reserved_slots": 640,
    "available": 2559,
    "control": {"paused": True, "commands": []},
}


def test_one_glance() -> None:
    assert lines_of("http://here", Glance(5.0, [STATE]), None) == [
        "kvdefrag at http://here",
        "",
        "active           kvdefrag 0.1.0 active: sglang 0.5.23, paused",
        "pool             6,399 slots: 3,200 hold tokens, 640 reserved, 2,559 free",
        "                 [####################++++......==========]  "
        "# tokens  + reserved  . free in pieces  = whole free pages",
        "page coverage    87.5 %  3,200 tokens in 50 runs, 64.0 to a run",
        "whole free pages 25 of 99",
        "moved            640 rows, 655,360 bytes (tenure 640)",
        "steps            1,000, 5.0 us of host time each",
        "now              not due, back-off 3 steps",
        "skipped          not due 900; no trigger 90; backing off 9",
        "gates closed     beam search 2",
        "errors           none",
    ]


def test_a_second_glance_shows_rates() -> None:
    later = STATE | {
        "steps": 1500,
        "seconds": 0.0085,
        "moved_rows": 1640,
        "moved_bytes": 1640 << 10,
    }
    shown = lines_of("x", Glance(7.0, [later]), Glance(5.0, [STATE]))

    assert (
        "moved            1,640 (+500/s) rows, 1,679,360 (+512,000/s) bytes (tenure 640)" in shown
    )
    assert "steps            1,500 (+250/s), 7.0 us of host time each" in shown


def test_every_rank_is_shown_and_one_that_is_off_says_why() -> None:
    shown = lines_of(
        "x", Glance(0.0, [STATE, {"active": False, "refused": "--pp-size 2: y"}]), None
    )

    assert "data-parallel rank 1" in shown
    assert shown[-1] == "not active       --pp-size 2: y"


def test_a_server_that_has_measured_nothing_yet_is_shown_too() -> None:
    bare: dict[str, Any] = dict.fromkeys(STATE) | {
        "active": True,
        "size": 0,
        "page": 64,
        "steps": 0,
    }
    bare |= {"available": 0, "reserved_slots": 0, "moved_rows": 0, "moved_bytes": 0, "seconds": 0}
    shown = lines_of("x", Glance(0.0, [bare]), None)

    assert any("unknown" in line for line in shown)


def test_sglangs_own_figures_are_shown_where_metrics_are_on(stand_in: Any) -> None:
    stand_in.shows(**STATE)
    stand_in.exported = (
        "# HELP sglang:num_running_reqs x\n"
        'sglang:num_running_reqs{dp_rank="0"} 3.0\n'
        'sglang:num_running_reqs{dp_rank="1"} 4.0\n'
        'sglang:gen_throughput{dp_rank="0"} 1234.5\n'
    )
    found = CliRunner().invoke(build_app(), ["top", "--url", stand_in.url, "--once"])

    assert found.stdout.startswith(f"kvdefrag at {stand_in.url}: 7 running, 1,234 tokens/s\n")


def test_once_prints_and_leaves(stand_in: Any) -> None:
    stand_in.shows(**STATE)
    found = CliRunner().invoke(build_app(), ["top", "--url", stand_in.url, "--once"])

    assert found.exit_code == 0
    assert "whole free pages 25 of 99" in found.stdout


def test_it_goes_on_until_it_is_interrupted_with_and_without_rich(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.shows(**STATE)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) % 2 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(top_cmd.time, "sleep", nap)
    top_cmd.top(stand_in.url, every=0.5)
    assert "+0/s" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "rich.live", None)
    top_cmd.top(stand_in.url, every=0.5)
    assert capsys.readouterr().out.count("kvdefrag at") == 2
    assert naps == [0.5] * 4
