"""Each format gives the requests that its rows state, quirks of real files included."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.sim.readers import Columns, TraceRequest, TraceSource, open_trace

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"
PLAIN = Columns("ts", "prompt", "gen")


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def mooncake_row(**fields: object) -> str:
    row = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [7]}
    return json.dumps({**row, **fields}) + "\n"


def plain(folder: Path, content: str | bytes, unit: str = "ms") -> TraceSource:
    return open_trace(write(folder, content), "csv", columns=PLAIN, unit=unit)


def numbers(source: TraceSource) -> list[tuple[float, int, int]]:
    return [(r.arrival_s, r.input_tokens, r.output_tokens) for r in source]


# Formats


def test_mooncake_rows_are_read_with_milliseconds_and_hash_ids(tmp_path: Path) -> None:
    first = mooncake_row(timestamp=3000, input_length=600, hash_ids=[4, 9])
    source = open_trace(write(tmp_path, first + mooncake_row(timestamp=3027)), "mooncake")

    assert list(source) == [
        TraceRequest(0, 0.0, 600, 3, (4, 9), 1),
        TraceRequest(1, 0.027, 20, 3, (7,), 2),
    ]


def test_azure_rows_keep_seven_digits_of_fraction_and_crlf(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.6805901,374,44", "2023-11-16 18:15:50.9951692,396,109"]
    source = open_trace(write(tmp_path, "\r\n".join([AZURE_HEADER, *rows, ""])), "azure")

    assert numbers(source) == [(0.0, 374, 44), (4.3145791, 396, 109)]
    assert [request.row for request in source] == [2, 3]
    assert all(request.blocks is None for request in source)


@pytest.mark.parametrize(
    "stamp",
    [
        "2024-05-10 00:00:01+00:00",
        "2024-05-10T00:00:01Z",
        "2024-05-10 00:00:01.000000+00:00",
        "2024-05-10 02:00:01.0+0200",
        "2024-05-09 23:00:01-01:00",
    ],
)
def test_azure_time_stamps_may_carry_an_offset_or_no_fraction(tmp_path: Path, stamp: str) -> None:
    content = f"{AZURE_HEADER}\n2024-05-10 00:00:00.5,1,1\n{stamp},1,1\n"

    assert [r.arrival_s for r in open_trace(write(tmp_path, content), "azure")] == [0.0, 0.5]


def test_vidur_seconds_lose_the_noise_of_float_arithmetic(tmp_path: Path) -> None:
    content = f"{VIDUR_HEADER},pd_ratio\n0.0,91,16,5.6875\n5.8926549999999995,91,16,5.6875\n"

    assert numbers(open_trace(write(tmp_path, content), "vidur")) == [
        (0.0, 91, 16),
        (5.892655, 91, 16),
    ]


def test_azure_and_vidur_give_equal_requests_for_equal_rows(tmp_path: Path) -> None:
    azure = (
        f"{AZURE_HEADER}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,3,9"
    )
    vidur = f"{VIDUR_HEADER}\n0.0,374,44\n4.314579,3,9\n"
    from_azure = list(open_trace(write(tmp_path, azure), "azure"))
    from_vidur = list(open_trace(write(tmp_path, vidur), "vidur"))

    assert from_azure == from_vidur


@pytest.mark.parametrize(
    ("unit", "later"),
    [("s", "1.5"), ("ms", "1500"), ("us", "1.5e6"), ("ns", "1500000000")],
)
def test_a_plain_csv_is_read_in_its_declared_unit(tmp_path: Path, unit: str, later: str) -> None:
    source = plain(tmp_path, f"gen,ts,prompt\n5,0,10\n6,{later},20\n", unit)

    assert numbers(source) == [(0.0, 10, 5), (1.5, 20, 6)]


def test_a_plain_jsonl_is_read_with_its_declared_keys(tmp_path: Path) -> None:
    content = '{"ts": 0.25, "prompt": 513, "gen": 1, "ids": [1, 2], "user": "x"}\n'
    columns = Columns.parse("arrival=ts,input=prompt,output=gen,blocks=ids")
    (request,) = open_trace(write(tmp_path, content), "jsonl", columns=columns, unit="s")

    assert request == TraceRequest(0, 0.0, 513, 1, (1, 2), 1)


@pytest.mark.parametrize("cell", ["1 2", "1;2", "1|2", '"1,2"', '"[1, 2]"', "[1 2]"])
def test_hash_ids_in_a_csv_cell_may_be_separated_in_several_ways(tmp_path: Path, cell: str) -> None:
    columns = Columns("ts", "prompt", "gen", "ids")
    path = write(tmp_path, f"ts,prompt,gen,ids\n0,20,1,{cell}\n")
    (request,) = open_trace(path, "csv", columns=columns, unit="s", block=16)

    assert request.blocks == (1, 2)


def test_no_path_opens_the_embedded_slice() -> None:
    source = open_trace()
    first = next(iter(source))

    assert (source.name, source.format, len(source)) == (
        "mooncake_conversation_1200.jsonl",
        "mooncake",
        1200,
    )
    assert source.duration_s == 410.999
    assert (first.input_tokens, first.output_tokens, first.blocks) == (6758, 500, tuple(range(14)))


def test_the_source_states_name_format_and_checksum_of_the_file(tmp_path: Path) -> None:
    content = mooncake_row()
    source = open_trace(write(tmp_path, content), "mooncake")

    assert (source.name, source.format) == ("trace", "mooncake")
    assert source.sha256 == hashlib.sha256(content.encode()).hexdigest()


# Declarations


@pytest.mark.parametrize(
    ("format", "options", "named"),
    [
        ("csv", {"unit": "s"}, "--columns"),
        ("jsonl", {"unit": "s"}, "--columns"),
        ("csv", {"columns": PLAIN}, "--unit"),
        ("csv", {"columns": PLAIN, "unit": "min"}, "--unit"),
        ("parquet", {}, "--format"),
        ("mooncake", {"unit": "s"}, "--unit"),
        ("vidur", {"columns": PLAIN}, "--columns"),
        ("mooncake", {"block": 0}, "--block"),
    ],
)
def test_a_missing_or_wrong_declaration_names_its_option(
    tmp_path: Path, format: str, options: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        open_trace(write(tmp_path, "ts,prompt,gen\n0,1,1\n"), format, **options)  # type: ignore[arg-type]


def test_the_embedded_slice_is_not_read_in_another_format() -> None:
    with pytest.raises(ConfigError, match="--trace"):
        open_trace(None, "azure")


@pytest.mark.parametrize(
    "text",
    ["", "arrival=ts", "arrival=ts,input=a,output=", "arrival=t,arrival=u", "when=ts", "arrival"],
)
def test_a_wrong_column_declaration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--columns"):
        Columns.parse(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="absent"):
        open_trace(tmp_path / "absent.csv", "azure")


# Quirks that are survived


@pytest.mark.parametrize(
    "content",
    [
        "ts,prompt,gen\n5,1,2\n7,3,4",
        "ts,prompt,gen\r\n5,1,2\r\n7,3,4\r\n",
        "\ufeffts,prompt,gen\n5,1,2\n7,3,4\n",
        "\n\nts,prompt,gen\n\n5,1,2\n  \n7,3,4\n\n",
        " ts , prompt,gen\n5, 1,2 \n7,3,4\n",
        '"ts","prompt","gen"\n"5","1","2"\n7,3,4\n',
        "ts,prompt,gen\n+5,01,2\n7.0,3,4\n",
    ],
    ids=["no last newline", "crlf", "bom", "blank lines", "blanks", "quotes", "signs and zeros"],
)
def test_the_same_rows_are_read_however_they_are_written(tmp_path: Path, content: str) -> None:
    assert numbers(plain(tmp_path, content)) == [(0.0, 1, 2), (0.002, 3, 4)]


def test_a_byte_order_mark_and_crlf_do_not_disturb_jsonl(tmp_path: Path) -> None:
    lines = mooncake_row(timestamp=9).strip(), "", mooncake_row(timestamp=4).strip()
    source = open_trace(write(tmp_path, "\ufeff" + "\r\n".join(lines)), "mooncake")

    assert [(r.arrival_s, r.row) for r in source] == [(0.0, 3), (0.005, 1)]


def test_blank_lines_are_counted_and_row_numbers_are_line_numbers(tmp_path: Path) -> None:
    source = plain(tmp_path, "\nts,prompt,gen\n\n0,1,1\n \n1,1,1\n")

    assert source.blank == 3
    assert [request.row for request in source] == [4, 6]


def test_unsorted_rows_are_sorted_stably_and_counted(tmp_path: Path) -> None:
    source = plain(tmp_path, "ts,prompt,gen\n5,1,0\n3,2,0\n5,3,0\n3,4,0\n9,5,0\n")

    assert [request.input_tokens for request in source] == [2, 4, 1, 3, 5]
    assert [request.arrival_s for request in source] == [0.0, 0.0, 0.002, 0.002, 0.006]
    assert [request.index for request in source] == [0, 1, 2, 3, 4]
    assert source.unsorted == 2


def test_ties_keep_the_order_of_the_file_and_are_not_unsorted(tmp_path: Path) -> None:
    source = plain(tmp_path, "ts,prompt,gen\n" + "".join(f"7,{n},1\n" for n in range(50)))

    assert [request.input_tokens for request in source] == list(range(50))
    assert source.unsorted == 0


def test_many_unsorted_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    rows = "".join(f"{n % 3},{n},1\n" for n in range(600))
    source = plain(tmp_path, "ts,prompt,gen\n" + rows)

    assert [request.input_tokens for request in source] == sorted(range(600), key=lambda n: n % 3)


def test_duplicates_are_kept_and_counted(tmp_path: Path) -> None:
    content = "ts,prompt,gen,user\n0,1,1,a\n0,1,2,b\n0,1,1,c\n5,1,1,d\n0,1,1,e\n"
    source = plain(tmp_path, content)

    assert (source.rows, source.duplicates, len(list(source))) == (5, 2, 5)


def test_rows_that_differ_in_their_blocks_alone_are_not_duplicates(tmp_path: Path) -> None:
    rows = [mooncake_row(hash_ids=[-1]), mooncake_row(hash_ids=[-2]), mooncake_row(hash_ids=[-1])]

    assert open_trace(write(tmp_path, "".join(rows)), "mooncake").duplicates == 1


def test_zero_inputs_and_zero_outputs_are_kept_and_counted(tmp_path: Path) -> None:
    rows = [mooncake_row(input_length=0, hash_ids=[]), mooncake_row(output_length=0)]
    source = open_trace(write(tmp_path, "".join(rows)), "mooncake")

    assert (source.zero_inputs, source.zero_outputs) == (1, 1)
    assert [(r.input_tokens, r.output_tokens, r.blocks) for r in source] == [
        (0, 3, ()),
        (20, 0, (7,)),
    ]


@pytest.mark.parametrize("block_id", [2**64 - 1, 2**63, 2**53 + 1, -1, -(2**63), 0])
def test_hash_ids_of_64_bits_survive_exactly(tmp_path: Path, block_id: int) -> None:
    (request,) = open_trace(write(tmp_path, mooncake_row(hash_ids=[block_id])), "mooncake")

    assert request.blocks == (block_id,)


def test_case_73_a_request_longer_than_any_pool_is_read_like_any_other(tmp_path: Path) -> None:
    content = mooncake_row(input_length=9000, hash_ids=list(range(18)))
    (request,) = open_trace(write(tmp_path, content), "mooncake")

    assert request.input_tokens == 9000


def test_nanoseconds_of_a_present_day_epoch_are_not_rounded_by_a_float(tmp_path: Path) -> None:
    source = plain(
        tmp_path, "ts,prompt,gen\n1700158546.680590001,1,1\n1700158546.680590002,1,1\n", "s"
    )

    assert [request.arrival_s for request in source] == [0.0, 1e-9]


def test_times_before_the_origin_are_times(tmp_path: Path) -> None:
    source = plain(tmp_path, "ts,prompt,gen\n-1500,1,1\n-500,1,1\n")

    assert [request.arrival_s for request in source] == [0.0, 1.0]


# Quirks that are refused, by row and field


def test_case_68_a_hash_list_of_wrong_length_names_row_expected_and_got(tmp_path: Path) -> None:
    content = mooncake_row() + mooncake_row(input_length=20, hash_ids=[0, 1])

    with pytest.raises(TraceError, match=r"expected 1 ids .* got 2") as caught:
        open_trace(write(tmp_path, content), "mooncake", block=512)
    assert (caught.value.row, caught.value.field) == (2, "hash_ids")


def test_case_68_the_block_size_is_an_option(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake_row(input_length=20, hash_ids=[0, 1]))
    (request,) = open_trace(path, "mooncake", block=16)

    assert request.blocks == (0, 1)


@pytest.mark.parametrize("absent", ["", "null"], ids=["no key", "null"])
def test_case_71_a_missing_timestamp_is_an_error_and_never_zero(
    tmp_path: Path, absent: str
) -> None:
    stamp = f'"timestamp": {absent}, ' if absent else ""
    content = (
        mooncake_row() + f'{{{stamp}"input_length": 20, "output_length": 1, "hash_ids": [1]}}\n'
    )

    with pytest.raises(TraceError, match="row 2, field 'timestamp': missing"):
        open_trace(write(tmp_path, content), "mooncake")


def test_case_71_an_empty_timestamp_cell_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="row 3, field 'TIMESTAMP': missing"):
        open_trace(
            write(tmp_path, f"{AZURE_HEADER}\n2023-11-16 18:15:46.68,1,1\n,374,44\n"), "azure"
        )


def test_a_vidur_file_without_arrivals_names_the_column(tmp_path: Path) -> None:
    content = "num_prefill_tokens,num_decode_tokens,pd_ratio\n3772,54,69.85\n"

    with pytest.raises(TraceError, match="row 1, field 'arrived_at': not in the header"):
        open_trace(write(tmp_path, content), "vidur")


@pytest.mark.parametrize(
    "value", ["-1", "20.0", "2.5", "NaN", "Infinity", "true", '"20"', "[20]", "1e3", str(2**31)]
)
@pytest.mark.parametrize("field", ["input_length", "output_length"])
def test_a_length_that_is_not_a_whole_number_of_tokens_is_refused(
    tmp_path: Path, field: str, value: str
) -> None:
    good = mooncake_row().replace(
        f'"{field}": {20 if field[0] == "i" else 3}', f'"{field}": {value}'
    )

    with pytest.raises(TraceError) as caught:
        open_trace(write(tmp_path, good), "mooncake")
    assert (caught.value.row, caught.value.field) == (1, field)


@pytest.mark.parametrize("value", ["-1", "20.0", "nan", "inf", "1_000", "0x10", "", "٣"])
def test_a_length_cell_that_is_not_a_whole_number_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(TraceError) as caught:
        plain(tmp_path, f"ts,prompt,gen\n0,1,1\n1,{value},1\n")
    assert (caught.value.row, caught.value.field) == (3, "prompt")


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "true", '"5"', "[]", "1e30", "1e999999999", str(2**63)],
)
def test_a_time_that_is_not_a_finite_number_is_refused(tmp_path: Path, value: str) -> None:
    content = mooncake_row().replace('"timestamp": 0', f'"timestamp": {value}')

    with pytest.raises(TraceError) as caught:
        open_trace(write(tmp_path, content), "mooncake")
    assert (caught.value.row, caught.value.field) == (1, "timestamp")


@pytest.mark.parametrize(
    "stamp",
    [
        "1700158546.68",
        "2023-02-30 00:00:00",
        "2023-11-16",
        "2023-11-16 25:00:00",
        "2023-11-16 18:15:46.",
        "2023-11-16 18:15:46.1234567890",
        "16/11/2023 18:15:46",
        "2023-11-16 18:15:46+99:00",
        "1677-01-01 00:00:00",
    ],
)
def test_a_date_that_is_not_one_is_refused(tmp_path: Path, stamp: str) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(write(tmp_path, f"{AZURE_HEADER}\n{stamp},374,44\n"), "azure")
    assert (caught.value.row, caught.value.field) == (2, "TIMESTAMP")


@pytest.mark.parametrize(
    "ids", ["[1.0]", '["1"]', "[true]", f"[{2**64}]", f"[{-(2**63) - 1}]", "7"]
)
def test_hash_ids_that_are_not_64_bit_integers_are_refused(tmp_path: Path, ids: str) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(write(tmp_path, mooncake_row().replace("[7]", ids)), "mooncake")
    assert (caught.value.row, caught.value.field) == (1, "hash_ids")


def test_a_mooncake_row_without_hash_ids_is_refused(tmp_path: Path) -> None:
    content = mooncake_row() + mooncake_row(hash_ids=None)

    with pytest.raises(TraceError, match="row 2, field 'hash_ids': missing"):
        open_trace(write(tmp_path, content), "mooncake")


@pytest.mark.parametrize(
    "line",
    [
        b'{"timestamp": 1, "input_le',
        b"[1, 2]",
        b"garbage",
        b"\xff\xfe{\x00",
        b"[" * 200_000,
        b'{"timestamp": 1e' + b"9" * 40 + b"}",
        b'{"timestamp": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "list", "text", "utf-16", "deep", "exponent", "digits"],
)
def test_a_line_that_is_not_a_json_object_names_its_row(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(write(tmp_path, mooncake_row().encode() + line + b"\n"), "mooncake")
    assert caught.value.row == 2


@pytest.mark.parametrize("line", ["1,2", "1,2,3,4", '1,"2,3', '1,"2"x,3'])
def test_a_csv_line_of_another_shape_names_its_row(tmp_path: Path, line: str) -> None:
    with pytest.raises(TraceError) as caught:
        plain(tmp_path, f"ts,prompt,gen\n0,1,1\n{line}\n")
    assert caught.value.row == 3


def test_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="row 1, field 'ts': twice"):
        plain(tmp_path, "ts,ts,prompt,gen\n0,0,1,1\n")


@pytest.mark.parametrize("content", ["", "\n\n", "ts,prompt,gen\n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(TraceError, match="no request"):
        plain(tmp_path, content)
