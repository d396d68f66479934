"""`kvdefrag compact`, `pause`, `resume` and `reload`: steering a live server."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdefrag.cli.connection import AdminKey, ApiKey, Url, connect

if TYPE_CHECKING:
    from kvdefrag.operate.server import Server

_WAIT_S = 60.0


class How(Enum):
    """Ways to compact."""

    tenure = "tenure"
    evacuate = "evacuate"
    lower = "lower"
    gather = "gather"


def compact(
    url: Url,
    how: Annotated[
        How,
        typer.Option(
            help="tenure: decoded tokens into whole pages. evacuate: empty the sparsest pages. "
            "lower: free the top of the pool. gather: lay one request into neighbouring pages."
        ),
    ] = How.tenure,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows to move at most; all that it finds by default.")
    ] = None,
    request: Annotated[str | None, typer.Option(help="For gather: id of the request.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would move and what for; move nothing.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the result.")] = _WAIT_S,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Move rows now, on every data-parallel rank, between two steps of the scheduler."""
    fields = {"how": how.value, "rows": rows, "request": request, "dry_run": dry_run}
    server = connect(url, api_key, admin_key)
    for rank, answer in enumerate(answers := _ask(server, "compact", wait, fields)):
        typer.echo(_effect(answer, f"rank {rank}: " if len(answers) > 1 else ""))


def pause(url: Url, api_key: ApiKey = None, admin_key: AdminKey = None) -> None:
    """Let no row be moved until `resume`; new tokens are placed as before."""
    _say(_ask(connect(url, api_key, admin_key), "pause", _WAIT_S), "paused")


def resume(url: Url, api_key: ApiKey = None, admin_key: AdminKey = None) -> None:
    """Let rows be moved again."""
    _say(_ask(connect(url, api_key, admin_key), "resume", _WAIT_S), "resumed")


def reload(
    file: Annotated[Path, typer.Argument(help="Settings file.", show_default=False)],
    url: Url,
    after_steps: Annotated[
        int, typer.Option(min=0, help="Steps between arrival and the first step under it.")
    ] = 0,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Use another policy from a file, without a restart.

    What the file leaves out is as it was when the server started. The server is sent the content:
    it reads no file. Only kill_switch, relocation and consumers can change in a live server.
    """
    from kvdefrag.config import load_config
    from kvdefrag.config.yaml_file import read_yaml

    load_config(file, {})
    fields = {"settings": read_yaml(file), "after_steps": after_steps}
    _say(_ask(connect(url, api_key, admin_key), "reload", _WAIT_S, fields), "reloaded")


def _ask(
    server: Server, action: str, wait_s: float, fields: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    from kvdefrag.control.command import decode_fields
    from kvdefrag.operate.steer import new_id, steer

    command = decode_fields({"id": new_id(), "action": action} | (fields or {}))
    return steer(server, command, wait_s=wait_s)


def _say(answers: list[dict[str, Any]], done: str) -> None:
    for rank, answer in enumerate(answers):
        where = f"rank {rank}: " if len(answers) > 1 else ""
        typer.echo(f"{where}{done}, active from step {answer['active_from']}")


def _effect(answer: dict[str, Any], where: str) -> str:
    before, after = answer["before"], answer["after"]
    verb = "would move" if answer["dry_run"] else "moved"
    lines = [f"{where}{answer['how']} {verb} {answer['rows']:,} rows, {answer['bytes']:,} bytes"]
    lines.append(f"{'':<18}{'before':>12}{'after':>12}")
    for name, title in (
        ("coverage", "page coverage"),
        ("runs", "runs"),
        ("whole_free_pages", "whole free pages"),
        ("tokens", "tokens"),
    ):
        lines.append(f"{title:<18}{_figure(before[name]):>12}{_figure(after[name]):>12}")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
