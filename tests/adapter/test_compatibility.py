"""The page on compatibility names tests that exist and reasons that are given."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.cases import BY_NAME

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "compatibility.md").read_text(encoding="utf-8")
QUOTED = re.compile(r"`([^`]+)`")


def backing() -> Iterator[tuple[str, list[str]]]:
    """Yield every row of the tables and what backs it."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[-1] != "backed by":
            yield cells[0], QUOTED.findall(cells[-1])


def names_of_tests(path: Path) -> set[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("row", "names"), list(backing()), ids=[row for row, _ in backing()])
def test_every_row_is_backed_by_tests_that_exist(row: str, names: list[str]) -> None:
    assert names
    for name in names:
        file, _, test = name.partition("::")
        assert (test in names_of_tests(HERE / file)) if test else (file in BY_NAME), name


def test_every_case_of_the_matrix_that_always_runs_is_named_somewhere() -> None:
    named = {name for _, names in backing() for name in names}

    features = {"retract", "flush", "sessions", "no-tree", "chunked", "overlap", "abort", "core"}
    features |= {"eagle", "standalone", "ngram", "mla"}
    assert {
        f for f in features if not any(f in name for name in named if "::" not in name)
    } == set()


def test_every_refusal_of_a_setting_is_on_the_page_word_for_word() -> None:
    from kvdefrag.sglang import rules

    said = [f"`--{name.replace('_', '-')}: {why}`" for name, why in rules._OFF]
    said += [f"`--{name.replace('_', '-')} N: {why}; 1 is supported`" for name, why in rules._ONE]
    assert [text for text in said if text not in PAGE] == []


def test_every_reason_on_the_page_is_in_the_code() -> None:
    source = "".join(
        path.read_text() for path in (HERE.parents[1] / "kvdefrag/sglang").glob("*.py")
    )
    plain = source.replace('"\n            f"', "").replace('"\n            "', "")
    table = PAGE.split("## Refused")[1].split("## Faults")[0]
    reasons = [line.split("`")[1].split(": ", 1)[1] for line in table.splitlines() if "| `" in line]

    assert len(reasons) > 30
    for reason in reasons:
        parts = re.split(
            r"\bN\b|\.\.\.|0\.5\.17 and 0\.5\.23|ReqToTokenPool",
            reason.removesuffix("; 1 is supported"),
        )
        assert all(part.strip() in plain for part in parts), reason


def test_every_gate_is_on_the_page() -> None:
    source = "".join(
        (HERE.parents[1] / "kvdefrag/sglang" / name).read_text()
        for name in ("looker.py", "attachment.py")
    )
    gates = re.findall(r'Busy\("([^"]+)"\)', source) + re.findall(r'return \("([^"]+)",\)', source)

    assert len(gates) == 3
    assert all(f"| `{gate}` |" in PAGE for gate in gates)
