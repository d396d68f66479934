"""`kvdefrag doctor`: whether the plugin attaches, and what stands in the way if not."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from kvdefrag.cli.connection import AdminKey, ApiKey, OptionalUrl, connect

if TYPE_CHECKING:
    from kvdefrag.operate.diagnosis import Diagnosis


def doctor(
    url: OptionalUrl = None,
    sglang_args: Annotated[
        str | None,
        typer.Option(help="Arguments that a server is to be started with, in one quoted text."),
    ] = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Say whether the plugin attaches to a server, and if not what to change.

    Exit code 0: it attaches. 1: it will not. 2: that cannot be told from here.
    """
    from kvdefrag.operate.checks import environment
    from kvdefrag.operate.diagnosis import diagnose

    server = connect(url, api_key, admin_key) if url else None
    found = diagnose(environment(), arguments=sglang_args, server=server)
    typer.echo(_as_json(found) if json else _as_table(found))
    raise typer.Exit(int(found.verdict))


def _as_table(found: Diagnosis) -> str:
    width = max(len(f.name) for f in found.findings)
    lines = []
    for finding in found.findings:
        lines.append(f"{finding.status:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.change:
            lines.append(f"{'':<7}  {'':<{width}}  -> {finding.change}")
    return "\n".join([*lines, "", f"kvdefrag {found.summary}"])


def _as_json(found: Diagnosis) -> str:
    content = {
        "verdict": found.verdict.name.lower(),
        "exit_code": int(found.verdict),
        "summary": found.summary,
        "findings": [finding.plain() for finding in found.findings],
    }
    return json_text.dumps(content, indent=2)
