"""Other settings of the plugin for one scheduler of a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvdefrag.config import Config


@contextmanager
def settings(changed: Mapping[str, Any]) -> Iterator[None]:
    """Lay settings over those that the plugin was loaded with, for schedulers made inside.

    Args:
        changed: Nested as in the file.
    """
    if not changed:
        yield
        return
    from kvdefrag.sglang import attachment

    original = attachment.Attachment

    def changed_attachment(scheduler: Any, config: Config, *rest: Any) -> Any:
        return original(scheduler, Config.model_validate(_laid(config, changed)), *rest)

    attachment.Attachment = changed_attachment  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        attachment.Attachment = original  # type: ignore[misc]


def _laid(config: Config, changed: Mapping[str, Any]) -> dict[str, Any]:
    found = config.model_dump()
    for key, value in changed.items():
        found[key] = found[key] | value if isinstance(value, Mapping) else value
    return found
