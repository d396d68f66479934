"""The whole server with nothing but the package installed and one variable set."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.children("stock", "engine")
def test_the_server_loads_the_plugin_by_its_entry_point_and_shows_its_state(children: Any) -> None:
    stock = children.served("stock", "llama-overlap")
    found = children.served("engine", "engine")

    assert found["outputs"] == stock["outputs"]
    (state,) = found["states"]
    assert state["active"]
    assert state["error"] is None
    assert state["mode"] == "threshold"
    assert state["steps"] > 20
