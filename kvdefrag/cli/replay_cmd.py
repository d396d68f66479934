"""`kvdefrag replay`: run a log of allocator events through other policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvdefrag.cli.output import write_result

if TYPE_CHECKING:
    from kvdefrag.core.host_event_log import EventLog
    from kvdefrag.sim.arms import Arm
    from kvdefrag.sim.results import RunResult

_OUTPUT = "Output"


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            help="Log of events, one JSON object a line; compressed if it ends in .gz.",
            show_default=False,
        ),
    ],
    page: Annotated[
        int | None, typer.Option(help="Slots to an aligned page; the recorded run's by default.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Device profile (JSON) that prices steps.")
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Comma-separated arms; all by default.")] = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="Policy file to run as one more arm; repeatable.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all figures as JSON.", rich_help_panel=_OUTPUT)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as one HTML file.", rich_help_panel=_OUTPUT),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show every metric.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Ask every policy for the slots that a recorded run asked for.

    A log comes from `kvdefrag simulate --record` or from a live server. Admissions, evictions and
    times are those of the recorded run; slots and relocations are each policy's own.
    """
    from kvdefrag.core.host_event_log import EventLog
    from kvdefrag.sim.arms import choose

    log = EventLog(file)
    names = arms.split(",") if arms else None
    chosen = choose(names, config or [], page=page or log.header.page)
    result = _run(log, chosen, file, profile)
    write_result(result, json=json, html=html, wide=wide)


def _run(log: EventLog, arms: list[Arm], file: Path, profile: Path | None) -> RunResult:
    from kvdefrag.sim.replay import replay as replay_log

    # Progress counts bytes of text; how many a compressed log holds is not known.
    total = None if file.suffix == ".gz" else file.stat().st_size
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("replaying", total=total)
        return replay_log(
            log,
            arms,
            path=file,
            profile=profile,
            progress=lambda position: bars.update(task, completed=position),
        )
