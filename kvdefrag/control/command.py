"""One command to a live scheduler, as it travels: the same text to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvdefrag.errors import ConfigError

Action = Literal["compact", "pause", "resume", "reload", "record"]
How = Literal["tenure", "evacuate", "lower", "gather"]


class Command(BaseModel):
    """What is asked.

    Attributes:
        id: Names the command in the state that the server shows.
        action: What to do.
        how: Of a compaction: copy decoded tokens into whole pages, empty the sparsest pages, lower
            the high-water mark, or lay one request into neighbouring pages.
        rows: Of a compaction: rows to move at most; None for all that it finds.
        request: Of a gathering: the request's id.
        dry_run: Of a compaction: say what it would do, and do nothing.
        settings: Of a reload: the settings, nested as in the file.
        after_steps: Of a reload: steps between its arrival and the first step under it.
        seconds: Of a recording: how long.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9-]{1,64}$")
    action: Action
    how: How = "tenure"
    rows: int | None = Field(default=None, ge=1)
    request: str | None = None
    dry_run: bool = False
    settings: dict[str, Any] = Field(default_factory=dict)
    after_steps: int = Field(default=0, ge=0, le=1 << 20)
    seconds: float = Field(default=10.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _names_a_request(self) -> Command:
        if self.action == "compact" and self.how == "gather" and not self.request:
            raise ValueError("a gathering needs the id of a request")
        return self

    def encode(self) -> str:
        """Return it as text."""
        return self.model_dump_json()


def decode(text: str) -> Command:
    """Return the command in a text.

    Raises:
        ConfigError: Names what is wrong with it.
    """
    try:
        return Command.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(_in_words(error)) from error


def decode_fields(fields: Mapping[str, Any]) -> Command:
    """Return the command that has these fields.

    Raises:
        ConfigError: Names what is wrong with it.
    """
    try:
        return Command.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(_in_words(error)) from error


def _in_words(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "command"
    return f"{field}: {first['msg']}"
