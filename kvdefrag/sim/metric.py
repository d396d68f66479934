"""What is known of one scalar that an arm reports: name, unit, meaning, and how it is written."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

MISSING = "-"


class Better(enum.Enum):
    """Which way an arm wants a metric to go."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


class Show(enum.Enum):
    """How a value is written for people; JSON always carries the plain number."""

    PERCENT = "percent"
    DECIMAL = "decimal"
    FINE = "fine"
    COUNT = "count"
    BYTES = "bytes"


@dataclass(frozen=True)
class Metric:
    """One scalar per arm.

    Attributes:
        name: Key in `ArmResult.metrics` and in the JSON output; never renamed within a schema.
        unit: Unit of the stored number.
        title: Column title, short enough for a terminal.
        definition: One sentence with the formula.
        show: How people see it.
        better: Which way is better.
        decisive: True if it is in the first table, false if only in the wide one.
        repeatable: False if two equal runs may differ in it.
    """

    name: str
    unit: str
    title: str
    definition: str
    show: Show
    better: Better = Better.NEITHER
    decisive: bool = False
    repeatable: bool = True

    def text(self, value: float | None) -> str:
        """Write a stored value for people; `-` for a missing one."""
        if value is None or not math.isfinite(value):
            return MISSING
        if self.show is Show.PERCENT:
            return f"{100 * value:.2f}"
        if self.show is Show.BYTES:
            return _bytes(value)
        return f"{value:{_SPEC[self.show]}}"


_SPEC = {Show.DECIMAL: ",.1f", Show.FINE: ".3f", Show.COUNT: ",.0f"}


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"
