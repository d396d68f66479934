"""`kvdefrag top`: how a live server stands, again and again."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvdefrag.cli.connection import AdminKey, ApiKey, Url, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdefrag.operate.server import Server


def top(
    url: Url,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print and leave.")] = False,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Show pool, layout, moves and reasons of a live server; end with Ctrl-C."""
    server = connect(url, api_key, admin_key)
    frames = _frames(server, every)
    if once:
        typer.echo(next(frames))
        return
    with suppress(KeyboardInterrupt):
        _show(frames)


def _frames(server: Server, every: float) -> Iterator[str]:
    from kvdefrag.operate.glance import Glance, lines_of, served

    before = None
    while True:
        now = Glance.now(server.states(), served(server.metrics() or ""))
        yield "\n".join(lines_of(server.url, now, before))
        before = now
        time.sleep(every)


def _show(frames: Iterator[str]) -> None:
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        for frame in frames:
            clear = "\x1b[2J\x1b[H" if sys.stdout.isatty() else ""
            typer.echo(clear + frame)
        return
    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        for frame in frames:
            live.update(Text(frame), refresh=True)
