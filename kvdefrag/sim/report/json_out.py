"""The result as one JSON document, and the schema of that document."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdefrag.sim.metrics import METRICS
from kvdefrag.sim.results import SCHEMA_VERSION, ArmResult, RunResult

Json = dict[str, Any]

SERIES = {
    "time_s": "Simulated time of the sample in seconds.",
    "step": "Scheduler step of the sample.",
    "coverage": "Token-weighted page coverage over running requests.",
    "mean_run": "Mean run of running requests in slots.",
    "whole_free_share": "Free slots in whole free pages divided by free slots.",
    "utilization": "Live plus cached slots divided by the pool size.",
    "live_share": "Slots that running requests read, divided by the pool size.",
    "cached_share": "Slots that only the prefix cache holds, divided by the pool size.",
    "reserved_share": "Slots held ahead of need, divided by the pool size.",
    "running": "Running requests.",
    "moved_rows": "Rows copied since the start.",
}


def write_json(result: RunResult, path: Path) -> None:
    """Write the document of `to_document`; equal results give equal bytes."""
    text = json.dumps(to_document(result), allow_nan=False, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def to_document(result: RunResult) -> Json:
    """Turn a result into plain JSON values; what is missing or not finite becomes None.

    Every documented metric is present in every arm. Pool maps and steps are left out: the HTML
    report and the Chrome trace carry those.
    """
    return {
        "schema_version": result.schema_version,
        "trace": dict(result.trace),
        "seed": result.options.get("seed"),
        "versions": dict(result.versions),
        "options": {key: _number(value) for key, value in result.options.items()},
        "arms": [_arm(arm) for arm in result.arms],
        "verdict": list(result.verdict),
        "warnings": list(result.warnings),
    }


def schema() -> Json:
    """Describe the document as a JSON Schema; `docs/simulate.schema.json` is made from this."""
    number = {"type": ["number", "null"]}
    scalar = {"type": ["string", "integer", "number", "boolean", "null"]}
    sentences = {"type": "array", "items": {"type": "string"}}
    metrics = {m.name: {**number, "description": f"[{m.unit}] {m.definition}"} for m in METRICS}
    series = {
        name: {"type": "array", "items": number, "description": text}
        for name, text in SERIES.items()
    }
    histogram = {
        "type": "array",
        "items": {"type": "integer"},
        "description": "Entry k counts runs of 2**k to 2**(k+1)-1 slots, summed over samples.",
    }
    arm = _object(
        {
            "name": {"type": "string"},
            "description": {"type": "string"},
            "metrics": _object(metrics),
            "series": {**_object(series), "additionalProperties": {"type": "array"}},
            "run_histogram": histogram,
        }
    )
    trace = _object({"name": {"type": "string"}, "sha256": {"type": "string"}})
    document = {
        "schema_version": {"const": SCHEMA_VERSION},
        "trace": {**trace, "additionalProperties": {"type": ["string", "integer"]}},
        "seed": {"type": ["integer", "null"], "description": "Seed of the only generator."},
        "versions": {"type": "object", "additionalProperties": {"type": "string"}},
        "options": {"type": "object", "additionalProperties": scalar},
        "arms": {"type": "array", "items": arm},
        "verdict": {**sentences, "description": "What each mechanism adds, in plain words."},
        "warnings": {**sentences, "description": "What the reader should know before the rest."},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Output of `kvdefrag simulate --json`",
        "description": (
            f"Version {SCHEMA_VERSION}. The version rises when a name or a meaning changes; new "
            "optional fields do not raise it. Numbers that cannot be given are null, never NaN."
        ),
        **_object(document),
    }


def _arm(arm: ArmResult) -> Json:
    names = [metric.name for metric in METRICS]
    return {
        "name": arm.name,
        "description": arm.description,
        "metrics": {name: _number(arm.metrics.get(name)) for name in [*names, *arm.metrics]},
        "series": {name: _numbers(values) for name, values in arm.series.items()},
        "run_histogram": arm.run_histogram.tolist(),
    }


def _object(properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def _numbers(values: npt.NDArray[Any]) -> list[Any]:
    return [_number(value) for value in values.tolist()]


def _number(value: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
