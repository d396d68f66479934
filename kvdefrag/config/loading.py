"""Layers file, environment and overrides over the defaults, and explains what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kvdefrag.config.explain import did_you_mean, explain
from kvdefrag.config.model import Config, section_of
from kvdefrag.config.text import allowed, takes_mapping_or_list
from kvdefrag.config.yaml_file import read_yaml
from kvdefrag.errors import ConfigError

PREFIX = "KVDEFRAG_"
DELIMITER = "__"
CONFIG_VARIABLE = PREFIX + "CONFIG"


@dataclass(frozen=True)
class Loaded:
    """A configuration and, by dotted key, the file or variable that set it.

    Keys left at their default are not in `origins`.
    """

    config: Config
    origins: Mapping[str, str]


def load_config(
    path: Path | None, environ: Mapping[str, str], *, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Return the effective settings: overrides before environment before file before defaults.

    Args:
        path: File to read; None takes the one that KVDEFRAG_CONFIG names, if any.
        environ: The process environment; only names that begin with KVDEFRAG_ are looked at.
        overrides: Nested settings that win over everything else.

    Raises:
        ConfigError: Names every key that is refused, its value and what is allowed.
    """
    return load_with_origins(path, environ, overrides=overrides).config


def load_with_origins(
    path: Path | None, environ: Mapping[str, str], *, overrides: Mapping[str, Any] | None = None
) -> Loaded:
    """Do what `load_config` does, and also say where each setting comes from."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in _layers(path, environ, overrides or {}):
        _overlay(merged, origins, layer, origin)
    try:
        return Loaded(Config.model_validate(merged), origins)
    except ValidationError as error:
        raise ConfigError(explain(error, origins)) from error


def _layers(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every source with its name, the weakest first."""
    named = environ.get(CONFIG_VARIABLE)
    path = Path(named) if path is None and named else path
    if path is not None:
        yield str(path), read_yaml(path)
    # In this order a section given as JSON comes before the variables for its single keys.
    for name in sorted(environ):
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE:
            yield name, _from_variable(name, environ[name])
    yield "override", overrides


def _from_variable(name: str, text: str) -> dict[str, Any]:
    """Return the nested settings that one variable holds."""
    known = dict(_variables())
    if name not in known:
        names = [CONFIG_VARIABLE, *known]
        hint = did_you_mean(name, names) or f"; allowed: {', '.join(names)}"
        raise ConfigError(f"{name}: unknown setting with value {text!r}{hint}")
    content: Any = None if text == "null" else text
    if takes_mapping_or_list(known[name]):
        try:
            content = json.loads(text)
        except ValueError as error:
            choice = f"JSON, {allowed(known[name])}"
            raise ConfigError(f"{name}: {text!r} is not allowed; allowed: {choice}") from error
    for part in reversed(name.removeprefix(PREFIX).lower().split(DELIMITER)):
        content = {part: content}
    return dict(content)


def _variables(
    model: type[BaseModel] = Config, prefix: str = PREFIX
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every variable that is a setting, sections included."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        yield prefix + name.upper(), field
        if section is not None:
            yield from _variables(section, prefix + name.upper() + DELIMITER)


def _overlay(
    below: dict[str, Any],
    origins: dict[str, str],
    above: Mapping[str, Any],
    origin: str,
    prefix: str = "",
) -> None:
    """Lay one layer over another in place, keeping account of who set what."""
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(name, {}), dict):
            _overlay(below.setdefault(name, {}), origins, value, origin, f"{prefix}{name}.")
        else:
            below[name] = value
            origins[prefix + name] = origin
