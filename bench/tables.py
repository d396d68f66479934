"""Prints the layout tables of the README from result files of `bench/sim.py`.

python bench/tables.py bench/results/sim-DATE.json bench/results/sim-adversary-DATE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WORDS = {
    "slice": "first 1,200 requests, 524,288 slots",
    "slice-speculation-4": "the same, speculation windows of 4",
    "slice-prefix-jitter-100": "the same, shared blocks of 412 to 512 tokens",
    "slice-131072-slots": "the same, 131,072 slots",
    "slice-4194304-slots": "the same, 4,194,304 slots",
    "whole-trace": "whole trace, 12,031 requests, 524,288 slots",
    "azure": "first 2,500 requests of Azure's conversations, 131,072 slots",
    "adversary": "adversary, 131,072 slots",
}


def main() -> None:
    """Print one row for each case of the files."""
    result: dict[str, Any] = {}
    for name in sys.argv[1:]:
        result |= json.loads(Path(name).read_text(encoding="utf-8"))
    print(
        "| | stock | placement + reservation, no copies | with relocation, whoever pays | bound |"
    )
    print("|---|---|---|---|---|")
    for name, words in WORDS.items():
        if name in result:
            print(f"| {words} | {' | '.join(cells(result[name]['arms']))} |")


def cells(arms: list[dict[str, Any]]) -> list[str]:
    """Return the cells of one case: coverage mean / p10, with moved rows where there are any."""
    by_name = {arm["name"]: arm["metrics"] for arm in arms}
    relocation = "adversary" if "adversary" in by_name else "all"
    found = []
    for name in ("stock", "placement+reservation", relocation, "packed"):
        metrics = by_name.get(name)
        found.append("" if metrics is None else cell(metrics))
    return found


def cell(metrics: dict[str, float]) -> str:
    """Return coverage mean / p10 in percent, and moved rows per decoded token if any moved."""
    mean, p10 = metrics["page_coverage_mean"], metrics["page_coverage_p10"]
    moved = metrics["moved_rows_per_decoded_token"]
    text = f"{100 * mean:.1f} / {100 * p10:.1f}"
    return f"{text} ({moved:.2f} rows a token)" if moved else text


if __name__ == "__main__":
    main()
