"""The tests are tested: each part of a move, left out, is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from harness.jobs import ONLY_NEW, ONLY_OLD, OVERSIGHTS, key_of, oversights
from harness.plants import PLANTS


@pytest.mark.children("stock", "planted")
@pytest.mark.parametrize(
    ("plant", "case", "watched", "said"),
    oversights(),
    ids=[key_of(plant, case, watched) for plant, case, watched, _ in oversights()],
)
def test_a_planted_fault_is_noticed(
    children: Any, plant: str, case: str, watched: bool, said: str | None
) -> None:
    found = children.result("planted", key_of(plant, case, watched))

    if said is not None:
        assert said in found.get("error", "nothing was said")
    else:
        stock = children.served("stock", case)
        assert "error" not in found
        assert found["outputs"] != stock["outputs"]


def test_every_plant_is_tried() -> None:
    assert {plant for plant, *_ in OVERSIGHTS + ONLY_OLD + ONLY_NEW} == set(PLANTS)
