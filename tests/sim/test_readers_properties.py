"""Random requests, written in each format, are read back alike."""

from __future__ import annotations

import json
import tempfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag.sim.readers import Columns, TraceRequest, TraceSource, open_trace

BLOCK = 16
TICKS = 10**7  # of 100 ns, the resolution of the Azure traces
EPOCH = datetime(2023, 11, 16, 18, 15, 46)


class Written(NamedTuple):
    ticks: int
    input_tokens: int
    output_tokens: int
    blocks: list[int]


@st.composite
def written_row(draw: st.DrawFn) -> Written:
    tokens = draw(st.integers(0, 5 * BLOCK))
    count = -(-tokens // BLOCK)
    blocks = draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=count, max_size=count))
    ticks = draw(st.one_of(st.integers(0, 20), st.integers(0, 100_000 * TICKS)))
    return Written(ticks, tokens, draw(st.integers(0, 9)), blocks)


TRACES = st.lists(written_row(), min_size=1, max_size=12)
ENDINGS = st.sampled_from(["\n", "\r\n"])


def read(
    content: str, format: str, columns: Columns | None = None, unit: str | None = None
) -> tuple[TraceSource, list[TraceRequest]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content.encode())
        source = open_trace(path, format, block=BLOCK, columns=columns, unit=unit)
        return source, list(source)


def azure(rows: list[Written], ending: str) -> str:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for row in rows:
        whole, fraction = divmod(row.ticks, TICKS)
        stamp = f"{EPOCH + timedelta(seconds=whole)}.{fraction:07d}"
        lines.append(f"{stamp},{row.input_tokens},{row.output_tokens}")
    return ending.join(lines)


def vidur(rows: list[Written], ending: str) -> str:
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    for row in rows:
        whole, fraction = divmod(row.ticks, TICKS)
        lines.append(f"{whole}.{fraction:07d},{row.input_tokens},{row.output_tokens}")
    return ending.join([*lines, ""])


def by_arrival(rows: list[Written]) -> list[tuple[float, int, int]]:
    first = min(row.ticks for row in rows)
    return [
        ((row.ticks - first) * 100 / 10**9, row.input_tokens, row.output_tokens)
        for row in sorted(rows, key=lambda row: row.ticks)
    ]


@given(TRACES, ENDINGS)
@settings(deadline=None)
def test_azure_and_vidur_files_of_the_same_rows_give_identical_requests(
    rows: list[Written], ending: str
) -> None:
    azure_source, from_azure = read(azure(rows, ending), "azure")
    vidur_source, from_vidur = read(vidur(rows, ending), "vidur")

    assert from_azure == from_vidur
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in from_azure] == by_arrival(rows)
    assert (azure_source.unsorted, azure_source.duplicates) == (
        vidur_source.unsorted,
        vidur_source.duplicates,
    )


@given(TRACES)
@settings(deadline=None)
def test_seconds_written_by_a_float_library_are_read_as_the_ticks_they_stand_for(
    rows: list[Written],
) -> None:
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    lines += [f"{row.ticks / TICKS!r},{row.input_tokens},{row.output_tokens}" for row in rows]
    _, requests = read("\n".join(lines), "vidur")

    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in requests] == by_arrival(rows)


@given(TRACES, ENDINGS)
@settings(deadline=None)
def test_jsonl_and_csv_with_declared_columns_give_identical_requests(
    rows: list[Written], ending: str
) -> None:
    columns = Columns("at", "in", "out", "ids")
    objects = [
        json.dumps(
            {"at": r.ticks * 100, "in": r.input_tokens, "out": r.output_tokens, "ids": r.blocks}
        )
        for r in rows
    ]
    cells = ["in,ids,at,out"] + [
        f"{r.input_tokens},{' '.join(map(str, r.blocks))},{r.ticks * 100},{r.output_tokens}"
        for r in rows
    ]
    _, from_jsonl = read(ending.join(objects), "jsonl", columns, "ns")
    _, from_csv = read(ending.join(cells), "csv", columns, "ns")
    in_order = sorted(rows, key=lambda row: row.ticks)

    assert [r.row for r in from_jsonl] == [r.row - 1 for r in from_csv]
    assert [(r.arrival_s, r.input_tokens, r.output_tokens, r.blocks) for r in from_jsonl] == [
        (r.arrival_s, r.input_tokens, r.output_tokens, r.blocks) for r in from_csv
    ]
    assert [r.blocks for r in from_jsonl] == [tuple(row.blocks) for row in in_order]


@given(TRACES)
@settings(deadline=None)
def test_mooncake_milliseconds_are_the_nanoseconds_of_a_declared_jsonl(rows: list[Written]) -> None:
    def content(factor: int) -> str:
        return "\n".join(
            json.dumps(
                {
                    "timestamp": row.ticks * factor,
                    "input_length": row.input_tokens,
                    "output_length": row.output_tokens,
                    "hash_ids": row.blocks,
                }
            )
            for row in rows
        )

    columns = Columns("timestamp", "input_length", "output_length", "hash_ids")
    _, named = read(content(1), "mooncake")
    _, declared = read(content(1000), "jsonl", columns, "us")

    assert named == declared


@given(TRACES)
@settings(deadline=None)
def test_arrivals_never_fall_and_every_row_is_read_once(rows: list[Written]) -> None:
    source, requests = read(vidur(rows, "\n"), "vidur")
    arrivals = [request.arrival_s for request in requests]

    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert sorted(request.row for request in requests) == list(range(2, len(rows) + 2))
    assert len(source) == len(rows)
