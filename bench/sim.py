"""Measures the simulator's figures: coverage by arm on real traces, its own speed and memory.

    python bench/sim.py --list
    python bench/sim.py --case slice --case adversary --json bench/results/sim-DATE.json
    python bench/sim.py --trace conversation_trace.jsonl --case whole-trace
    python bench/sim.py --trace AzureLLMInferenceTrace_conv.csv --case azure-as-vidur

The whole traces are not shipped; `kvdefrag/data/SOURCE.md` says where they are from.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adversary import BLOCK, Adversary

from kvdefrag import __version__
from kvdefrag.core.host_two_ended import HostTwoEndedFreeList
from kvdefrag.core.plan_evacuate import plan_evacuation
from kvdefrag.core.plan_gather import plan_lower
from kvdefrag.sim.arm_run import ArmRun
from kvdefrag.sim.arms import choose
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.options import RunOptions, TraceOptions
from kvdefrag.sim.readers import Selection
from kvdefrag.sim.simulate import simulate

SLOTS = 524_288
SHOWN = ("stock", "sorted", "placement", "placement+reservation", "all", "default", "packed")
FEW = ("stock", "placement+reservation", "all", "packed")

Case = Callable[[Path | None], dict[str, Any]]


def run_arms(
    arms: Sequence[str],
    *,
    files: Sequence[Path] = (),
    trace: Path | None = None,
    form: str = "mooncake",
    limit: int | None = None,
    block: int = 512,
    slots: int = SLOTS,
    spec_window: int = 0,
    prefix_jitter: int = 0,
) -> dict[str, Any]:
    """Run arms side by side and return options and metrics."""
    options = RunOptions(
        TraceOptions(path=trace, format=form, block=block, selection=Selection(limit=limit)),
        EngineOptions(slots, spec_window=spec_window),
        prefix_jitter=prefix_jitter,
    )
    chosen = choose(list(arms), files, page=options.engine.page)
    result = simulate(chosen, options, processes=os.cpu_count() or 1)
    return {
        "trace": result.trace,
        "options": result.options,
        "arms": [{"name": arm.name, "metrics": arm.metrics} for arm in result.arms],
        "verdict": list(result.verdict),
    }


def whole_trace(trace: Path | None) -> dict[str, Any]:
    """Run every request of the trace through three arms."""
    return run_arms(("stock", "placement+reservation", "all"), trace=_needed(trace))


def one_arm(trace: Path | None) -> dict[str, Any]:
    """Time one arm over the whole trace in this process, alone."""
    options = RunOptions(TraceOptions(path=_needed(trace)), EngineOptions(SLOTS))
    arm = choose(["placement+reservation"], [], page=64)[0]
    torch.set_num_threads(1)
    began = time.perf_counter()
    metrics = ArmRun(arm, options).run().metrics
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"arms": [{"name": arm.name, "metrics": metrics}], "wall_s": seconds, "peak_mib": peak}


def adversary(_: Path | None) -> dict[str, Any]:
    """Run the constructed load on which reservation alone is not enough."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adversary.jsonl"
        Adversary().write(path)
        files = [Path(__file__).with_name("adversary.yaml")]
        return run_arms(FEW, files=files, trace=path, block=BLOCK, slots=131_072)


def azure(trace: Path | None) -> dict[str, Any]:
    """Run short prompts that share nothing, with and without eviction for the sake of pages."""
    files = [Path(__file__).with_name("no-page-eviction.yaml")]
    return run_arms(
        FEW, files=files, trace=_needed(trace), form="azure", limit=2_500, slots=131_072
    )


def azure_as_vidur(trace: Path | None) -> dict[str, Any]:
    """Run an Azure CSV, and the same rows in Vidur's format: the figures must be the same."""
    source = TraceOptions(path=_needed(trace), format="azure").open()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vidur.csv"
        with path.open("w", encoding="utf-8") as file:
            file.write("arrived_at,num_prefill_tokens,num_decode_tokens\n")
            for r in source:
                file.write(f"{r.arrival_s:.7f},{r.input_tokens},{r.output_tokens}\n")
        arms = []
        for form, where in (("azure", trace), ("vidur", path)):
            options = RunOptions(TraceOptions(path=where, format=form), EngineOptions(131_072))
            arm = choose(["placement+reservation"], [], page=64)[0]
            arms.append({"name": form, "metrics": ArmRun(arm, options).run().metrics})
    numbers = [{k: v for k, v in arm["metrics"].items() if k != "wall_s"} for arm in arms]
    return {"arms": arms, "equal": numbers[0] == numbers[1]}


def planning(_: Path | None) -> dict[str, Any]:
    """Time one re-ordering, one evacuation plan and one lowering plan by pool size, half free."""
    rows = []
    for slots in (32_768, 327_680, 3_276_800):
        rng = np.random.default_rng(0)
        free_list = HostTwoEndedFreeList(slots, page=64)
        live = torch.from_numpy(rng.permutation(slots)[: slots // 2] + 1)
        free_list.take_front(slots)
        mask = torch.ones(slots + 1, dtype=torch.bool)
        mask[live] = mask[0] = False
        free_list.put(mask.nonzero().flatten())
        free = free_list.slots()
        for name, plan in {
            "reorder": free_list.reorder,
            "evacuation": lambda f=free_list, m=live: plan_evacuation(
                m, f, page=64, max_pages=64, max_live=63
            ),
            "lower": lambda m=live, f=free: plan_lower(m, f, rows=4096),
        }.items():
            rows.append({"plan": name, "slots": slots, "ms_p50": _median_ms(plan)})
    return {"rows": rows}


CASES: dict[str, Case] = {
    "slice": lambda _: run_arms((*SHOWN[:4], "placement+tenure", *SHOWN[4:])),
    "slice-speculation-4": lambda _: run_arms(FEW, spec_window=4),
    "slice-prefix-jitter-100": lambda _: run_arms(FEW, prefix_jitter=100),
    "slice-131072-slots": lambda _: run_arms(FEW, slots=131_072),
    "slice-4194304-slots": lambda _: run_arms(FEW, slots=4_194_304),
    "adversary": adversary,
    "planning": planning,
    "azure": azure,
    "azure-as-vidur": azure_as_vidur,
    "one-arm-whole-trace": one_arm,
    "whole-trace": whole_trace,
}

NEED_A_TRACE = ("azure", "azure-as-vidur", "one-arm-whole-trace", "whole-trace")


def main() -> None:
    """Run the chosen cases and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="name the cases and leave")
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; all by default")
    parser.add_argument("--trace", type=Path, help="the trace of a case that needs one")
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args()
    if given.list:
        print("\n".join(CASES))
        return
    # The name of the trace, not where it lies on this machine.
    words = [Path(w).name if w == str(given.trace) else w for w in sys.argv[1:]]
    results: dict[str, Any] = {
        "machine": machine(),
        "command": ["bench/sim.py", *words],
    }
    names = given.case or [n for n in CASES if n not in NEED_A_TRACE]
    for name in names:
        results[name] = CASES[name](given.trace)
        show(name, results[name])
        if given.json:
            given.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def machine() -> dict[str, str | int | None]:
    """Return where this ran."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "kvdefrag": __version__,
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


def show(name: str, result: dict[str, Any]) -> None:
    """Print the decisive figures of one case."""
    print(
        f"\n{name}"
        + "".join(f"  {k} {result[k]:.1f}" for k in ("wall_s", "peak_mib") if k in result)
    )
    for row in result.get("rows", ()):
        print(f"  {row['plan']:12} {row['slots']:>9,} slots  {row['ms_p50']:8.2f} ms")
    for arm in result.get("arms", ()):
        m = arm["metrics"]
        print(
            f"  {arm['name']:24} coverage {m['page_coverage_mean']:.4f} p10 "
            f"{m['page_coverage_p10']:.4f}  run {m['mean_run']:9.1f}  used "
            f"{m['utilization_mean']:.3f}  reserved {m['reserved_share']:.4f}  moved/token "
            f"{m['moved_rows_per_decoded_token']:.3f}  {m['wall_s']:.0f} s"
        )


def _median_ms(plan: Callable[[], object], repeat: int = 15) -> float:
    plan()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        plan()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def _needed(trace: Path | None) -> Path:
    if trace is None:
        sys.exit("this case needs --trace, the whole Mooncake conversation trace")
    return trace


if __name__ == "__main__":
    main()
