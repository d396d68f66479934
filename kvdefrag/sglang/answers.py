"""How the latest commands went, as the server's state shows it."""

from __future__ import annotations

from typing import Any

from kvdefrag.control.command import Command

_KEPT = 32


class Answers:
    """Keeps what became of the latest commands.

    Each is shown with `id`, `action`, `status` (`waiting`, `done`, `refused` or `failed`), the
    step at which it came, and what else is known of it. Other threads may add to it.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = {}

    def open(self, command: Command, step: int) -> None:
        """Note that a command has come; its id is not known yet."""
        while len(self._found) >= _KEPT:
            self._found.pop(next(iter(self._found)))
        shown = {"id": command.id, "action": command.action, "status": "waiting", "came_at": step}
        if command.action == "compact":
            shown |= {"how": command.how, "dry_run": command.dry_run}
        self._found[command.id] = shown

    def known(self, name: str) -> bool:
        """Say whether a command of this id has come before."""
        return name in self._found

    def add(self, name: str, **facts: Any) -> None:
        """Note what is known of a command."""
        if name in self._found:
            self._found[name] = self._found[name] | facts

    def close(self, name: str, **facts: Any) -> None:
        """Note that a command is done."""
        self.add(name, status="done", **facts)

    def refuse(self, name: str, why: str) -> None:
        """Note that a command is not served."""
        if self._found.get(name, {}).get("status") == "waiting":
            self.add(name, status="refused", said=why)

    def fail(self, name: str, why: str) -> None:
        """Note that a command has come to nothing."""
        self.add(name, status="failed", said=why)

    def fail_all(self, why: str) -> None:
        """Note that what still waits will not be done."""
        for name, shown in list(self._found.items()):
            if shown["status"] == "waiting":
                self.fail(name, why)

    def plain(self) -> list[dict[str, Any]]:
        """Return them in plain values, oldest first."""
        return [dict(shown) for shown in list(self._found.values())]
