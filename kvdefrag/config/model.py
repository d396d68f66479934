"""All settings in one frozen model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kvdefrag.config.sections import (
    Attention,
    Consumer,
    Control,
    Observe,
    Placement,
    Relocation,
    Section,
)


def _digits_to_int(value: object) -> object:
    # A literal of integers takes no text, and the environment holds nothing else.
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class Config(Section):
    """All settings. `Config()` is the defaults; files and environment come in by `load_config`."""

    enabled: bool = Field(
        default=False, description="Turn the plugin on; off leaves the server exactly as stock."
    )
    kill_switch: bool = Field(
        default=False, description="Stop every move at once, whatever else is set here."
    )
    page: Annotated[Literal[16, 32, 64, 128], BeforeValidator(_digits_to_int)] = Field(
        default=64, description="Slots of an aligned page."
    )
    placement: Placement = Field(
        default=Placement(), description="Where new tokens go; costs no copies."
    )
    relocation: Relocation = Field(
        default=Relocation(),
        description="When live tokens are copied, and how much that may cost.",
    )
    consumers: tuple[Consumer, ...] = Field(
        default=(),
        description="Who is paid by contiguity; with nobody here `auto` never relocates.",
    )
    profile: Path | None = Field(
        default=None, description="Device profile (JSON) that prices copies and gains."
    )
    attention: Attention = Field(default=Attention(), description="Our own attention kernel.")
    observe: Observe = Field(default=Observe(), description="What is told to whom.")
    control: Control = Field(
        default=Control(), description="Steering a live server from outside, behind its API key."
    )


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation is, or None for a plain value."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None
