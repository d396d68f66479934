"""`kvdefrag simulate`: replay a trace through every arm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvdefrag.cli.output import write_result

if TYPE_CHECKING:
    from kvdefrag.sim.arms import Arm
    from kvdefrag.sim.options import RunOptions
    from kvdefrag.sim.results import RunResult

_TRACE = "Trace"
_ENGINE = "Engine model"
_OUTPUT = "Output"


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace to replay; by default the shipped first 1,200 requests of the Mooncake "
            "conversation trace.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    format: Annotated[
        str, typer.Option(help="mooncake, azure, vidur, csv or jsonl.", rich_help_panel=_TRACE)
    ] = "mooncake",
    columns: Annotated[
        str | None,
        typer.Option(
            help="For csv and jsonl: arrival=ts,input=prompt,output=gen[,blocks=ids].",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            help="For csv and jsonl, unit of the arrivals: s, ms, us, ns or iso.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    block: Annotated[
        int, typer.Option(help="Tokens that one hash id stands for.", rich_help_panel=_TRACE)
    ] = 512,
    start: Annotated[
        int, typer.Option(help="Requests to skip at the front.", rich_help_panel=_TRACE)
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(help="Requests to serve at most.", rich_help_panel=_TRACE)
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(help="Only arrivals from A to B seconds: A:B.", rich_help_panel=_TRACE),
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(help="Factor on the arrival rate.", rich_help_panel=_TRACE)
    ] = 1.0,
    prefix_jitter: Annotated[
        int,
        typer.Option(
            help="Shorten each shared block by up to so many tokens, so that prefixes end off "
            "page boundaries.",
            rich_help_panel=_TRACE,
        ),
    ] = 0,
    pool_slots: Annotated[
        int, typer.Option(help="KV slots in the pool.", rich_help_panel=_ENGINE)
    ] = 524_288,
    max_running: Annotated[
        int, typer.Option(help="Requests that run at once.", rich_help_panel=_ENGINE)
    ] = 64,
    page: Annotated[
        int, typer.Option(help="Slots to an aligned page.", rich_help_panel=_ENGINE)
    ] = 64,
    spec_window: Annotated[
        int,
        typer.Option(
            help="Draft tokens verified per request and step; 0 without speculation.",
            rich_help_panel=_ENGINE,
        ),
    ] = 0,
    profile: Annotated[
        Path | None,
        typer.Option(help="Device profile (JSON) that prices steps.", rich_help_panel=_ENGINE),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of accepted lengths and jitter.", rich_help_panel=_ENGINE)
    ] = 0,
    arms: Annotated[str | None, typer.Option(help="Comma-separated arms; all by default.")] = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="Policy file to run as one more arm; repeatable.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Arms run side by side; 0 for one per core.")] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write all figures as JSON.", rich_help_panel=_OUTPUT)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as one HTML file.", rich_help_panel=_OUTPUT),
    ] = None,
    trace_out: Annotated[
        Path | None,
        typer.Option(help="Write every step as a Chrome trace.", rich_help_panel=_OUTPUT),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Write the allocator events of the one arm that --arms names, for `kvdefrag "
            "replay`; compressed if it ends in .gz.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show every metric.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Replay a trace through every policy and say what each one buys."""
    from kvdefrag.sim.arms import choose
    from kvdefrag.sim.engine_types import EngineOptions
    from kvdefrag.sim.options import RunOptions, TraceOptions
    from kvdefrag.sim.readers import Columns, Selection, parse_window

    selection = Selection(start, limit, parse_window(window) if window else None, rate_scale)
    options = RunOptions(
        trace=TraceOptions(
            path=trace,
            format=format,
            block=block,
            columns=Columns.parse(columns) if columns else None,
            unit=unit,
            selection=selection,
        ),
        engine=EngineOptions(
            pool_slots=pool_slots, max_running=max_running, spec_window=spec_window, page=page
        ),
        prefix_jitter=prefix_jitter,
        profile=profile,
        seed=seed,
        slices=trace_out is not None,
        record=record,
    )
    chosen = choose(arms.split(",") if arms else None, config or [], page=page)
    result = _run(chosen, options, processes or os.cpu_count() or 1)
    write_result(result, json=json, html=html, trace_out=trace_out, wide=wide)


def _run(arms: list[Arm], options: RunOptions, processes: int) -> RunResult:
    from kvdefrag.errors import ConfigError
    from kvdefrag.sim.simulate import request_count, simulate

    total = request_count(options)
    if not total:
        raise ConfigError("--start, --limit, --window: no request of the trace is left")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = [bars.add_task(arm.name, total=total) for arm in arms]

        def advance(position: int, done: int) -> None:
            bars.update(tasks[position], completed=done)

        return simulate(arms, options, processes=processes, progress=advance)
