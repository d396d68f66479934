"""Make a table for `attention.crossover`: `python bench/crossover.py RESULTS.json > TABLE.json`.

RESULTS.json is what `bench/attention.py --json` wrote on the machine in question.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {
    "kvdefrag": "kernel",
    "kvdefrag pages": "kernel_pages",
    "flashmla sparse": "flashmla_sparse",
}
MARGIN = 0.1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--name", help="of the results, where they are kept under another")
    given = parser.parse_args()
    found = json.loads(given.results.read_text())
    about = found["machine"]
    machine = f"{about['gpu']}, torch {about['torch']}, triton {about['triton']}"
    head = {"version": 1, "machine": machine, "margin": MARGIN}
    lines = [
        json.dumps(entry) for entry in entries(found["rows"], given.name or given.results.name)
    ]
    print("{\n" + "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items()), end="")
    print(' "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}")


def entries(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return one entry for each scene, with the medians of whom the table knows."""
    scenes: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        scenes.setdefault((row["shape"], row["coverage"]), []).append(row)
    found = []
    for (shape, coverage), group in scenes.items():
        first = group[0]
        heads, k_dim = first["heads"].split("x")
        query_heads, kv_heads = map(int, heads.split("/"))
        us: dict[str, float] = {}
        for row in group:
            stock = row["provider"].startswith("sglang triton")
            provider = "stock" if stock else NAMES.get(row["provider"])
            if provider is not None:
                # Of SGLang's numbers of splits, the best.
                us[provider] = min(us.get(provider, row["us_p50"]), row["us_p50"])
        found.append({
            "kind": "decode" if first["queries"] == 1 else "verify", "heads": query_heads,
            "kv_heads": kv_heads, "k_dim": int(k_dim), "latent": int(k_dim) == 576,
            "kv": first["kv"], "requests": first["requests"], "queries": first["queries"],
            "length": first["tokens"], "coverage": coverage,
            "us": {k: round(v, 1) for k, v in us.items()},
            "source": f"{name}: {shape}, coverage {coverage}",
        })  # fmt: skip
    return found


if __name__ == "__main__":
    main()
