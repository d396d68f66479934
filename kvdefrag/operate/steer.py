"""Sends a command to every rank of a server and waits until each has said how it went."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from kvdefrag.control.command import Command
from kvdefrag.operate.server import Server, ServerError

_EVERY_S = 0.1


def new_id() -> str:
    """Return an id that no other command has."""
    return secrets.token_hex(6)


def steer(
    server: Server,
    command: Command,
    *,
    wait_s: float,
    each: Callable[[list[dict[str, Any]]], None] = lambda answers: None,
) -> list[dict[str, Any]]:
    """Send a command; return what became of it on each data-parallel rank.

    Args:
        server: Where to.
        command: What.
        wait_s: Seconds to wait until all ranks are done.
        each: Called with the answers so far, every time they are looked at.

    Raises:
        ServerError: Control is off, a rank refuses, or time has run out.
    """
    states = server.states()
    _check_control(server, states)
    taken = server.set_internal_state(command.encode())
    until = time.monotonic() + wait_s
    while True:
        answers = [_answer(state, command.id) for state in server.states()]
        each(answers)
        if not any(taken) and all(a["status"] == "waiting" for a in answers):
            raise ServerError(f"{server.url}: the kvdefrag there does not know this command")
        wrong = [a for a in answers if a["status"] in ("refused", "failed")]
        if wrong:
            raise ServerError(
                "\n".join(_in_words(answers.index(a), a, len(answers)) for a in wrong)
            )
        if all(a["status"] == "done" for a in answers):
            return answers
        if time.monotonic() > until:
            raise ServerError(
                f"{server.url}: {command.action} is not done after {wait_s:g} s; it goes on, and "
                "`kvdefrag top` shows how the server stands"
            )
        time.sleep(_EVERY_S)


def _check_control(server: Server, states: list[dict[str, Any]]) -> None:
    for state in states:
        if not state.get("active"):
            why = state.get("error") or state.get("refused")
            raise ServerError(f"{server.url}: kvdefrag is not active there: {why}")
        if state.get("control") is None:
            raise ServerError(
                f"{server.url}: control is off there; start the server with "
                "KVDEFRAG_CONTROL__ENABLED=1 in its environment"
            )


def _answer(state: dict[str, Any], name: str) -> dict[str, Any]:
    commands = (state.get("control") or {}).get("commands") or []
    found = [c for c in commands if c.get("id") == name]
    return dict(found[-1]) if found else {"id": name, "status": "waiting"}


def _in_words(rank: int, answer: dict[str, Any], ranks: int) -> str:
    where = f"rank {rank}: " if ranks > 1 else ""
    return f"{where}{answer['status']}: {answer.get('said', 'no reason given')}"
