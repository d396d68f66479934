"""The result as tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdefrag.sim.metric import Better, Metric
from kvdefrag.sim.metrics import METRICS, value
from kvdefrag.sim.results import ArmResult, RunResult

WIDTH = 120
NAME = 24
TITLE = 10
NOTE = (
    "coverage: share of tokens in aligned pages, mean and p10 over time; moved: rows copied per "
    "decoded token; tokens/s: modelled from the cost profile"
)
BOUND = "packed"


def print_result(result: RunResult, console: Console, *, wide: bool = False) -> None:
    """Print the decisive table, verdict and warnings; with `wide` every other metric as well."""
    console.print(summary_table(result))
    console.print(_note("  ", NOTE, style="dim"))
    if wide:
        for table in detail_tables(result):
            console.print(table)
    for sentence in result.verdict:
        console.print(_note("- ", sentence))
    for sentence in result.warnings:
        console.print(_note("! ", sentence, style="yellow"))


def summary_table(result: RunResult) -> Table:
    """Make the table of decisive metrics, an arm to a row; fits in 120 columns."""
    title = f"{result.trace.get('name', 'trace')}: decisive metrics per arm"
    return _table(title, result.arms, [metric for metric in METRICS if metric.decisive])


def detail_tables(result: RunResult) -> Iterator[Table]:
    """Yield tables of all other metrics, each of which fits in 120 columns."""
    rest = [metric for metric in METRICS if not metric.decisive]
    columns = 8
    for start in range(0, len(rest), columns):
        yield _table("further metrics", result.arms, rest[start : start + columns])


def best_arms(arms: Sequence[ArmResult], metric: Metric) -> set[str]:
    """Name the arms that show the best value of a metric, leaving out the bound `packed`.

    Empty where no direction is better, where all arms show the same, or where the best is zero:
    that an arm spends nothing is no merit by itself.
    """
    if metric.better is Better.NEITHER:
        return set()
    found = {
        arm.name: number
        for arm in arms
        if arm.name != BOUND and (number := value(arm.metrics, metric.name)) is not None
    }
    if len({metric.text(number) for number in found.values()}) < 2:
        return set()
    pick = max if metric.better is Better.HIGHER else min
    if pick(found.values()) == 0:
        return set()
    best = metric.text(pick(found.values()))
    return {name for name, number in found.items() if metric.text(number) == best}


def _table(title: str, arms: Sequence[ArmResult], metrics: Iterable[Metric]) -> Table:
    columns = list(metrics)
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    names = max((cell_len(arm.name) for arm in arms), default=0)
    table.add_column("arm", overflow="fold", min_width=min(names, NAME), max_width=NAME)
    for metric in columns:
        title = "\n".join(textwrap.wrap(metric.title, TITLE, break_long_words=False))
        table.add_column(Text(title), justify="right", vertical="bottom", no_wrap=True)
    best = [best_arms(arms, metric) for metric in columns]
    for arm in arms:
        cells = [
            Text(
                metric.text(arm.metrics.get(metric.name)),
                style="bold green" if arm.name in winners else "",
            )
            for metric, winners in zip(columns, best, strict=True)
        ]
        table.add_row(Text(arm.name), *cells, style="dim" if arm.name == BOUND else "")
    return table


def _note(mark: str, sentence: str, style: str = "") -> Table:
    grid = Table.grid(padding=0)
    grid.add_column(width=len(mark))
    grid.add_column(max_width=WIDTH - len(mark))
    grid.add_row(Text(mark, style=style), Text(sentence, style=style))
    return grid
