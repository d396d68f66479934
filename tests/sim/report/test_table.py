from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from kvdefrag.sim.metrics import METRICS, get
from kvdefrag.sim.report.table import best_arms, print_result


def printed(result, *, wide=False, width=120, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_result(result, Console(file=file, width=width), wide=wide)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("wide", [False, True])
def test_everything_fits_in_120_columns(make_result, wide):
    text = printed(make_result(), wide=wide)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "placement+reservation " in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_every_metric_is_in_one_of_the_tables(make_result):
    text = printed(make_result(), wide=True)
    words = re.sub(r"\s+", " ", text)
    for metric in METRICS:
        for word in metric.title.split():
            assert word in words


def test_decisive_numbers_and_notes_are_printed(make_result):
    text = printed(make_result())
    stock = next(line for line in text.splitlines() if line.split()[:1] == ["stock"])
    assert "40.80" in stock
    assert "14.10" in stock
    assert "- Sorting adds something." in text
    assert "! The pool was nearly empty." in text
    assert "peak" not in text


def test_a_dumb_terminal_gets_plain_ascii(make_result):
    text = printed(make_result(), wide=True, encoding="ascii")
    assert "\x1b" not in text


def test_markup_in_names_is_printed_as_it_is(make_result):
    result = make_result()
    arm = dataclasses.replace(result.arms[0], name="[red]x[/red]")
    text = printed(dataclasses.replace(result, arms=(arm,), verdict=("[bold]y",)))
    assert "[red]x[/red]" in text
    assert "[bold]y" in text


def test_a_result_without_arms_still_prints(make_result):
    assert "coverage" in printed(dataclasses.replace(make_result(), arms=()), wide=True)


def test_best_leaves_out_the_bound_and_knows_the_direction(make_arm):
    arms = [
        make_arm("stock", mean_run=2.0, runs_per_4096=2048.0),
        make_arm("sorted", mean_run=5.0, runs_per_4096=820.0),
        make_arm("packed", mean_run=9000.0, runs_per_4096=1.0),
    ]
    assert best_arms(arms, get("mean_run")) == {"sorted"}
    assert best_arms(arms, get("runs_per_4096")) == {"sorted"}


def test_nothing_is_best_where_all_are_equal_or_none_spends_anything(make_arm):
    arms = [
        make_arm("a", mean_run=2.0, bytes_moved=0.0),
        make_arm("b", mean_run=2.0, bytes_moved=5),
    ]
    assert best_arms(arms, get("mean_run")) == set()
    assert best_arms(arms, get("bytes_moved")) == set()
    assert best_arms(arms, get("steps")) == set()
