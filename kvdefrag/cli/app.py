"""The `kvdefrag` command and its subcommands."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import typer

from kvdefrag import __version__
from kvdefrag.cli import config_cmd, control_cmds
from kvdefrag.errors import KvdefragError

# Each of these lives in `kvdefrag/cli/NAME_cmd.py` as a function NAME. All commands import torch
# and the simulator inside their function, so that `kvdefrag config` starts at once.
_COMMANDS = ("simulate", "replay", "advise", "doctor", "top")
_CONTROL = (control_cmds.compact, control_cmds.pause, control_cmds.resume, control_cmds.reload)


def build_app() -> typer.Typer:
    """Return the application with every subcommand that is installed."""
    app = typer.Typer(
        name="kvdefrag",
        help="See, prevent and repair the fragmentation of a page_size=1 KV cache.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    app.add_typer(config_cmd.app, name="config")
    for name in _COMMANDS:
        module = f"kvdefrag.cli.{name}_cmd"
        if importlib.util.find_spec(module):
            app.command(name)(getattr(importlib.import_module(module), name))
    for command in _CONTROL:
        app.command(command.__name__)(command)
    return app


def main() -> None:
    """Run the command line; an error that the user can mend is printed without a traceback."""
    try:
        build_app()()
    except KvdefragError as error:
        typer.echo(f"kvdefrag: {error}", err=True)
        sys.exit(1)


def _root(
    version: bool = typer.Option(
        False,
        "--version",
        is_eager=True,
        callback=lambda value: _show_version(asked=value),
        help="Print the version and leave.",
    ),
) -> None:
    """See, prevent and repair the fragmentation of a page_size=1 KV cache."""


def _show_version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"kvdefrag {__version__}")
        raise typer.Exit
