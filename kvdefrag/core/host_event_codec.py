"""Events as JSON objects, one a line.

    {"event":"allocated","kind":"decode","rows":[3,1],"starts":[40,9],"counts":[1,1],
     "slots":[[811,1],[96,1]]}

Slots are written as runs [first slot, length]. Empty arrays of a `step` are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvdefrag.core import events as ev
from kvdefrag.core.demand import IntArray, Kind
from kvdefrag.core.events import Event, Header
from kvdefrag.core.host_event_forms import (
    COUNTS,
    FLAG,
    FLOAT,
    INT,
    INTS,
    KIND,
    RAN,
    SLOTS,
    SOME,
    TEXT,
    Form,
    from_run_lengths,
)
from kvdefrag.errors import TraceError

Json = dict[str, Any]


def write_header(header: Header) -> str:
    """Return the first line of a log, with its line end."""
    about = {f.name: getattr(header, f.name) for f in fields(header)}
    return _line({"event": "header", "version": ev.VERSION, **about})


def write_event(event: Event) -> str:
    """Return an event's line, with its line end."""
    name = _NAMES[type(event)]
    out: Json = {"event": name}
    for key, how in _FORMS[name].items():
        value = getattr(event, key)
        if not (how.optional and not len(value)):
            out[key] = how.write(value)
    return _line(out)


def read_header(line: bytes) -> Header:
    """Return what a log's first line says.

    Raises:
        TraceError: It is no header, or of a version that is not read here.
    """
    found = _object(line, 1)
    if found.get("event") != "header":
        raise TraceError("a log of events begins with its header", row=1, field="event")
    if found.get("version") != ev.VERSION:
        raise TraceError(
            f"{found.get('version')!r} is not a version that is read here; {ev.VERSION} is",
            row=1,
            field="version",
        )
    values = {key: _value(found, key, how, 1) for key, how in _HEADER.items()}
    return Header(**values)


def read_event(line: bytes, number: int, size: int) -> Event:
    """Return the event in line `number` of a log about slots 1..size.

    Raises:
        TraceError: It is none; names the line and the field.
    """
    found = _object(line, number)
    name = found.get("event")
    if name not in _FORMS:
        raise TraceError(f"{name!r} is not one of {', '.join(_FORMS)}", row=number, field="event")
    values = {
        key: _value(found, key, how, number)
        for key, how in _FORMS[name].items()
        if not (how.optional and key not in found)
    }
    for key, how in _FORMS[name].items():
        if how is SLOTS:
            values[key] = _expand(values[key], size, number, key)
    event: Event = _TYPES[name](**values)
    _check_lengths(event, number)
    return event


def _line(value: Json) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"


def _object(line: bytes, number: int) -> Json:
    try:
        found = json.loads(line, parse_constant=_no_constant)
    except ValueError as error:
        raise TraceError(f"not JSON: {error}", row=number) from error
    if not isinstance(found, dict):
        raise TraceError("not a JSON object", row=number)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _value(found: Mapping[str, Any], key: str, how: Form, number: int) -> Any:
    if key not in found:
        raise TraceError(f"missing; {how.expected} is expected", row=number, field=key)
    try:
        return how.read(found[key])
    except (TypeError, ValueError, OverflowError) as error:
        text = json.dumps(found[key])[:60]
        raise TraceError(f"{text} is not {how.expected}", row=number, field=key) from error


def _check_lengths(event: Event, number: int) -> None:
    if isinstance(event, ev.Allocated | ev.Refused):
        _check_same(event, ("rows", "starts", "counts"), number)
        if isinstance(event, ev.Allocated) and event.kind is not Kind.PLAIN:
            want, got = int(event.counts.sum()), event.slots.shape[0]
            if want != got:
                raise TraceError(f"{got} slots where {want} were asked", row=number, field="slots")
    elif isinstance(event, ev.Step):
        columns = ("rows", "generations", "protected", "committed", "allocated")
        _check_same(event, columns, number)
    elif isinstance(event, ev.Moved):
        _check_same(event, ("src", "dst"), number)


def _check_same(event: Event, keys: tuple[str, ...], number: int) -> None:
    want = len(getattr(event, keys[0]))
    for key in keys[1:]:
        got = len(getattr(event, key))
        if got != want:
            raise TraceError(f"{got} entries, but {keys[0]} has {want}", row=number, field=key)


def _expand(runs: IntArray, size: int, number: int, key: str) -> IntArray:
    # Checked before they are written out: a wrong length could ask for any amount of memory.
    first, lengths = runs.T
    beyond = (first > size) | (lengths > size + 1 - first)
    if beyond.any():
        run = runs[beyond][0].tolist()
        raise TraceError(f"{run} names slots outside 1..{size}", row=number, field=key)
    if lengths.sum() > size:
        raise TraceError(f"more slots than 1..{size} has", row=number, field=key)
    return from_run_lengths(runs)


_HEADER = {
    **dict.fromkeys(("size", "page", "rows", "context", "window"), INT),
    "evicts_for_pages": FLAG,
    "policy": TEXT,
    "kvdefrag": TEXT,
}
_DEMAND = {"kind": KIND, "rows": INTS, "starts": INTS, "counts": INTS}
_FORMS: dict[str, dict[str, Form]] = {
    "opened": {"free": SLOTS},
    "allocated": {**_DEMAND, "slots": SLOTS},
    "refused": _DEMAND,
    "freed": {"slots": SLOTS},
    "shared": {"row": INT, "start": INT, "slots": SLOTS},
    "moved": {"src": SLOTS, "dst": SLOTS},
    "released": {"row": INT, "length": INT},
    "step": {
        "step": INT,
        "time_s": FLOAT,
        "ran": RAN,
        "tokens": INT,
        "cached": INT,
        **dict.fromkeys(
            ("rows", "generations", "protected", "committed", "allocated", "left"), SOME
        ),
        "counts": COUNTS,
    },
    "cleared": {},
    "resized": {"size": INT},
    "end": {"dropped": INT},
}
_TYPES: dict[str, type[Any]] = {
    "opened": ev.Opened,
    "allocated": ev.Allocated,
    "refused": ev.Refused,
    "freed": ev.Freed,
    "shared": ev.Shared,
    "moved": ev.Moved,
    "released": ev.Released,
    "step": ev.Step,
    "cleared": ev.Cleared,
    "resized": ev.Resized,
    "end": ev.Ended,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
