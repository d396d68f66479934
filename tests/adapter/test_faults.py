"""An exception at any point of our step leaves a server that goes on, as stock."""

from __future__ import annotations

from typing import Any

import pytest
from harness.injections import POINTS
from harness.jobs import case_of


@pytest.mark.children("stock", "injected")
@pytest.mark.parametrize("point", POINTS)
def test_the_server_goes_on_after_a_fault_in(children: Any, point: str) -> None:
    stock = children.served("stock", case_of(point))
    found = children.served("injected", point)

    assert found["outputs"] == stock["outputs"]
    assert found["left"] == 0
    assert not found["state"]["active"]
    assert found["state"]["error"].startswith("Planted")
    assert found["state"]["steps"] < found["iterations"]
