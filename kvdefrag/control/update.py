"""Other settings for a live server: which may change, and what the result is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvdefrag.config import Config, explain
from kvdefrag.errors import ConfigError

# What a policy is made of. Everything else has been built into allocator, buffers or sinks.
_LIVE = ("kill_switch", "relocation", "consumers")
_BUILT_IN = ("relocation.readback_steps",)


def updated(start: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings that a server started with, with others laid over them.

    Args:
        start: The settings at the start; what `settings` leaves out is as it was then.
        settings: Nested as in the file.

    Raises:
        ConfigError: Names every setting that is refused, or that a live server cannot change.
    """
    laid = _laid(start.model_dump(), settings)
    try:
        found = Config.model_validate(laid)
    except ValidationError as error:
        raise ConfigError(explain(error, {})) from error
    fixed = sorted(_changed(start.model_dump(), found.model_dump()))
    if fixed:
        raise ConfigError("\n".join(f"{key}: cannot change while the server runs" for key in fixed))
    return found


def _laid(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in above.items():
        inner = below.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            _laid(inner, value)
        else:
            below[key] = value
    return below


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in new.items():
        name = prefix + key
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            found += _changed(old[key], value, f"{name}.")
        elif value != old.get(key) and (not name.startswith(_LIVE) or name in _BUILT_IN):
            found.append(name)
    return found
