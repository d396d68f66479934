"""Outputs stay the same token for token, whatever moves, under SGLang's own checks and ours."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from harness.cases import BY_NAME
from harness.jobs import LONG, SOME, cases

NAMES = [case.name for case in cases()]
SUBSET = NAMES if LONG else SOME


def differences(case: str, wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the requests whose tokens differ; an aborted one may be cut elsewhere."""
    aborted = BY_NAME[case].workload.aborted
    assert wanted["outputs"].keys() == found["outputs"].keys()
    wrong = []
    for rid, tokens in wanted["outputs"].items():
        other = found["outputs"][rid]
        length = min(len(tokens), len(other)) if rid in aborted else None
        if tokens[:length] != other[:length]:
            wrong.append(rid)
    return wrong


@pytest.mark.children("stock")
@pytest.mark.parametrize("case", NAMES)
def test_stock_serves_every_request_in_full_and_our_checks_are_silent(
    children: Any, case: str
) -> None:
    stock = children.served("stock", case)

    asked = {a.rid: a.count for a in BY_NAME[case].workload.asks}
    aborted = BY_NAME[case].workload.aborted
    for rid, tokens in stock["outputs"].items():
        assert rid in aborted or len(tokens) == asked[rid.removeprefix("again-")]
    assert stock["attached"] is None
    assert bool(stock["retractions"]) == ("retract" in case)
    assert bool(stock["cached"]) == ("no-tree" not in case and "sessions" not in case) or (
        "sessions" in case
    )


@pytest.mark.children("stock")
@pytest.mark.parametrize("case", [case.name for case in cases() if case.draft])
def test_drafts_are_accepted_often_enough_to_matter(children: Any, case: str) -> None:
    stock = children.served("stock", case)

    tokens = sum(len(tokens) for tokens in stock["outputs"].values())
    assert tokens > 1.25 * stock["verified"] > 0


@pytest.mark.children("stock")
@pytest.mark.parametrize("case", [case.name for case in cases() if case.workload.aborts])
def test_aborts_come_amid_the_requests(children: Any, case: str) -> None:
    stock = children.served("stock", case)

    wanted = {a.rid: a.count for a in BY_NAME[case].workload.asks}
    cut = [r for r in BY_NAME[case].workload.aborted if len(stock["outputs"][r]) < wanted[r]]
    assert len(cut) > 1


@pytest.mark.children("stock", "on")
@pytest.mark.parametrize("case", SUBSET)
def test_outputs_are_the_same_with_the_plugin_on(children: Any, case: str) -> None:
    stock, on = children.served("stock", case), children.served("on", case)

    assert differences(case, stock, on) == []
    assert_healthy(case, stock, on)


@pytest.mark.children("stock", "chaos")
@pytest.mark.parametrize("case", NAMES)
def test_outputs_are_the_same_with_a_random_relocation_at_every_step(
    children: Any, case: str
) -> None:
    stock, chaos = children.served("stock", case), children.served("chaos", case)

    assert differences(case, stock, chaos) == []
    assert_healthy(case, stock, chaos)
    assert chaos["moved"] > 0


@pytest.mark.children("stock", "chaos in pages of 64")
@pytest.mark.parametrize("case", SUBSET)
def test_outputs_are_the_same_with_random_relocation_in_pages_of_64(
    children: Any, case: str
) -> None:
    stock, chaos = children.served("stock", case), children.served("chaos in pages of 64", case)

    assert differences(case, stock, chaos) == []
    assert_healthy(case, stock, chaos)


@pytest.mark.children("chaos")
def test_chaos_chose_every_mechanism_often_and_moved_thousands_of_rows(children: Any) -> None:
    results = [children.served("chaos", case) for case in NAMES]

    chosen = sum((Counter(r["chosen"]) for r in results), Counter())
    assert {name for name, times in chosen.items() if times > 50} == {
        "tenure",
        "evacuation",
        "gather",
        "lower",
        "idle",
    }
    assert sum(r["moved"] for r in results) > 5_000
    assert sum(r["watched_rows"] for r in results) > 500_000


def assert_healthy(case: str, stock: dict[str, Any], found: dict[str, Any]) -> None:
    """Assert that the plugin was attached all the time, and that nothing leaked."""
    assert found["attached"] == "KvdefragAllocator"
    assert found["state"]["active"]
    assert found["state"]["error"] is None
    assert found["state"]["moved_rows"] == found["moved"]
    assert found["state"]["reserved_slots"] == 0
    assert found["left"] == stock["left"]
    assert found["watched_rows"] > 0
    assert bool(found["retractions"]) == ("retract" in case)
