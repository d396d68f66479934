"""What `kvdefrag doctor` says, and its exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvdefrag.cli.app import build_app
from kvdefrag.errors import ConfigError
from kvdefrag.operate import checks, diagnosis
from kvdefrag.operate.arguments import parse_arguments
from kvdefrag.operate.server import Server
from kvdefrag.sglang import rules

ON = {"KVDEFRAG_ENABLED": "1"}
VERSIONS = {"sglang": "0.5.23", "torch": "2.9.0", "triton": "3.5.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Packages that this Python seems to have; to be changed."""
    found = dict(VERSIONS)
    monkeypatch.setattr(checks, "_version", found.get)
    point = type("Point", (), {"name": "kvdefrag"})
    monkeypatch.setattr(checks.importlib.metadata, "entry_points", lambda group: [point])
    return found


def diagnose(arguments: str | None = "", environ: dict[str, str] | None = None) -> Any:
    return diagnosis.diagnose(ON if environ is None else environ, arguments=arguments)


def stops(found: Any) -> list[tuple[str, str]]:
    return [(f.found, f.change) for f in found.findings if f.status == "stop"]


@pytest.mark.usefixtures("installed")
def test_a_server_with_nothing_in_the_way_attaches() -> None:
    found = diagnose("--page-size 1 --tp 2")

    assert (found.verdict, stops(found)) == (diagnosis.Verdict.ATTACHES, [])


@pytest.mark.usefixtures("installed")
def test_every_refused_flag_is_named_with_what_to_change() -> None:
    for name, why in rules._OFF:
        flag = f"--{name.replace('_', '-')}"
        found = diagnose(f"--page-size 1 {flag}")
        assert stops(found) == [(f"{flag}: {why}", f"start the server without {flag}")]
        assert found.verdict == diagnosis.Verdict.WILL_NOT
        assert flag in found.summary


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "said", "change"),
    [
        ("--page-size 64", "--page-size 64: pages of one slot", "use --page-size 1"),
        ("--pipeline-parallel-size=2", "--pp-size 2: ", "use --pp-size 1"),
        ("--disaggregation-mode decode", "--disaggregation-mode decode: ", "without"),
        ("--dllm-algorithm X", "--dllm-algorithm: ", "without --dllm-algorithm"),
        ("--attention-backend flashmla", "--attention-backend flashmla: it sets", "triton"),
    ],
)
def test_what_stands_in_the_way_is_named(arguments: str, said: str, change: str) -> None:
    ((found, remedy),) = stops(diagnose(arguments))

    assert found.startswith(said)
    assert change in remedy


@pytest.mark.usefixtures("installed")
def test_without_arguments_it_cannot_tell() -> None:
    assert diagnose(None).verdict == diagnosis.Verdict.CANNOT_TELL


@pytest.mark.parametrize(
    ("package", "version", "verdict", "said"),
    [
        ("sglang", None, 2, "not installed in this Python"),
        ("sglang", "0.5.99", 1, "sglang 0.5.99: versions 0.5.17 and 0.5.23 are supported"),
        ("torch", None, 1, "torch: not installed"),
        ("triton", None, 0, "attaches"),
    ],
)
def test_packages_that_are_missing_or_unknown(
    installed: dict[str, str], package: str, version: str | None, verdict: int, said: str
) -> None:
    installed.pop(package)
    if version:
        installed[package] = version

    found = diagnose()
    assert found.verdict == verdict
    assert said in found.summary


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "set KVDEFRAG_ENABLED=1"),
        (ON | {"KVDEFRAG_PAGE": "7"}, "page: 7"),
        (ON | {"KVDEFRAG_PLACEMENT__FREE_LIST": "fifo"}, "placement.reservation: true needs"),
        (ON | {"KVDEFRAG_PROFILE": "/nowhere.json"}, "/nowhere.json"),
        (ON | {"SGLANG_PLUGINS": "other"}, "add kvdefrag to SGLANG_PLUGINS"),
    ],
)
def test_settings_that_keep_the_plugin_out_are_named(environ: dict[str, str], said: str) -> None:
    found = diagnose(environ=environ)

    assert found.verdict == diagnosis.Verdict.WILL_NOT
    assert said in found.summary


def test_a_launch_command_is_read_as_it_is_written() -> None:
    read = parse_arguments("python -m sglang.launch_server --page-size=1 --enable-x --model 'a b'")

    assert read == {"page_size": 1, "enable_x": True, "model": "a b"}
    with pytest.raises(ConfigError, match="--page-size 'one' is not a number"):
        parse_arguments("--page-size one")
    with pytest.raises(ConfigError, match="No closing quotation"):
        parse_arguments("--model 'a")


def at(stand_in: Any, **keys: str) -> Any:
    return diagnosis.diagnose({}, server=Server(stand_in.url, **keys))


def test_a_server_that_is_attached_says_to_what(stand_in: Any) -> None:
    stand_in.shows(active=True, version="0.1.0", mode="auto", error=None)

    found = at(stand_in)
    assert (found.verdict, found.summary) == (0, "attached")
    assert found.findings[-1].found == "kvdefrag 0.1.0, relocation auto; control off"


def test_a_server_that_was_refused_says_why_and_what_to_change(stand_in: Any) -> None:
    stand_in.shows(active=False, refused="--pp-size 4: other micro-batches keep slots")

    found = at(stand_in)
    assert found.verdict == 1
    assert stops(found) == [("--pp-size 4: other micro-batches keep slots", "use --pp-size 1")]


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"version": "0.5.23", "page_size": 1}, "set KVDEFRAG_ENABLED=1"),
        ({"version": "0.5.23", "page_size": 64}, "use --page-size 1"),
        ({"version": "0.4.1"}, "versions 0.5.17 and 0.5.23 are supported"),
    ],
)
def test_a_server_without_the_plugin_says_what_is_missing(
    stand_in: Any, info: dict[str, Any], said: str
) -> None:
    stand_in.info = info

    found = at(stand_in)
    assert found.verdict == 1
    assert said in found.summary


def test_a_fault_of_the_plugin_is_told(stand_in: Any) -> None:
    stand_in.shows(active=False, error="ZeroDivisionError: division by zero")

    assert "stopped after a fault: ZeroDivisionError" in at(stand_in).summary


def test_a_server_that_wants_a_key_or_is_not_there_cannot_be_told(stand_in: Any) -> None:
    stand_in.api_key = "secret"
    stand_in.shows(active=True, version="0.1.0", mode="auto")

    assert at(stand_in).verdict == 2
    assert "give --api-key" in at(stand_in).summary
    assert at(stand_in, api_key="secret").verdict == 0
    gone = diagnosis.diagnose({}, server=Server("127.0.0.1:1"))
    assert (gone.verdict, "no answer" in gone.summary) == (2, True)


def test_the_command_prints_a_table_or_json_and_leaves_with_the_verdict(stand_in: Any) -> None:
    stand_in.shows(active=False, refused="--page-size 64: ")
    table = CliRunner().invoke(build_app(), ["doctor", "--url", stand_in.url])
    plain = CliRunner().invoke(build_app(), ["doctor", "--url", stand_in.url, "--json"])

    assert table.exit_code == plain.exit_code == 1
    assert "-> use --page-size 1" in table.stdout
    read = json.loads(plain.stdout)
    assert (read["verdict"], read["exit_code"]) == ("will_not", 1)
    assert {"name", "found", "status", "change"} == set(read["findings"][0])
