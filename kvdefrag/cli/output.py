"""Prints a result and writes the files that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kvdefrag.sim.results import RunResult


def write_result(
    result: RunResult,
    *,
    json: Path | None = None,
    html: Path | None = None,
    trace_out: Path | None = None,
    wide: bool = False,
) -> None:
    """Print the tables and write each file whose path is given."""
    from kvdefrag.sim.report import print_result, write_chrome_trace, write_html, write_json
    from kvdefrag.sim.report.table import WIDTH

    console = Console()
    if console.width < WIDTH:
        # Lines that wrap can still be read; columns squeezed to nothing cannot.
        console = Console(width=WIDTH)
    print_result(result, console, wide=wide)
    for path, write in ((json, write_json), (html, write_html), (trace_out, write_chrome_trace)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(result, path)
            typer.echo(f"wrote {path.resolve()}")
