"""Which provider was fastest where: a table of measurements, and the choice it makes."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvdefrag.attention.provider import Kind, Task
from kvdefrag.data import ATTENTION_CROSSOVER, open_data
from kvdefrag.errors import ConfigError

OURS = "kernel"


class Entry(BaseModel):
    """One measured scene.

    Attributes:
        kind: Decode, or verify of chains and trees alike.
        heads, kv_heads, k_dim, latent, kv: Of the rows, and their type.
        requests, queries, length: Of the step; `length` counts a request's tokens.
        coverage: Share of its tokens in whole aligned pages.
        us: Microseconds of each provider, plan not included; `stock` is SGLang's Triton kernel.
        source: File and scene of the figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["decode", "verify"]
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    k_dim: int = Field(ge=1)
    latent: bool
    kv: str
    requests: int = Field(ge=1)
    queries: int = Field(ge=1)
    length: int = Field(ge=1)
    coverage: float = Field(ge=0, le=1)
    us: dict[str, float] = Field(min_length=1)
    source: str


class Crossover(BaseModel):
    """The table.

    Attributes:
        machine: GPU it was measured on.
        margin: By how much another provider must beat our kernel to be taken before it.
        entries: The scenes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    machine: str
    margin: float = Field(default=0.1, ge=0, lt=1)
    entries: tuple[Entry, ...] = Field(min_length=1)


def default_crossover() -> Crossover:
    """Return the shipped table; every entry names where its figures are from."""
    with open_data(ATTENTION_CROSSOVER) as file:
        return Crossover.model_validate_json(file.read())


def load_crossover(path: Path) -> Crossover:
    """Return a table measured elsewhere.

    Raises:
        ConfigError: The file cannot be read or a field is wrong.
    """
    try:
        return Crossover.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error


def ranked(
    table: Crossover,
    task: Task,
    names: Collection[str],
    *,
    length: int | None = None,
    coverage: float = 0.0,
) -> tuple[str, ...]:
    """Order providers by the nearest scene that was measured, the fastest first.

    Nothing but the arguments is looked at, so that all ranks choose alike. `length` None: it is
    not known (a graph serves every length), and the scenes that differ in length alone are added
    up. A name without a figure comes last, our kernel first among those; who does not beat our
    kernel by the table's margin comes behind it.
    """
    scenes = _nearest(table, task, length, coverage)
    totals = {
        name: sum(scene.us[name] for scene in scenes)
        for name in names
        if scenes and all(name in scene.us for scene in scenes)
    }

    def cost(name: str) -> tuple[float, bool, str]:
        handicap = 1.0 if name == OURS else 1.0 / (1.0 - table.margin)
        return totals.get(name, math.inf) * handicap, name != OURS, name

    return tuple(sorted(names, key=cost))


def _nearest(table: Crossover, task: Task, length: int | None, coverage: float) -> list[Entry]:
    kind = "decode" if task.kind is Kind.DECODE else "verify"
    g = task.geometry
    fits = [e for e in table.entries if e.kind == kind and e.latent == g.latent]

    def far(entry: Entry) -> float:
        pairs = (
            (entry.requests, task.requests),
            (entry.queries, task.queries),
            (entry.heads // entry.kv_heads, g.group),
            (entry.kv_heads, g.kv_heads),
        )
        found = sum(abs(math.log2(a / b)) for a, b in pairs)
        found += 8.0 * (entry.kv != str(task.kv_dtype).removeprefix("torch."))
        found += 2.0 * abs(entry.coverage - coverage)
        return found + (abs(math.log2(entry.length / length)) if length else 0.0)

    if not fits:
        return []
    least = min(map(far, fits))
    return [e for e in fits if far(e) <= least + 1e-9]
