from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from kvdefrag.sim.metrics import METRICS
from kvdefrag.sim.report.json_out import schema, to_document, write_json

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def problems(value, rule, where="$"):
    """List where a value breaks the part of JSON Schema that our schema uses."""
    known = {"type", "const", "properties", "required", "additionalProperties", "items"}
    assert set(rule) <= known | {"description", "title", "$schema"}
    if "const" in rule and value != rule["const"]:
        yield f"{where}: not {rule['const']}"
    kinds = rule.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = [k for k in kinds if isinstance(value, TYPES[k])]
    if not fits or (isinstance(value, bool) and "boolean" not in kinds):
        yield f"{where}: not of {kinds}"
    elif isinstance(value, dict):
        yield from (
            f"{where}.{key}: missing" for key in rule.get("required", []) if key not in value
        )
        for key, inner in value.items():
            other = rule.get("additionalProperties", True)
            part = rule.get("properties", {}).get(key, other)
            if part is False:
                yield f"{where}.{key}: unknown"
            elif part is not True:
                yield from problems(inner, part, f"{where}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from problems(inner, rule.get("items", {}), f"{where}[{index}]")


def test_document_keeps_its_schema(make_result, tmp_path):
    write_json(make_result(), tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert list(problems(document, schema())) == []
    assert document["schema_version"] == 1
    assert document["trace"]["sha256"] == "ab" * 32
    assert document["seed"] == 0
    assert [arm["name"] for arm in document["arms"]][:2] == ["stock", "sorted"]
    assert document["arms"][0]["metrics"]["page_coverage_mean"] == 0.408


def test_the_checker_finds_what_breaks_the_schema(make_result):
    document = to_document(make_result())
    del document["trace"]["sha256"]
    document["arms"][0]["metrics"]["mean_rum"] = 1.0
    document["arms"][1]["series"]["coverage"][3] = "much"
    document["schema_version"] = 2
    assert list(problems(document, schema())) == [
        "$.schema_version: not 1",
        "$.trace.sha256: missing",
        "$.arms[0].metrics.mean_rum: unknown",
        "$.arms[1].series.coverage[3]: not of ['number', 'null']",
    ]


def test_equal_results_give_equal_bytes(make_result, tmp_path):
    write_json(make_result(seed=3), tmp_path / "a.json")
    write_json(make_result(seed=3), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_what_is_not_finite_or_not_there_becomes_null(make_result, make_arm, tmp_path):
    arm = make_arm("stock", mean_run=math.nan, steps=np.int64(7))
    arm = dataclasses.replace(arm, series={"time_s": np.array([0.0, math.inf])})
    result = dataclasses.replace(make_result(), arms=(arm,))
    write_json(result, tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    written = json.loads(text)["arms"][0]
    assert written["metrics"]["mean_run"] is None
    assert written["metrics"]["wall_s"] is None
    assert written["metrics"]["steps"] == 7
    assert written["series"]["time_s"] == [0.0, None]
    assert set(written["metrics"]) == {metric.name for metric in METRICS}


@pytest.mark.parametrize("key", ["schema_version", "trace", "seed", "versions", "options", "arms"])
def test_schema_asks_for_every_key_of_the_document(key):
    assert key in schema()["required"]
