"""Errors that kvdefrag raises, by who can act on them."""

from __future__ import annotations


class KvdefragError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(KvdefragError):
    """The user must change a setting: names the key, the value and what is allowed."""


class TraceError(KvdefragError):
    """A trace cannot be read: names the row, the field and what was expected."""

    def __init__(self, message: str, *, row: int | None = None, field: str | None = None) -> None:
        where = [] if row is None else [f"row {row}"]
        where += [] if field is None else [f"field {field!r}"]
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.row = row
        self.field = field


class SlotError(KvdefragError):
    """Slots were freed twice, out of range, or named wrongly; carries the first offending slots."""

    def __init__(self, message: str, slots: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.slots = slots


class PlanError(KvdefragError):
    """A move plan breaks a rule every plan must keep; nothing has been moved."""


class IntegrityError(KvdefragError):
    """An invariant of our own broke; the message carries both sides of the equation."""


class Busy(KvdefragError):
    """Not now: the caller may carry on and ask again later."""
