"""Byte counts that a person can read and write, such as 64MiB."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_PATTERN = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_bytes(value: object) -> object:
    """Return the bytes that a text such as `64MiB`, `1.5 GB` or `4096` names.

    Anything else than text is returned as it is, for the type check that follows.

    Raises:
        ValueError: The text is no byte count, or not a whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    match = _PATTERN.fullmatch(value.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is not a number of bytes")
    count = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if count != int(count):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(count)


def format_bytes(count: int) -> str:
    """Return `count` in the largest binary unit that divides it, so that nothing is lost."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count}B"


class BytesMark:
    """Marks a field as a byte count, so that it is shown as one."""


ByteCount = Annotated[int, BeforeValidator(parse_bytes), BytesMark()]
