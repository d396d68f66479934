"""Ranks decide alike: two processes that are given the same requests plan the same moves."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.children("first replica", "second replica")
@pytest.mark.parametrize("case", ["llama-retract-overlap", "eagle-topk-4"])
def test_case_63_two_replicas_make_the_same_plans(children: Any, case: str) -> None:
    first = children.served("first replica", case)
    second = children.served("second replica", case)

    assert first["moved"] > 100
    assert first["plans"] == second["plans"]
    assert first["outputs"] == second["outputs"]
    assert second["seconds"] > first["seconds"] or second["iterations"] == first["iterations"]
