"""`kvdefrag simulate`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvdefrag.cli.app import build_app
from kvdefrag.errors import KvdefragError
from kvdefrag.sim.arms import NAMES

ROOT = Path(__file__).parents[2]
SMALL = ("--limit", "20", "--pool-slots", "200000", "--processes", "1")
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["simulate", *map(str, arguments)])


def error_of(*arguments: object) -> str:
    """Return the message of the error that `main` prints for the user."""
    result = invoke(*arguments)
    assert isinstance(result.exception, KvdefragError), result.output
    return str(result.exception)


def breaks(value: Any, rule: dict[str, Any], where: str = "$") -> list[str]:
    """List where a value breaks the parts of JSON Schema that the schema uses."""
    found = [f"{where}: not {rule['const']}"] if value != rule.get("const", value) else []
    kinds = rule.get("type", list(TYPES))
    if not isinstance(
        value, tuple(TYPES[k] for k in ([kinds] if isinstance(kinds, str) else kinds))
    ):
        return [*found, f"{where}: not of {kinds}"]
    if isinstance(value, dict):
        known, other = rule.get("properties", {}), rule.get("additionalProperties", True)
        found += [f"{where}.{k}: missing" for k in rule.get("required", []) if k not in value]
        for key, inner in value.items():
            part = known.get(key, other)
            if part is False:
                found.append(f"{where}.{key}: unknown")
            elif part is not True:
                found += breaks(inner, part, f"{where}.{key}")
    if isinstance(value, list):
        for i, inner in enumerate(value):
            found += breaks(inner, rule.get("items", {}), f"{where}[{i}]")
    return found


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One run of all arms with every output."""
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    outputs = ("--json", out / "r.json", "--html", out / "r.html", "--trace-out", out / "t.json")
    return invoke(*SMALL, *outputs), out


def test_a_run_succeeds_and_says_what_it_wrote(everything: tuple[Result, Path]) -> None:
    result, out = everything

    assert result.exit_code == 0, result.output
    for name in ("r.json", "r.html", "t.json"):
        assert f"wrote {(out / name).resolve()}" in result.output.replace("\n", "")


def test_every_arm_is_in_the_table_by_name_however_narrow_the_terminal(
    everything: tuple[Result, Path],
) -> None:
    lines = everything[0].output.splitlines()

    assert all(any(line.split()[:1] == [name] for line in lines) for name in NAMES)
    assert any("coverage %" in line for line in lines)
    assert "Is relocation needed" in everything[0].output


def test_the_json_keeps_the_documented_schema(everything: tuple[Result, Path]) -> None:
    schema = json.loads((ROOT / "docs" / "simulate.schema.json").read_text(encoding="utf-8"))
    document = json.loads((everything[1] / "r.json").read_text(encoding="utf-8"))

    assert breaks(document, schema) == []
    assert [arm["name"] for arm in document["arms"]] == list(NAMES)
    assert {arm["metrics"]["requests_finished"] for arm in document["arms"]} == {20}


def test_the_checker_of_the_schema_finds_what_is_wrong(everything: tuple[Result, Path]) -> None:
    schema = json.loads((ROOT / "docs" / "simulate.schema.json").read_text(encoding="utf-8"))
    document = json.loads((everything[1] / "r.json").read_text(encoding="utf-8"))
    document["arms"][0]["metrics"]["mean_run"] = "long"
    document["extra"] = 1
    del document["verdict"]

    assert sorted(breaks(document, schema)) == [
        "$.arms[0].metrics.mean_run: not of ['number', 'null']",
        "$.extra: unknown",
        "$.verdict: missing",
    ]


def test_the_report_is_one_page_about_every_arm(everything: tuple[Result, Path]) -> None:
    text = (everything[1] / "r.html").read_text(encoding="utf-8")

    assert text.lower().startswith("<!doctype html>")
    assert all(name in text for name in NAMES)


def test_the_chrome_trace_has_a_process_for_each_arm(everything: tuple[Result, Path]) -> None:
    events = json.loads((everything[1] / "t.json").read_text(encoding="utf-8"))["traceEvents"]

    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == list(NAMES)
    assert {e["pid"] for e in events if e["ph"] == "X"} == set(names)


def test_wide_shows_every_metric() -> None:
    narrow, wide = (invoke("--limit", 2, "--arms", "stock", *more) for more in ((), ("--wide",)))

    assert "further metrics" in wide.output
    assert "further metrics" not in narrow.output


def test_a_policy_file_is_one_more_arm(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("relocation:\n  mode: 'off'\n", encoding="utf-8")

    result = invoke("--limit", 2, "--arms", "stock", "--config", path, "--processes", 1)

    assert any(line.split()[:1] == ["mine"] for line in result.output.splitlines())


def test_a_log_is_recorded_of_one_arm(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"

    result = invoke("--limit", 3, "--arms", "sorted", "--record", path)

    assert result.exit_code == 0, result.output
    header = json.loads(path.read_text(encoding="ascii").splitlines()[0])
    assert (header["event"], header["policy"]) == ("header", "sorted")


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    invoke("--limit", 2, "--arms", "stock")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arms", "stok"), "--arms: 'stok' is not one of stock, sorted"),
        (("--arms", "stock,stock"), "the arm 'stock' is given twice"),
        (("--page", "48"), "page: 48"),
        (("--window", "ten"), "--window 'ten' must be A:B in seconds"),
        (("--window", "9:3"), "--window 9.0:3.0 must have 0 <= begin < end"),
        (("--start", "-1"), "--start -1 must be at least 0"),
        (("--limit", "0"), "--limit 0 must be at least 1"),
        (("--rate-scale", "0"), "--rate-scale 0.0 must be finite and above 0"),
        (("--block", "0"), "--block 0 must be at least 1"),
        (("--prefix-jitter", "512"), "--prefix-jitter 512 must be in 0..511"),
        (("--format", "parquet"), "--format"),
        (("--format", "azure"), "--format azure needs --trace"),
        (("--unit", "s"), "--unit s does not go with --format mooncake"),
        (("--columns", "a=b"), "--columns 'a=b': 'a=b' is not one of"),
        (("--trace", "missing.jsonl"), "cannot read missing.jsonl"),
        (("--profile", "missing.json"), "profile: missing.json cannot be read"),
        (("--pool-slots", "0"), "pool_slots: 0 is not allowed"),
        (("--max-running", "0"), "max_running: 0 is not allowed"),
        (("--spec-window", "-1"), "spec_window: -1 is not allowed"),
        (("--config", "missing.yaml"), "missing.yaml"),
        (("--record", "log.jsonl"), "--record: 8 arms are chosen; name one of them in --arms"),
        (("--start", "5000"), "--start, --limit, --window: no request of the trace is left"),
    ],
)
def test_a_wrong_option_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)

    assert message in error_of(*arguments, "--processes", "1")
    assert list(tmp_path.iterdir()) == []
