"""Declare what each trace format calls its fields and which unit its times have."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvdefrag.errors import ConfigError
from kvdefrag.sim.readers.times import UNITS


@dataclass(frozen=True)
class Columns:
    """Names of the columns (CSV) or keys (JSONL) to read; `blocks` is None if there are none."""

    arrival: str
    input: str
    output: str
    blocks: str | None = None

    @classmethod
    def parse(cls, text: str) -> Columns:
        """Read `arrival=ts,input=prompt,output=gen[,blocks=ids]`.

        Raises:
            ConfigError: A part is misspelt, given twice, empty or left out.
        """
        known = [item.name for item in fields(cls)]
        named: dict[str, str] = {}
        for part in text.split(","):
            key, _, column = (piece.strip() for piece in part.partition("="))
            if key not in known or not column or key in named:
                raise ConfigError(
                    f"--columns {text!r}: {part!r} is not one of "
                    f"{', '.join(f'{name}=COLUMN' for name in known)}, each at most once"
                )
            named[key] = column
        missing = [name for name in known if name not in named and name != "blocks"]
        if missing:
            raise ConfigError(
                f"--columns {text!r} does not declare {' and '.join(missing)}; "
                "write for example arrival=ts,input=prompt,output=gen"
            )
        return cls(**named)


@dataclass(frozen=True)
class Format:
    """A way to write a trace.

    Attributes:
        name: What `--format` calls it.
        container: `csv` (first line is a header) or `jsonl`.
        columns: Where the fields are.
        unit: Unit of the arrival times, one of `UNITS`.
    """

    name: str
    container: str
    columns: Columns
    unit: str


_NAMED = (
    Format(
        "mooncake",
        "jsonl",
        Columns("timestamp", "input_length", "output_length", "hash_ids"),
        "ms",
    ),
    Format("azure", "csv", Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"), "iso"),
    Format("vidur", "csv", Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens"), "s"),
)
FORMATS = (*(known.name for known in _NAMED), "csv", "jsonl")


def declare(name: str, *, columns: Columns | None, unit: str | None) -> Format:
    """Return the format called `name`, completed by what the user declares.

    Raises:
        ConfigError: The format is unknown, a plain one lacks its columns or unit, or a named one
            is given others than its own. A unit is never guessed from the numbers.
    """
    if name not in FORMATS:
        raise ConfigError(f"--format {name!r} is not one of {', '.join(FORMATS)}")
    if unit is not None and unit not in UNITS:
        raise ConfigError(f"--unit {unit!r} is not one of {', '.join(UNITS)}")
    for known in _NAMED:
        if known.name == name:
            _refuse_override(known, columns, unit)
            return known
    if columns is None:
        raise ConfigError(
            f"--format {name} needs --columns, for example arrival=ts,input=prompt,output=gen"
        )
    if unit is None:
        raise ConfigError(
            f"--format {name} needs --unit, the unit of {columns.arrival!r}: {', '.join(UNITS)}"
        )
    return Format(name, name, columns, unit)


def _refuse_override(known: Format, columns: Columns | None, unit: str | None) -> None:
    hint = f"use --format {known.container} to declare other columns or another unit"
    if columns is not None and columns != known.columns:
        raise ConfigError(f"--columns does not go with --format {known.name}: {hint}")
    if unit is not None and unit != known.unit:
        raise ConfigError(f"--unit {unit} does not go with --format {known.name}: {hint}")
