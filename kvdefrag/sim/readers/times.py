"""Read arrival times into whole nanoseconds, without a float in between.

A float cannot hold a present-day date to 100 ns, and decimal seconds written by a float library
carry noise in the last digits (5.8926549999999995). Rounding the decimal text to nanoseconds, half
to even, keeps the first exactly and removes the second.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal

UNITS = ("s", "ms", "us", "ns", "iso")

_NANOSECONDS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_LIMIT = 2**63
_LIMIT_DIGITS = 19
_ISO = re.compile(
    r"(?P<seconds>[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,9}))?"
    r"(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})?"
)
_EPOCH = datetime(1970, 1, 1)


def numeric_ns(value: int | Decimal, unit: str) -> int:
    """Return a number of `unit` (s, ms, us or ns) in nanoseconds, rounded half to even.

    Raises:
        ValueError: Not finite, or outside the 292 years that int64 holds.
    """
    factor = _NANOSECONDS[unit]
    if isinstance(value, int):
        ticks = value * factor
    else:
        # The size is looked at first: 1E+999999 as an int would fill the memory.
        if not value.is_finite() or value.adjusted() > _LIMIT_DIGITS:
            raise ValueError(f"expected a finite number of {unit}, got {value}")
        ticks = int((value * factor).to_integral_value(ROUND_HALF_EVEN))
    if not -_LIMIT <= ticks < _LIMIT:
        raise ValueError(f"{value} {unit} is outside 292 years")
    return ticks


def iso_ns(text: str) -> int:
    """Return a date and time in nanoseconds since 1970, UTC unless it carries an offset.

    Takes `2023-11-16 18:15:46.6805900`, with `T`, up to 9 digits of fraction or none, and `Z`,
    `+00:00` or `+0000` at the end: the ways in which the Azure traces were published.

    Raises:
        ValueError: Anything else, a date that does not exist included.
    """
    match = _ISO.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a time such as 2023-11-16 18:15:46.6805900, got {text!r}")
    since = datetime.fromisoformat(match["seconds"]) - _EPOCH - _offset(match["zone"])
    seconds = since.days * 86_400 + since.seconds
    ticks = seconds * 10**9 + int((match["fraction"] or "0").ljust(9, "0"))
    if not -_LIMIT <= ticks < _LIMIT:
        raise ValueError(f"{text} is outside 292 years around 1970")
    return ticks


def _offset(zone: str | None) -> timedelta:
    if zone is None or zone == "Z":
        return timedelta()
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    if hours > 23 or minutes > 59:
        raise ValueError(f"offset {zone} is not a time zone")
    offset = timedelta(hours=hours, minutes=minutes)
    return -offset if zone[0] == "-" else offset
