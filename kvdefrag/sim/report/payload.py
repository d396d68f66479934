"""What the scripts of the HTML report read: a JSON description and compressed pool maps."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdefrag.sim.report.table import BOUND
from kvdefrag.sim.results import ArmResult, FloatArray, RunResult

POINTS = 1500
"""Most samples of a series that are drawn; a chart is not wider than this in pixels."""


def describe(result: RunResult) -> dict[str, Any]:
    """Make the JSON part: series thinned to `POINTS` samples, histograms, times of the maps."""
    slots = result.options.get("pool_slots")
    return {
        "arms": [_arm(arm) for arm in result.arms],
        "bound": BOUND,
        "points": POINTS,
        "pool_slots": slots if isinstance(slots, int) else None,
    }


def map_bytes(result: RunResult) -> bytes:
    """Lay all maps of all arms one after another, ready for `pack`.

    Per map: the low bytes of all cells, then the high bytes (uint8 [2 x cells]), each map but an
    arm's first XORed with the one before it, so that what did not change compresses to nothing.
    """
    parts = []
    for arm in result.arms:
        before = np.zeros(0, np.uint8)
        for pool_map in arm.maps:
            planes = _planes(pool_map.owners)
            parts.append((planes ^ before if planes.size == before.size else planes).tobytes())
            before = planes
    return b"".join(parts)


def pack(data: bytes) -> str:
    """Compress with zlib and encode as base64, which is safe inside any HTML element."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def embed_json(value: object) -> str:
    """Write JSON that cannot end the script element that holds it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _arm(arm: ArmResult) -> dict[str, Any]:
    samples = len(arm.series["time_s"])
    keep = np.unique(np.linspace(0, max(samples - 1, 0), min(samples, POINTS)).round().astype(int))
    return {
        "name": arm.name,
        "description": arm.description,
        "histogram": arm.run_histogram.tolist(),
        "samples": samples,
        "series": {name: _numbers(values[keep]) for name, values in arm.series.items()},
        "maps": [
            {
                "time_s": pool_map.time_s,
                "cells": len(pool_map.owners),
                "slots_per_cell": pool_map.slots_per_cell,
            }
            for pool_map in arm.maps
        ],
    }


def _planes(owners: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    low, high = owners & 0xFF, owners >> 8
    return np.concatenate((low, high)).astype(np.uint8)


def _numbers(values: FloatArray) -> list[float | None]:
    # Six digits are more than a pixel shows and a third of the size.
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in values.tolist()]
