"""A selection takes a part of a trace and rebases its arrivals."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdefrag.errors import ConfigError
from kvdefrag.sim.readers import Selection, TraceRequest, open_trace, parse_window


def requests(count: int, gap: float = 0.1) -> Iterator[TraceRequest]:
    for index in range(count):
        yield TraceRequest(index, round(index * gap, 9), 10 + index, 5, None, index + 1)


def test_the_default_selection_changes_nothing() -> None:
    assert list(Selection().apply(requests(20))) == list(requests(20))


def test_start_and_limit_renumber_and_rebase_but_keep_the_row() -> None:
    chosen = list(Selection(start=3, limit=2).apply(requests(20)))

    assert [(r.index, r.arrival_s, r.input_tokens, r.row) for r in chosen] == [
        (0, 0.0, 13, 4),
        (1, 0.1, 14, 5),
    ]


@given(st.integers(0, 10**14), st.integers(0, 10**14))
def test_rebased_arrivals_are_exact_to_the_nanosecond(first_ns: int, gap_ns: int) -> None:
    trace = [
        TraceRequest(0, first_ns / 10**9, 1, 1, None, 1),
        TraceRequest(1, (first_ns + gap_ns) / 10**9, 1, 1, None, 2),
    ]

    assert [r.arrival_s for r in Selection().apply(trace)] == [0.0, gap_ns / 10**9]


def test_a_window_is_half_open_and_counts_from_the_first_arrival() -> None:
    chosen = list(Selection(window=(0.5, 0.8)).apply(requests(20)))

    assert [r.input_tokens for r in chosen] == [15, 16, 17]
    assert [r.arrival_s for r in chosen] == [0.0, 0.1, 0.2]


def test_start_and_limit_count_within_the_window() -> None:
    chosen = list(Selection(start=1, limit=1, window=(0.5, math.inf)).apply(requests(20)))

    assert [r.input_tokens for r in chosen] == [16]


def test_a_rate_scale_of_two_halves_the_gaps() -> None:
    chosen = list(Selection(start=1, limit=3, rate_scale=2).apply(requests(20)))

    assert [r.arrival_s for r in chosen] == [0.0, 0.05, 0.1]


def test_nothing_is_read_beyond_the_limit_or_the_window() -> None:
    def endless() -> Iterator[TraceRequest]:
        yield from requests(20)
        raise AssertionError("read too far")

    assert len(list(Selection(start=5, limit=15).apply(endless()))) == 15
    assert len(list(Selection(window=(0.0, 1.9)).apply(endless()))) == 19


def test_a_selection_beyond_the_trace_is_empty() -> None:
    assert list(Selection(start=20).apply(requests(20))) == []


def test_selections_compose() -> None:
    inner = Selection(start=2)
    outer = Selection(start=3, limit=4, rate_scale=4)

    assert list(outer.apply(inner.apply(requests(20)))) == list(
        Selection(start=5, limit=4, rate_scale=4).apply(requests(20))
    )


def test_case_67_a_slice_of_a_ramping_trace_can_start_where_the_load_is() -> None:
    quiet = [TraceRequest(n, 30.0 * n, 100, 10, None, n + 1) for n in range(400)]
    busy = [TraceRequest(400 + n, 12_000 + n / 10, 100, 10, None, 401 + n) for n in range(400)]
    from_start = list(Selection(start=400, limit=400).apply(quiet + busy))
    from_window = list(Selection(window=(12_000, 12_040)).apply(quiet + busy))

    assert from_start == from_window
    assert from_start[-1].arrival_s == pytest.approx(39.9)


def test_the_embedded_slice_can_be_cut() -> None:
    source = open_trace()
    chosen = list(Selection(start=1190, limit=100).apply(source))

    assert len(chosen) == 10
    assert chosen[0].arrival_s == 0.0
    assert chosen[-1].row == 1200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"start": -1}, "--start"),
        ({"limit": 0}, "--limit"),
        ({"window": (5.0, 5.0)}, "--window"),
        ({"window": (-1.0, 5.0)}, "--window"),
        ({"window": (math.nan, 5.0)}, "--window"),
        ({"rate_scale": 0.0}, "--rate-scale"),
        ({"rate_scale": math.inf}, "--rate-scale"),
    ],
)
def test_a_selection_out_of_range_names_its_option(options: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Selection(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("600:1200", (600.0, 1200.0)),
        ("0.5:", (0.5, math.inf)),
        (":60", (0.0, 60.0)),
    ],
)
def test_a_window_is_written_with_a_colon(text: str, window: tuple[float, float]) -> None:
    assert parse_window(text) == window


@pytest.mark.parametrize("text", ["", "600", "a:b", "1:2:3", "1-2"])
def test_a_window_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--window"):
        parse_window(text)
