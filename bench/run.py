"""Run benchmarks: `python bench/run.py [--list] [--case NAME ...] [--json FOLDER]`."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import pkgutil
import sys
import traceback
from typing import Any

import cases
import torch
from measure import Clock, Entry, Run, machine


def main() -> None:
    """Warm every entry of the chosen cases, then time them all."""
    arguments = parse()
    names = [m.name for m in pkgutil.iter_modules(cases.__path__) if not m.name.startswith("_")]
    if arguments.list:
        for name in names:
            print(f"{name:20} {(importlib.import_module(f'cases.{name}').__doc__ or '').strip()}")
        return
    unknown = set(arguments.case) - set(names)
    if unknown:
        raise SystemExit(f"unknown case {sorted(unknown)}, known: {names}")
    clock = Clock(budget_s=arguments.budget)
    header = machine() | {"commit": arguments.commit or machine()["commit"]}
    print(" | ".join(f"{k} {v}" for k, v in header.items()), flush=True)
    chosen = arguments.case or names
    warmed = {n: warm(list(importlib.import_module(f"cases.{n}").entries())) for n in chosen}
    roof = clock.roof_gbps()
    print(f"roof {roof:.0f} GB/s (device-to-device copy of 4 GiB, read + written)")
    for name, (ready, absent) in warmed.items():
        rows = [row(entry, run, clock, roof) for entry, run in ready]
        for line in rows:
            print(show(line), flush=True)
        for line in absent:
            print(f"not run: {line['case']} {line['provider']}: {line['reason']}")
        if arguments.json:
            result = {
                "machine": header,
                "roof_gbps": round(roof, 1),
                "rows": rows,
                "not_run": absent,
            }
            save(pathlib.Path(arguments.json), name, result)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--case", action="append", default=[], help="run this case (repeatable)")
    parser.add_argument("--json", metavar="FOLDER", help="write one file per case there")
    parser.add_argument("--budget", type=float, default=0.4, help="seconds per entry")
    parser.add_argument("--commit", help="commit to record where the tree has no git")
    return parser.parse_args()


def save(folder: pathlib.Path, name: str, result: dict[str, Any]) -> None:
    """Write one file per case, named case-gpu-date."""
    gpu = result["machine"]["gpu"].lower().replace("nvidia", "").strip().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{gpu}-{result['machine']['date'][:10]}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


def warm(entries: list[Entry]) -> tuple[list[tuple[Entry, Run]], list[dict[str, str]]]:
    """Build, run and check every entry; one that cannot run is listed, never guessed."""
    ready, absent = [], []
    for entry in entries:
        reason = entry.absent
        if entry.make is not None and reason is None:
            try:
                run = entry.make()
                run()
                torch.cuda.synchronize()
                if entry.check is not None:
                    entry.check()
                ready.append((entry, run))
                continue
            except Exception as error:
                traceback.print_exc(limit=3, file=sys.stderr)
                reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        absent.append({"case": entry.case, "provider": entry.provider, "reason": str(reason)})
    return ready, absent


def row(entry: Entry, run: Run, clock: Clock, roof: float) -> dict[str, Any]:
    """Time one entry."""
    p20, p50, p80 = clock.quantiles(run)
    gbps = entry.moved / p50 / 1e3
    found: dict[str, Any] = {
        "case": entry.case,
        "params": entry.params,
        "provider": entry.provider,
        "us_p20": round(p20, 2),
        "us_p50": round(p50, 2),
        "us_p80": round(p80, 2),
        "bytes": entry.moved,
        "gbps": round(gbps, 1),
        "roof_ratio": round(gbps / roof, 4),
    }
    if entry.ceiling is not None:
        found["ceiling"] = round(entry.ceiling, 4)
        found["ceiling_ratio"] = round(gbps / roof / entry.ceiling, 4)
    if entry.host:
        found["host_us_p50"] = round(clock.host_us(run), 1)
    return found | entry.notes


def show(line: dict[str, Any]) -> str:
    """Format one row for people."""
    params = " ".join(f"{k}={v}" for k, v in line["params"].items())
    extra = " ".join(
        f"{k} {line[k]}" for k in ("ceiling", "ceiling_ratio", "host_us_p50") if k in line
    )
    return (
        f"{line['case']:18} {params:58} {line['provider']:22} {line['us_p50']:10.1f} us "
        f"{line['gbps']:8.1f} GB/s  roof {line['roof_ratio']:.3f} {extra}"
    )


if __name__ == "__main__":
    main()
