"""Time attention in CUDA graphs, providers interleaved: `python bench/attention.py [--json PATH]`.

Every provider of a scene is captured once; then each round replays them all, one after the other,
behind a flushed cache, so that drift hits all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import sys
from typing import Any

import torch
from cases.attention import SHAPES, Absent, Scene
from measure import AHEAD_CYCLES, Clock, Run, machine, quantiles_of


def main() -> None:
    """Run the chosen shapes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write results and samples there")
    parser.add_argument("--shape", action="append", help="run this shape (repeatable)")
    parser.add_argument("--rounds", type=int, default=25, help="0: build everything only")
    parser.add_argument("--without", action="append", default=[], help="leave out providers")
    arguments = parser.parse_args()
    clock = Clock()
    rows: list[dict[str, Any]] = []
    absent: list[dict[str, Any]] = []
    plans = plan_times(clock) if arguments.rounds and not arguments.shape else {}
    for shape in SHAPES:
        if arguments.shape and shape.name not in arguments.shape:
            continue
        for coverage in (0.0, 0.99):
            scene = Scene(shape, coverage)
            rows += measure(scene, clock, arguments.rounds, arguments.without, absent)
            del scene
            torch.cuda.empty_cache()
        if arguments.json:
            result = {
                "machine": machine(), "command": sys.argv, "plan_us": plans, "rows": rows,
                "not_run": absent,
            }  # fmt: skip
            pathlib.Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


def plan_times(clock: Clock) -> dict[str, float]:
    """Return microseconds of a step's plan for 64 requests, with and without a page view."""
    found = {}
    for shape in (s for s in SHAPES if s.name in ("verify9-bs16-32k", "gqa-verify9-bs16-32k")):
        made = Scene(dataclasses.replace(shape, requests=64, tokens=8192), 0.99).inputs
        for paged in (False, True):
            graph = captured(lambda paged=paged, made=made: made.plan(paged, None, None))
            name = f"{shape.name}, 64 requests{', page view' * paged}"
            found[name] = quantiles_of(interleaved({"": graph}, clock, 9)[""])[1]
            print(f"plan {name}: {found[name]:.1f} us", flush=True)
    return found


def measure(
    scene: Scene, clock: Clock, rounds: int, without: list[str], absent: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Time every provider of a scene."""
    graphs: dict[str, Run] = {}
    errors: dict[str, float] = {}
    where = {"shape": scene.shape.name, "coverage": scene.coverage}
    for name, make in scene.providers().items():
        if any(w in name for w in without):
            continue
        try:
            run = make()
            if name.startswith("kvdefrag"):
                errors[name] = scene.check(run())
            graphs[name] = captured(run)
        except Absent:
            continue
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            absent.append(where | {"provider": name, "reason": reason})
            print(f"not run: {scene.shape.name} {scene.coverage} {name}: {reason}", flush=True)
    if not rounds:
        return []
    samples = interleaved(graphs, clock, rounds)
    rows = []
    for name, found in samples.items():
        p20, p50, p80 = quantiles_of(found)
        low, high = interval(found)
        rows.append(where | scene.shape.params | {
            "provider": name, "us_p20": p20, "us_p50": p50, "us_p80": p80, "us_ci95": [low, high],
            "gbps": scene.shape.read / p50 / 1e3, "samples": found,
        } | ({"error": errors[name]} if name in errors else {}))  # fmt: skip
        print(f"{scene.shape.name:26} {scene.coverage:4} {name:28} {p50:9.1f} us"
              f" [{low:.1f}, {high:.1f}] {scene.shape.read / p50 / 1e3:7.0f} GB/s"
              f" {errors.get(name, float('nan')):.1e}", flush=True)  # fmt: skip
    return rows


def captured(run: Run) -> Run:
    """Warm a call on a side stream and capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(kept: Run = run) -> None:
        graph.replay()  # `kept`: the graph holds pointers to what the call owns

    return replay


def interleaved(graphs: dict[str, Run], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Replay every graph once a round; returns microseconds."""
    pairs: dict[str, list[Any]] = {name: [] for name in graphs}
    for nth in range(rounds + 2):
        for name, replay in graphs.items():
            if nth >= 8 and pairs[name] and pairs[name][0][0].elapsed_time(pairs[name][0][1]) > 9:
                continue  # a call of 9 ms needs no 25 samples
            torch.cuda._sleep(AHEAD_CYCLES // 4)
            clock.flush()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            first.record()
            replay()
            last.record()
            if nth >= 2:
                pairs[name].append((first, last))
        torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) * 1e3 for a, b in found] for n, found in pairs.items()}


def interval(samples: list[float], draws: int = 400) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    source = random.Random(0)
    size = len(samples)
    medians = sorted(sorted(source.choices(samples, k=size))[size // 2] for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


if __name__ == "__main__":
    main()
