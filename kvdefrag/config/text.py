"""Settings in words: what a key allows, and a configuration as commented YAML."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvdefrag.config.byte_count import BytesMark, format_bytes
from kvdefrag.config.model import Config, section_of

_HEADER = """\
# Every setting of kvdefrag with its default. Copy the lines to change; leave out the rest.
# The environment overrides this file: KVDEFRAG_PLACEMENT__FREE_LIST=fifo, two underscores a level.
# KVDEFRAG_CONFIG names the file to read. Check one with `kvdefrag config check FILE`.

"""


def allowed(field: FieldInfo) -> str:
    """Return what a field takes, for example `1 .. 4096` or `fifo | sorted | two_ended`."""
    annotation = field.annotation
    section = section_of(annotation)
    if section is not None:
        return f"a mapping with the keys {', '.join(section.model_fields)}"
    if annotation is bool:
        return "true | false"
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return " | ".join(str(argument) for argument in arguments)
    element = section_of(arguments[0]) if arguments else None
    if element is not None:
        return f"a list of mappings with the keys {', '.join(element.model_fields)}"
    optional = " | null" if type(None) in arguments else ""
    return (_bounds(field) or ("a path" if Path in arguments else str(annotation))) + optional


def takes_mapping_or_list(field: FieldInfo) -> bool:
    """Return whether a field holds more than one value, so that a variable must give JSON."""
    annotation = field.annotation
    return section_of(annotation) is not None or typing.get_origin(annotation) is tuple


def leaves(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted key and the field of every setting that is not itself a section."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from leaves(section, f"{prefix}{name}.")


def scalar_text(value: object) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def value_text(value: Any, field: FieldInfo) -> str:
    """Return a field's value as YAML on one line, the way a person would write it."""
    if _is_byte_count(field) and type(value) is int:
        return format_bytes(value)
    if isinstance(value, tuple):
        plain = [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
        return scalar_text(plain)
    return scalar_text(str(value) if isinstance(value, Path) else value)


def as_yaml(
    config: Config, *, describe: bool, remark: Callable[[str, FieldInfo], str] = lambda *_: ""
) -> str:
    """Return the whole configuration as YAML, in the order of the model.

    Args:
        config: What to show.
        describe: Put each key's description in a comment line above it.
        remark: Comment behind a key's value, from the dotted key and its field; empty for none.
    """
    return "\n".join(_lines(config, "", describe=describe, remark=remark)) + "\n"


def default_file() -> str:
    """Return the text of `config.yaml`: every key, its default, what it does and what it takes."""
    return _HEADER + as_yaml(Config(), describe=True, remark=lambda _, field: allowed(field))


def _bounds(field: FieldInfo) -> str:
    low: Any = next((mark.ge for mark in field.metadata if isinstance(mark, Ge)), None)
    high: Any = next((mark.le for mark in field.metadata if isinstance(mark, Le)), None)
    if _is_byte_count(field):
        return f"bytes, {format_bytes(low)} .. {format_bytes(high)}"
    return "" if low is None and high is None else f"{low} .. {high}"


def _is_byte_count(field: FieldInfo) -> bool:
    return any(isinstance(mark, BytesMark) for mark in field.metadata)


def _lines(
    model: BaseModel, prefix: str, *, describe: bool, remark: Callable[[str, FieldInfo], str]
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    after_section = False
    for name, field in type(model).model_fields.items():
        value: Any = getattr(model, name)
        is_section = isinstance(value, BaseModel)
        if describe and not prefix and (is_section or after_section):
            yield ""
        after_section = is_section
        if describe:
            yield f"{indent}# {field.description}"
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{prefix}{name}.", describe=describe, remark=remark)
            continue
        behind = remark(prefix + name, field)
        yield f"{indent}{name}: {value_text(value, field)}" + (f"  # {behind}" if behind else "")
