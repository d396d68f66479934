"""The plugin in SGLang's real engine: `python bench/engine CASE [CASE ...] --models FOLDER`.

Needs SGLang and the package installed beside it (`pip install --no-deps .`), and a GPU but for
`--small` with `SGLANG_USE_CPU_ENGINE=1`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import checkpoints
import torch
from attention_cases import CASES as ATTENTION
from cases import CASES as LAYOUT
from cases import Setup
from workers import WorkerError

CASES = LAYOUT | ATTENTION


def main() -> None:
    """Run the chosen cases, write one file for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--models", type=Path, required=True, help="checkpoints are written here")
    parser.add_argument("--traces", type=Path, help="folder of the two traces of `aged`")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of `throughput`")
    parser.add_argument("--json", type=Path, help="write one file per case into this folder")
    parser.add_argument("--small", action="store_true", help="little of everything, to try it")
    parser.add_argument("--commit", help="name of the tree, where it is no repository")
    given = parser.parse_args()
    setup = Setup(given.models, given.traces, given.rounds, given.small)
    wanted = dict.fromkeys(name for case in given.cases for name in CASES[case][1])
    checkpoints.write(given.models, tuple(wanted))
    for name in given.cases:
        try:
            result = CASES[name][0](setup)
        except WorkerError as error:
            print(f"\n{name} failed: {error}", flush=True)
            continue
        if given.json:
            path = given.json / f"engine-{name}-{_gpu()}-{datetime.date.today()}.json"
            path.write_text(json.dumps(_about(given.commit) | result, indent=1) + "\n")
        show(name, result)


def show(name: str, result: dict[str, Any]) -> None:
    """Print the decisive figures of a case."""
    print(f"\n== {name}", flush=True)
    for where, lines in _lines(result):
        print(f"  {where:34} {lines}", flush=True)


def _lines(result: Any, at: str = "") -> list[tuple[str, str]]:
    if not isinstance(result, dict):
        return []
    if "seconds" in result or "throughput_ratio" in result or "error" in result:
        keys = (
            "error", "noticed", "same", "requests", "seconds", "hash", "plans", "moved", "left",
            "tokens_per_verify", "throughput_ratio", "decode_ratio", "step_p99_ratio",
            "same_tokens", "moved_rows", "layout", "host_us", "steps_ms",
        )  # fmt: skip
        return [(at, " ".join(f"{k}={result[k]}" for k in keys if result.get(k) is not None))]
    if "same_as_stock" in result:
        shown = {k: v for k, v in result.items() if k != "ranks"}
        return [(at, str(shown)), *_lines(result["ranks"], at)]
    return [
        line
        for key, value in result.items()
        if key != "rounds"
        for line in _lines(value, f"{at} {key}".strip())
    ]


def _about(commit: str | None) -> dict[str, Any]:
    ask = ["git", "describe", "--always", "--dirty"]
    named = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "gpus": torch.cuda.device_count(),
            "torch": torch.__version__,
            "sglang": version("sglang"),
            "kvdefrag": version("kvdefrag"),
            "commit": commit or named,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        },
        "command": ["python", "bench/engine", *_without_paths(sys.argv[1:])],
    }


def _without_paths(words: list[str]) -> list[str]:
    return [Path(word).name if "/" in word else word for word in words]


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")


if __name__ == "__main__":
    main()
