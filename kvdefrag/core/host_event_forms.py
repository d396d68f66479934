"""Values of an event's fields in JSON, and what is expected of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvdefrag.core.demand import IntArray, Kind

_LARGEST = 2**63 - 1


class Form(NamedTuple):
    """How a field is written and read; `read` raises ValueError or TypeError.

    Attributes:
        write, read: To and from JSON values.
        expected: What `read` takes, in words.
        optional: Left out when empty.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    expected: str
    optional: bool = False


def run_lengths(slots: IntArray) -> list[list[int]]:
    """Return `slots` [n] as runs [first, length] of rising neighbours."""
    if not slots.shape[0]:
        return []
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    lengths = np.diff(starts, append=slots.shape[0])
    runs: list[list[int]] = np.column_stack([slots[starts], lengths]).tolist()
    return runs


def from_run_lengths(runs: IntArray) -> IntArray:
    """Return the slots that runs [first, length], int64 [n, 2], name."""
    if not runs.shape[0]:
        return np.empty(0, dtype=np.int64)
    first, lengths = runs.T
    ends = np.cumsum(lengths)
    slots: IntArray = np.arange(ends[-1]) + np.repeat(first - ends + lengths, lengths)
    return slots


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise ValueError
    return value


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return float(value)


def _read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _read_ran(value: Any) -> str:
    if value not in ("prefill", "decode", ""):
        raise ValueError
    return str(value)


def _read_ints(value: Any) -> IntArray:
    return _whole(value, lowest=0)


def _read_runs(value: Any) -> IntArray:
    if value == []:
        return np.empty((0, 2), dtype=np.int64)
    runs = _whole(value, lowest=1, dimensions=2)
    if runs.shape[1] != 2:
        raise ValueError
    return runs


def _whole(value: Any, *, lowest: int, dimensions: int = 1) -> IntArray:
    if not isinstance(value, list):
        raise ValueError
    if not value:
        return np.empty(0, dtype=np.int64)
    array = np.array(value)
    if array.dtype != np.int64 or array.ndim != dimensions or array.min() < lowest:
        raise ValueError
    whole: IntArray = array
    return whole


def _read_counts(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError
    return {name: _read_int(count) for name, count in value.items()}


INT = Form(int, _read_int, "a whole number of 0 or more")
FLOAT = Form(float, _read_float, "a number")
FLAG = Form(bool, _read_flag, "true or false")
TEXT = Form(str, _read_text, "a text")
KIND = Form(lambda kind: kind.value, Kind, f"one of {', '.join(k.value for k in Kind)}")
RAN = Form(str, _read_ran, "prefill, decode or empty")
INTS = Form(lambda a: a.tolist(), _read_ints, "a list of whole numbers of 0 or more")
SLOTS = Form(run_lengths, _read_runs, "a list of runs [first slot from 1, length from 1]")
COUNTS = Form(dict, _read_counts, "an object of whole numbers of 0 or more", optional=True)
SOME = INTS._replace(optional=True)
