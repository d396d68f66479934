"""The dashboard in `docs/` asks for metrics and labels that are exported, and for all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvdefrag.metrics.prometheus import COUNTERS, GAUGES

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8")
)
NAME = re.compile(r"kvdefrag:\w+")
GROUPED = re.compile(r"by \((\w+)\) \((?:rate\()?(kvdefrag:\w+)")


def panels() -> list[dict[str, Any]]:
    return list(DASHBOARD["panels"])


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def exported() -> dict[str, str]:
    """Return every exported name with its own label."""
    found = {f"kvdefrag:{name}_total": described.label for name, described in COUNTERS.items()}
    return found | {f"kvdefrag:{name}": described.label for name, described in GAUGES.items()}


def test_every_metric_on_it_is_exported_and_every_exported_one_is_on_it() -> None:
    used = {name for expression in expressions() for name in NAME.findall(expression)}

    assert used == set(exported())


@pytest.mark.parametrize("expression", expressions())
def test_counters_are_rated_and_labels_exist(expression: str) -> None:
    for name in NAME.findall(expression):
        if name.endswith("_total") and name != "kvdefrag:errors_total":
            assert f"rate({name}" in expression
        else:
            assert f"rate({name}" not in expression
    for label, name in GROUPED.findall(expression):
        assert exported()[name] == label
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    assert len({panel["title"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells
        assert panel["description"]


def test_the_model_is_chosen_among_those_that_export() -> None:
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]

    assert names == ["datasource", "model"]
    assert all('model_name=~"$model"' in expression for expression in expressions())
