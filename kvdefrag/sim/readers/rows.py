"""Turn one line of a file into a row, for JSONL and for CSV."""

from __future__ import annotations

import csv
import json
import re
from decimal import Decimal
from typing import Protocol

from kvdefrag.errors import TraceError
from kvdefrag.sim.readers.fields import arrival_ns, block_ids, token_count
from kvdefrag.sim.readers.formats import Format
from kvdefrag.sim.readers.request import Row

_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?")
_SEPARATORS = re.compile(r"[\s;|,]+")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowParser(Protocol):
    """Reads the lines of one file; `has_header` says whether the first is a header."""

    has_header: bool

    def read_header(self, line: str, row: int) -> None:
        """Learn where the columns are."""

    def parse(self, line: str, row: int) -> Row:
        """Return the row, or raise a TraceError that names row and field."""


def row_parser(declared: Format, block: int) -> RowParser:
    """Return a parser for a format; `block` is the number of tokens a hash id stands for."""
    if declared.container == "csv":
        return CsvRows(declared, block)
    return JsonRows(declared, block)


def decode_line(line: bytes, row: int) -> str:
    """Return the text of a line without its end, and without a byte order mark on line 1."""
    if row == 1 and line.startswith(_BYTE_ORDER_MARK):
        line = line[len(_BYTE_ORDER_MARK) :]
    try:
        return line.decode().strip("\r\n \t")
    except UnicodeDecodeError as error:
        raise TraceError(f"not UTF-8: {error.reason} at byte {error.start}", row=row) from None


class JsonRows:
    """Parser of one JSON object a line; keys it does not know are ignored."""

    has_header = False

    def __init__(self, declared: Format, block: int) -> None:
        self._columns = declared.columns
        self._unit = declared.unit
        self._block = block
        self._decoder = json.JSONDecoder(parse_float=Decimal, parse_constant=Decimal)

    def read_header(self, line: str, row: int) -> None:
        raise AssertionError("JSONL has no header")

    def parse(self, line: str, row: int) -> Row:
        try:
            fields = self._decoder.decode(line)
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise TraceError(f"not a JSON object: {error}", row=row) from None
        if not isinstance(fields, dict):
            raise TraceError(f"expected a JSON object, got {type(fields).__name__}", row=row)
        names = self._columns
        tokens = token_count(fields.get(names.input), row=row, field=names.input)
        return Row(
            arrival_ns(fields.get(names.arrival), self._unit, row=row, field=names.arrival),
            tokens,
            token_count(fields.get(names.output), row=row, field=names.output),
            None
            if names.blocks is None
            else block_ids(
                fields.get(names.blocks), tokens, self._block, row=row, field=names.blocks
            ),
        )


class CsvRows:
    """Parser of comma-separated lines under a header; columns it does not know are ignored."""

    has_header = True

    def __init__(self, declared: Format, block: int) -> None:
        self._columns = declared.columns
        self._unit = declared.unit
        self._block = block
        self._places: dict[str, int] = {}
        self._width = 0

    def read_header(self, line: str, row: int) -> None:
        header = _cells(line, row)
        names = self._columns
        for name in (names.arrival, names.input, names.output, names.blocks):
            if name is None:
                continue
            if header.count(name) != 1:
                fault = "not in the header" if name not in header else "twice in the header"
                raise TraceError(f"{fault} {','.join(header)!r}", row=row, field=name)
            self._places[name] = header.index(name)
        self._width = len(header)

    def parse(self, line: str, row: int) -> Row:
        cells = _cells(line, row)
        if len(cells) != self._width:
            raise TraceError(f"expected {self._width} cells, got {len(cells)}", row=row)
        names, places = self._columns, self._places
        when: object = cells[places[names.arrival]]
        if self._unit != "iso":
            when = _number(cells[places[names.arrival]])
        tokens = token_count(_number(cells[places[names.input]]), row=row, field=names.input)
        output = token_count(_number(cells[places[names.output]]), row=row, field=names.output)
        blocks = None
        if names.blocks is not None:
            listed = _id_list(cells[places[names.blocks]])
            blocks = block_ids(listed, tokens, self._block, row=row, field=names.blocks)
        arrival = arrival_ns(when, self._unit, row=row, field=names.arrival)
        return Row(arrival, tokens, output, blocks)


def _cells(line: str, row: int) -> list[str]:
    if '"' not in line:
        return [cell.strip() for cell in line.split(",")]
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise TraceError(f"not a CSV line: {error}", row=row) from None


def _number(cell: str) -> int | Decimal | str:
    """Return the number a cell holds, or the cell itself so that the refusal can show it."""
    if _WHOLE.fullmatch(cell):
        return int(cell)
    return Decimal(cell) if _NUMBER.fullmatch(cell) else cell


def _id_list(cell: str) -> list[int | Decimal | str]:
    """Return the ids in a cell: separated by blanks, `;`, `|` or `,`, in brackets or not."""
    inner = cell[1:-1] if cell.startswith("[") and cell.endswith("]") else cell
    return [_number(item) for item in _SEPARATORS.split(inner) if item]
