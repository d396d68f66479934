"""Commands and their output on a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "operate.md"
_FENCE = re.compile(r"^```console(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def transcripts(page: str, kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page's `console` blocks and the lines that it prints.

    Args:
        page: The page.
        kind: Word behind `console`: `server` for those that a live server is needed for; empty
            for the others.
    """
    for word, content in _FENCE.findall(page):
        if word != kind:
            continue
        for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
            command, *lines = part.rstrip("\n").split("\n")
            while command.endswith("\\"):
                command = f"{command[:-1].rstrip()} {lines.pop(0).strip()}"
            yield command, [line.rstrip() for line in lines if line.strip()]


# Lines of which only the label is the same each time.
_LABELS = ("moved ", "now ", "skipped ", "gates closed ", "exported ")
_POLICY = re.compile(r"^[a-z+]+ +-?[\d.]+ +-?[\d.]+ +[\d.]+ +[\d.]+ +(-?[\d.]+|-)$")


def comparable(lines: list[str]) -> list[str]:
    """Return what is the same each time a command is run: words, with every figure a `#`."""
    lines = [line for line in lines if line.strip() and not line.startswith("replaying")]
    policies = sorted(line.split()[0] for line in lines if _POLICY.match(line))
    if policies:
        # Which one is best depends on the load.
        head = [line for line in lines if line.startswith(("recording", "recorded", "policy"))]
        return [*map(_masked, head), *policies]
    return [_masked(line) for line in lines]


def _masked(line: str) -> str:
    for label in _LABELS:
        if line.startswith(label) and "rows, " not in line.partition("  ")[0]:
            return label
    line = re.sub(r"kvdefrag-[0-9a-f]{12}", "kvdefrag-#", line)
    line = re.sub(r"\[[#+.=]*\]  ", "[pool]  ", line)
    line = re.sub(r"tree \w+( \(\w+\))?", "tree #", line)
    line = re.sub(r"-?\d[\d,.]*(\+\w+)?(?<![,.])", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"(?<=\s)-(?=\s|$)", "#", line)).strip()
