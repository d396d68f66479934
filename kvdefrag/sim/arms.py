"""The arms of a run: policies that serve the same arrivals, cheapest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdefrag.config import Config, load_config
from kvdefrag.errors import ConfigError

_UNLIMITED = "1GiB"


@dataclass(frozen=True)
class Arm:
    """One policy.

    Attributes:
        name, description: For people.
        config: The settings it runs with.
        packed: The bound: any layout is taken to be perfect, at no cost.
    """

    name: str
    description: str
    config: Config
    packed: bool = False


def _placement(free_list: str, *, reservation: bool) -> dict[str, Any]:
    return {"free_list": free_list, "reservation": reservation, "checks": "off"}


_OFF = {"mode": "off"}
# Copies whatever lies outside pages, whoever pays: shows what the mechanism can do.
_TENURE = {
    "mode": "threshold",
    "coverage_low": 0.9999,
    "coverage_high": 1.0,
    "bytes_per_step": _UNLIMITED,
    "duty_bytes_per_step": _UNLIMITED,
    "mechanisms": {"tenure": True, "evacuation": False, "on_demand": False},
}
_ALL = {**_TENURE, "mechanisms": {"tenure": True, "evacuation": True, "on_demand": False}}

_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": (
        "SGLang as it is: slots in the order in which they were freed.",
        {"placement": _placement("fifo", reservation=False), "relocation": _OFF},
    ),
    "sorted": (
        "SGLang's sorted free list, as in its disaggregation modes.",
        {"placement": _placement("sorted", reservation=False), "relocation": _OFF},
    ),
    "placement": (
        "Two-ended free list: prompts take whole pages, decode partly used ones; no copies.",
        {"placement": _placement("two_ended", reservation=False), "relocation": _OFF},
    ),
    "placement+reservation": (
        "Each running request also owns the rest of its last page; no copies.",
        {"placement": _placement("two_ended", reservation=True), "relocation": _OFF},
    ),
    "placement+tenure": (
        "Instead of reserving, decoded tokens are copied into whole pages every 16 steps.",
        {"placement": _placement("two_ended", reservation=False), "relocation": _TENURE},
    ),
    "all": (
        "Placement, reservation, tenure and evacuation, whoever pays for the copies.",
        {"placement": _placement("two_ended", reservation=True), "relocation": _ALL},
    ),
    "default": ("The policy as shipped.", {}),
    "packed": (
        "The bound: every request perfectly laid out, at no cost.",
        {"placement": _placement("fifo", reservation=False), "relocation": _OFF},
    ),
}
NAMES = tuple(_BUILT_IN)


def built_in(name: str, *, page: int) -> Arm:
    """Return one of the arms in `NAMES`.

    Raises:
        ConfigError: There is no such arm, or the page is not allowed.
    """
    if name not in _BUILT_IN:
        raise ConfigError(f"--arms: {name!r} is not one of {', '.join(NAMES)}")
    description, settings = _BUILT_IN[name]
    config = load_config(None, {}, overrides={**settings, "page": page})
    return Arm(name, description, config, packed=name == "packed")


def from_file(path: Path, *, page: int) -> Arm:
    """Return an arm that runs with the settings of a file, named after it.

    Raises:
        ConfigError: The file is refused, or is for pages of another size than the run's.
    """
    config = load_config(path, {})
    if config.page != page:
        raise ConfigError(f"page: {config.page} in {path} differs from --page {page}")
    return Arm(path.stem, f"The policy in {path.name}.", config)


def choose(names: Sequence[str] | None, files: Sequence[Path], *, page: int) -> list[Arm]:
    """Return the arms of a run in order: those named (all by default), then those of files.

    Raises:
        ConfigError: An arm is unknown or a name comes twice.
    """
    arms = [built_in(name, page=page) for name in (names if names is not None else NAMES)]
    arms += [from_file(path, page=page) for path in files]
    seen: set[str] = set()
    for arm in arms:
        if arm.name in seen:
            raise ConfigError(f"--arms, --config: the arm {arm.name!r} is given twice")
        seen.add(arm.name)
    return arms
