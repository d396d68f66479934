"""The whole server with nothing but the package installed and one variable set."""

from __future__ import annotations

from typing import Any

import pytest
from harness.jobs import REFUSED

from kvdefrag.metrics.prometheus import GAUGES


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
    assert state["seconds"] > 0
    assert sum(state["skips"].values()) > 20
    assert state["moved_rows"] == sum(state["moved_by"].values())
    assert state["recording"] is None


@pytest.mark.children("engine")
def test_its_metrics_are_exported_beside_sglangs_with_the_same_labels(children: Any) -> None:
    found = children.served("engine", "engine")
    samples = [s for s in found["exported"] if s["name"].startswith("kvdefrag:")]
    theirs = [s for s in found["exported"] if s["name"].startswith("sglang:")]
    (state,) = found["states"]

    values = {s["name"]: s["value"] for s in samples}
    gauges = {f"kvdefrag:{name}" for name in GAUGES}
    counters = {f"kvdefrag:{name}_total" for name in ("steps", "skips", "errors", "step_seconds")}
    assert gauges | counters <= set(values)
    assert values["kvdefrag:active"] == 1
    assert values["kvdefrag:errors_total"] == 0
    assert values["kvdefrag:step_seconds_total"] > 0
    steps = sum(s["value"] for s in samples if s["name"] == "kvdefrag:steps_total")
    # Told every fifth step; an idle loop has gone on since the state was asked for.
    assert steps >= state["steps"] - 5
    own = {"mechanism", "reason", "gate", "pid"}
    labels = {
        tuple(sorted((k, v) for k, v in s["labels"].items() if k not in own)) for s in samples
    }
    assert labels == {tuple(sorted(s["labels"].items())) for s in theirs}


@pytest.mark.children("stock", "refused")
@pytest.mark.parametrize(("key", "said"), REFUSED.items())
def test_a_server_that_is_refused_serves_as_stock_and_says_why(
    children: Any, key: str, said: str
) -> None:
    stock = children.served("stock", "llama-chunked")
    found = children.served("refused", key)

    assert found["outputs"] == stock["outputs"]
    assert found["attached"] is None
    assert found["left"] == 0
    assert found["shown"]["active"] is False
    assert found["shown"]["refused"].startswith(said)
