"""`kvdefrag advise`: record a live server for a while, and say which policy fits its load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvdefrag.cli.connection import AdminKey, ApiKey, OptionalUrl, connect

if TYPE_CHECKING:
    from kvdefrag.operate.advice import Advice

_GRACE_S = 60.0


def advise(
    file: Annotated[
        Path | None,
        typer.Argument(help="A recording; without it, --url is recorded.", show_default=False),
    ] = None,
    url: OptionalUrl = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="With --url: how long to record.")] = 60,
    out: Annotated[Path | None, typer.Option(help="Write the settings to this file.")] = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="Policy file to try as well; repeatable.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Device profile (JSON) that prices steps.")
    ] = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Replay what a server's allocator did under every policy, rank them, suggest settings.

    A live server records on its own disk; where that is another machine, copy the file that is
    named and give it as FILE.
    """
    from kvdefrag.errors import ConfigError
    from kvdefrag.operate.advice import advise as judge

    if (file is None) == (url is None):
        raise ConfigError("FILE, --url: give one of them")
    found = [file] if file is not None else _record(str(url), seconds, api_key, admin_key)
    for path in found:
        columns = (TextColumn("replaying"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        total = None if path.suffix == ".gz" else path.stat().st_size
        with Progress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task("", total=total)
            advice = judge(
                path,
                files=config or [],
                profile=profile,
                progress=lambda position, task=task: bars.update(task, completed=position),  # type: ignore[misc]
            )
        if len(found) > 1:
            typer.echo(f"{path}:")
        _show(advice)
        if out is not None:
            out.write_text(advice.settings, encoding="utf-8")
            typer.echo(f"wrote {out}")
        out = None


def _record(url: str, seconds: float, api_key: str | None, admin_key: str | None) -> list[Path]:
    from kvdefrag.control.command import decode_fields
    from kvdefrag.operate.server import ServerError
    from kvdefrag.operate.steer import new_id, steer

    server = connect(url, api_key, admin_key)
    command = decode_fields({"id": new_id(), "action": "record", "seconds": seconds})
    typer.echo(f"recording {server.url} for {seconds:g} s", err=True)
    answers = steer(server, command, wait_s=seconds + _GRACE_S)
    found = [Path(answer["path"]) for answer in answers if "path" in answer]
    for path in found:
        typer.echo(f"recorded {path}", err=True)
    if not all(path.exists() for path in found):
        names = ", ".join(map(str, found))
        raise ServerError(f"{names}: on the server's machine; copy it here and give it as FILE")
    return found


def _show(advice: Advice) -> None:
    typer.echo(
        f"{'policy':<24}{'coverage %':>11}{'p10 %':>8}{'reserved %':>12}{'moved/token':>13}"
        f"{'gain %':>8}"
    )
    for r in advice.ranked:
        gain = "-" if r.gain is None else f"{r.gain:.2f}"
        typer.echo(
            f"{r.name:<24}{r.coverage:>11.2f}{r.p10:>8.2f}{r.reserved:>12.2f}{r.moved:>13.3f}"
            f"{gain:>8}"
        )
    typer.echo(f"\nuse {advice.reason}\n")
    for warning in advice.warnings:
        typer.echo(f"note: {warning}")
    typer.echo(f"\n{advice.settings}", nl=False)
