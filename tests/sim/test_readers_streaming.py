"""A source reads its file line by line, as often as wanted, in little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from kvdefrag.errors import TraceError
from kvdefrag.sim.readers import Columns, index, open_trace

PLAIN = Columns("ts", "prompt", "gen")


def write_rows(path: Path, rows: int, *, unsorted: bool) -> Path:
    with path.open("w") as file:
        file.write("ts,prompt,gen,padding\n")
        for number in range(rows):
            when = (number * 7919) % rows if unsorted else number
            file.write(f"{when},{number % 1000},7,{'x' * 200}\n")
    return path


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        for _ in open_trace(path, "csv", columns=PLAIN, unit="ms"):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("unsorted", [False, True], ids=["sorted", "unsorted"])
def test_memory_grows_by_the_index_alone_and_not_by_the_rows(
    tmp_path: Path, unsorted: bool
) -> None:
    small = peak_bytes(write_rows(tmp_path / "small", 1_000, unsorted=unsorted))
    large = peak_bytes(write_rows(tmp_path / "large", 13_000, unsorted=unsorted))

    # A request as an object takes over 200 bytes, its line over 210; a million rows at 100 bytes
    # are 100 MB.
    assert (large - small) / 12_000 < 100


def test_a_source_can_be_iterated_again_and_by_two_readers_at_once(tmp_path: Path) -> None:
    source = open_trace(
        write_rows(tmp_path / "trace", 50, unsorted=True), "csv", columns=PLAIN, unit="ms"
    )
    together = list(zip(source, source, strict=True))

    assert [left for left, _ in together] == [right for _, right in together] == list(source)


def test_rows_read_by_offset_are_the_rows_that_were_sorted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "trace", 1_000, unsorted=True)
    source = open_trace(path, "csv", columns=PLAIN, unit="ms")
    stated = [line.split(",")[:2] for line in path.read_text().splitlines()[1:]]

    assert source.unsorted > 0
    for request in source:
        when, prompt = stated[request.row - 2]
        assert (request.arrival_s, request.input_tokens) == (int(when) / 1000, int(prompt))


def test_a_file_that_changes_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("ts,prompt,gen\n0,1,1\n5,1,1\n")
    source = open_trace(path, "csv", columns=PLAIN, unit="ms")
    path.write_text("ts,prompt,gen\n0,1,1\n6,1,1\n")

    with pytest.raises(TraceError, match="row 3: the file has changed"):
        list(source)


def test_a_line_without_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MAX_LINE", 64)
    path = tmp_path / "trace"
    path.write_text("ts,prompt,gen\n0,1,1\n" + " " * 65)

    with pytest.raises(TraceError, match="row 3: longer than 64 bytes"):
        open_trace(path, "csv", columns=PLAIN, unit="ms")
