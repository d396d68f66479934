"""Check single fields of a row; every refusal names the row and the field.

Values come as JSON has them: int, Decimal (never float), str, list or None for a missing one.
"""

from __future__ import annotations

from decimal import Decimal

from kvdefrag.errors import TraceError
from kvdefrag.sim.readers.request import Blocks
from kvdefrag.sim.readers.times import iso_ns, numeric_ns

MAX_TOKENS = 2**31 - 1
"""Longest prompt or output a reader takes; token identities pack a position into 31 bits."""

_LOWEST_ID, _HIGHEST_ID = -(2**63), 2**64 - 1


def arrival_ns(value: object, unit: str, *, row: int, field: str) -> int:
    """Return an arrival in nanoseconds; a missing one is refused, never read as 0."""
    _require(value, row, field)
    try:
        if unit == "iso" and isinstance(value, str):
            return iso_ns(value)
        if unit != "iso" and isinstance(value, int | Decimal) and not isinstance(value, bool):
            return numeric_ns(value, unit)
    except ValueError as error:
        raise TraceError(str(error), row=row, field=field) from None
    wanted = "a date and time" if unit == "iso" else f"a number of {unit}"
    raise TraceError(f"expected {wanted}, got {_shown(value)}", row=row, field=field)


def token_count(value: object, *, row: int, field: str) -> int:
    """Return a number of tokens: a whole number in 0 .. MAX_TOKENS, written without a fraction."""
    _require(value, row, field)
    # type() and not isinstance(): True is an int too.
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    raise TraceError(
        f"expected a whole number of tokens in 0..{MAX_TOKENS}, got {_shown(value)}",
        row=row,
        field=field,
    )


def block_ids(value: object, tokens: int, block: int, *, row: int, field: str) -> Blocks:
    """Return the hash ids of a prompt of `tokens` tokens in blocks of `block` tokens."""
    if value is None:
        raise TraceError(
            "missing; to read lengths alone, declare the other columns with --columns "
            "and --format jsonl or csv",
            row=row,
            field=field,
        )
    if not isinstance(value, list):
        raise TraceError(f"expected a list of ids, got {_shown(value)}", row=row, field=field)
    expected = -(-tokens // block)
    if len(value) != expected:
        raise TraceError(
            f"expected {expected} ids for {tokens} tokens in blocks of {block}, got {len(value)}",
            row=row,
            field=field,
        )
    for item in value:
        if type(item) is not int or not _LOWEST_ID <= item <= _HIGHEST_ID:
            raise TraceError(
                f"expected ids of 64 bits, signed or unsigned, got {_shown(item)}",
                row=row,
                field=field,
            )
    return tuple(value)


def _require(value: object, row: int, field: str) -> None:
    if value is None or value == "":
        raise TraceError("missing", row=row, field=field)


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, Decimal) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
