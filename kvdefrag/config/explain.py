"""Refusals in words: the key, the value, what is allowed, and the key that was probably meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvdefrag.config.model import Config, section_of
from kvdefrag.config.text import allowed, leaves, scalar_text, value_text

Location = tuple[int | str, ...]


def explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """Return one line for each refused setting.

    Args:
        error: What pydantic found.
        origins: File or variable behind each dotted key.
    """
    return "\n".join(_line(detail, origins) for detail in error.errors())


def unknown_key(location: Location, value: object, origins: Mapping[str, str]) -> str:
    """Return the refusal of a key that no section has."""
    key, around = str(location[-1]), _dotted(location[:-1])
    section = _section(location[:-1])
    siblings = {name: f"{around}.{name}" if around else name for name in _fields(section)}
    elsewhere = {name.rpartition(".")[2]: name for name, _ in leaves()}
    meant = elsewhere | siblings
    found = difflib.get_close_matches(key, meant, n=1)
    hint = f"; did you mean {meant[found[0]]}?" if found else ""
    where = _from(_dotted(location), origins)
    return (
        f"{_dotted(location)}: unknown key with value {_short(value)}{where}{hint}"
        f"{' Allowed' if hint else '; allowed'}: {', '.join(siblings)}"
    )


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean X?` for the known word closest to this one, or nothing."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _line(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return unknown_key(location, detail["input"], origins)
    key = _dotted(location)
    where = _from(key, origins)
    if detail["type"] == "rule":
        return f"{key}: {_short(detail['input'])}{where} {detail['msg']}"
    field = _field(location)
    choice = f"; allowed: {allowed(field)}" if field else f": {detail['msg']}"
    if detail["type"] == "missing":
        return f"{key}: missing{where}{choice}"
    return f"{key}: {_short(detail['input'], field)}{where} is not allowed{choice}"


def _from(key: str, origins: Mapping[str, str]) -> str:
    origin = next((name for set_key, name in origins.items() if _related(key, set_key)), "")
    return f" (from {origin})" if origin else ""


def _related(key: str, set_key: str) -> bool:
    inside, around = key.startswith((set_key + ".", set_key + "[")), set_key.startswith(key + ".")
    return key == set_key or inside or around


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _short(value: object, field: FieldInfo | None = None) -> str:
    try:
        text = value_text(value, field) if field else scalar_text(value)
    except yaml.YAMLError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _section(location: Location) -> type[BaseModel] | None:
    """Return the section at a location, or None where there is a plain value."""
    model: Any = Config
    for part in location:
        if isinstance(part, int) or model is None:
            continue
        field = model.model_fields.get(part)
        annotation = field.annotation if field else None
        # A list stands for its elements: the index that follows is passed over.
        element = typing.get_args(annotation)[:1]
        model = section_of(annotation) or (section_of(element[0]) if element else None)
    return typing.cast("type[BaseModel] | None", model)


def _field(location: Location) -> FieldInfo | None:
    """Return the field at a location; an index stands for the list that holds it."""
    names = [part for part in location if isinstance(part, str)]
    section = _section(tuple(names[:-1]))
    return section.model_fields.get(names[-1]) if section and names else None


def _fields(section: type[BaseModel] | None) -> list[str]:
    return list(section.model_fields) if section else []
