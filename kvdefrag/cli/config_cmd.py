"""`kvdefrag config show` and `kvdefrag config check FILE`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvdefrag.config import as_yaml, load_config, load_with_origins

app = typer.Typer(help="Show the settings in force, or check a file.", no_args_is_help=True)


@app.command()
def show(
    config: Annotated[
        Path | None, typer.Option(help="Settings file; without it the one KVDEFRAG_CONFIG names.")
    ] = None,
) -> None:
    """Print the settings in force as YAML, each with where it comes from."""
    loaded = load_with_origins(config, os.environ)

    def origin(key: str, _: object) -> str:
        return loaded.origins.get(key, "default")

    typer.echo(as_yaml(loaded.config, describe=False, remark=origin), nl=False)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Settings file.", show_default=False)],
) -> None:
    """Check a file by itself, whatever the environment holds; exit with 1 if it is refused."""
    load_config(file, {})
    typer.echo(f"{file}: ok")
