"""Whether the plugin attaches to a server, and what stands in the way if it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from kvdefrag.operate.arguments import parse_arguments
from kvdefrag.operate.checks import (
    Finding,
    inspect_config,
    inspect_machine,
    inspect_sglang,
)
from kvdefrag.operate.server import Server, ServerError, plugin_states
from kvdefrag.sglang.refusal import Refusal
from kvdefrag.sglang.rules import argument_refusals, change_for, implied_refusals, version_refusal

_NO_ARGUMENTS = "no server arguments given: only a server, or its arguments, can tell"
_LOAD = (
    "install kvdefrag in the server's Python, set KVDEFRAG_ENABLED=1 in its environment, and "
    "restart it"
)


class Verdict(IntEnum):
    """The answer, which is also the exit code."""

    ATTACHES = 0
    WILL_NOT = 1
    CANNOT_TELL = 2


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and what it comes to.

    Attributes:
        findings: In the order in which they were looked at.
        verdict: The answer.
        summary: The answer in one sentence.
    """

    findings: tuple[Finding, ...]
    verdict: Verdict
    summary: str


def diagnose(
    environ: Mapping[str, str], *, arguments: str | None = None, server: Server | None = None
) -> Diagnosis:
    """Look at this machine and at a server, or at the arguments that one would be started with.

    Args:
        environ: The environment that the server has or would have.
        arguments: Its arguments as written; None if they are not known.
        server: A running server; then what it says counts, and not this environment.
    """
    if server is not None:
        # Nothing of this machine stands in the way of a server that may run elsewhere.
        findings = [
            replace(f, status="note", change="") if f.status == "stop" else f
            for f in inspect_machine()
        ]
        findings += _of_server(server)
        return _conclude(findings, "attached")
    findings = [*inspect_machine(), *inspect_sglang(environ), *inspect_config(environ)]
    findings += _of_arguments(arguments)
    return _conclude(
        findings, "attaches, as far as arguments tell; the model's pool is seen at start"
    )


def _of_arguments(text: str | None) -> Iterator[Finding]:
    if text is None:
        yield Finding("server arguments", _NO_ARGUMENTS, "unknown", "give --sglang-args or --url")
        return
    given = parse_arguments(text)
    refusals = [*argument_refusals(given.get), *implied_refusals(given.get)]
    yield from _stops(refusals)
    if not refusals:
        yield Finding("server arguments", "none is refused")


def _of_server(server: Server) -> Iterator[Finding]:
    try:
        info = server.info()
    except ServerError as error:
        yield Finding("server", str(error), "unknown", "check the address and the key")
        return
    version = str(info.get("version", "unknown"))
    refusal = version_refusal(version)
    yield from _stops([refusal] if refusal else [])
    if refusal is None:
        yield Finding("server", f"sglang {version} at {server.url}")
    refusals = list(argument_refusals(info.get))
    states = plugin_states(info)
    yield from _stops(refusals if not states else [])
    if not states and not refusals and refusal is None:
        yield Finding("plugin", "not loaded: the server shows nothing of kvdefrag", "stop", _LOAD)
    for rank, state in enumerate(states):
        name = "plugin" if len(states) == 1 else f"plugin, rank {rank}"
        yield _of_state(name, state)


def _of_state(name: str, state: Mapping[str, Any]) -> Finding:
    if state.get("active"):
        mode, control = state.get("mode"), state.get("control")
        described = (
            state.get("description") or f"kvdefrag {state.get('version')}, relocation {mode}"
        )
        return Finding(name, f"{described}; control {'on' if control else 'off'}")
    if state.get("error"):
        change = "relocation is off for good; see the log, restart the server"
        return Finding(name, f"stopped after a fault: {state['error']}", "stop", change)
    refused = str(state.get("refused"))
    return Finding(name, refused, "stop", change_for(refused) or "none: this is not supported")


def _stops(refusals: Iterable[Refusal]) -> Iterator[Finding]:
    for refusal in refusals:
        yield Finding("server arguments", str(refusal), "stop", refusal.change)


def _conclude(findings: list[Finding], good: str) -> Diagnosis:
    stops = [f for f in findings if f.status == "stop"]
    unknown = [f for f in findings if f.status == "unknown"]
    if stops:
        first = stops[0]
        change = f"; {first.change}" if first.change else ""
        own_words = first.name in ("server arguments", "plugin")
        found = first.found if own_words else f"{first.name}: {first.found}"
        summary = f"will not attach: {found}{change}"
        return Diagnosis(tuple(findings), Verdict.WILL_NOT, summary)
    if unknown:
        first = unknown[0]
        summary = f"cannot tell: {first.name}: {first.found}"
        return Diagnosis(tuple(findings), Verdict.CANNOT_TELL, summary)
    return Diagnosis(tuple(findings), Verdict.ATTACHES, good)
