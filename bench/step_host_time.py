"""Host time of our step, idle and compacting: `python bench/step_host_time.py [--json FOLDER]`.

A pool whose rows lie on scattered slots, 64 of them running; the step is that of
`kvdefrag.core.defragmenter` with the parts that the plugin uses on a GPU, the reference in torch
beside them. What the scheduler's own lists cost to look at is not in it. Runs on a CPU too, to see
that it runs: kernels are replaced by their references there, and the figures say nothing.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import pathlib
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import machine
from step_pool import LAYOUTS, RUNNING, Case, Scene, settings
from torch.utils._python_dispatch import TorchDispatchMode

WARM_UP = 10
LAUNCHES = ("LaunchKernel", "MemcpyAsync", "MemsetAsync")
VIEWS = ("as_strided", "detach", "empty", "expand", "select", "slice", "t", "unbind", "unsqueeze",
         "view", "_unsafe_view", "lift_fresh", "alias", "squeeze", "transpose")  # fmt: skip


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50_us": round(statistics.median(ordered), 1),
        "p90_us": round(ordered[int(0.9 * (len(ordered) - 1))], 1),
        "max_us": round(ordered[-1], 1),
        "steps": len(ordered),
    }


def timed(
    run: Callable[[], object], device: torch.device, times: list[float], *, wait: bool = True
) -> None:
    if wait and device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    run()
    times.append((time.perf_counter_ns() - begin) / 1e3)


def measure(case: Case, device: torch.device, repeat: int) -> dict[str, Any]:
    """Time the steps of one case."""
    scene = Scene(case, device)
    report = scene.step()
    moved = scene.check()
    compact: list[float] = []
    after: list[float] = []
    for i in range(WARM_UP + repeat):
        scene.reset()
        timed(scene.step, device, compact)
        # Left in any order by the step, the free list is sorted by whoever takes from it next.
        timed(scene.decode, device, after, wait=False)
        if i < WARM_UP:
            compact.clear()
            after.clear()
    scene.settle()
    found = {
        "layout": case.layout, "slots": case.slots, "programs": case.programs,
        "running": RUNNING, "tokens_a_row": int(scene.lengths[0]), "device": device.type,
        "mechanism": report.mechanism, "planned_rows": report.planned_rows, "moved_rows": moved,
        "compact": spread(compact), "allocation_after": spread(after),
        "idle_looked": idle(scene, repeat, due=True),
        "idle_not_due": idle(scene, repeat, due=False),
    }  # fmt: skip
    scene.defragmenter.configure(settings(interval=1))
    found["operations"] = operations(scene, device)
    found["sync_debug"] = without_waiting(scene, device)
    scene.reset()
    scene.step()
    scene.check()
    return found


def idle(scene: Scene, repeat: int, *, due: bool) -> dict[str, float]:
    scene.defragmenter.configure(settings(interval=1 if due else 4096))
    scene.rest()
    times: list[float] = []
    for i in range(WARM_UP + repeat):
        timed(scene.step, scene.device, times)
        if i < WARM_UP:
            times.clear()
    return spread(times)


def without_waiting(scene: Scene, device: torch.device) -> str:
    """Say whether steps and the allocation behind them pass where waiting is an error."""
    if device.type != "cuda":
        return "not run: no GPU"
    scene.reset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scene.step()
        scene.decode()
        for _ in range(3):
            scene.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "clean"


class Count(TorchDispatchMode):
    """Counts operations of torch that would be a launch or a copy on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operations(scene: Scene, device: torch.device) -> dict[str, Any]:
    """Count what one compacting step enqueues."""
    scene.reset()
    if device.type != "cuda":
        with Count() as count:
            scene.step()
        return {"torch_operations": len(count.names)}
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        scene.step()
        torch.cuda.synchronize()
    calls = {e.key: e.count for e in profile.key_averages() if e.key.startswith(("cuda", "cu"))}
    enqueued = sum(n for name, n in calls.items() if any(part in name for part in LAUNCHES))
    return {"enqueued": enqueued, "calls": calls}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--slots", type=int, nargs="+", default=[20_000, 100_000, 500_000])
    parser.add_argument("--layout", nargs="+", choices=sorted(LAYOUTS), default=sorted(LAYOUTS))
    parser.add_argument("--programs", nargs="+", choices=("device", "torch"),
                        default=["device", "torch"])  # fmt: skip
    parser.add_argument("--repeat", type=int, default=200, help="steps timed of each kind")
    parser.add_argument("--json", metavar="FOLDER", help="write one file there")
    parser.add_argument("--commit", help="commit to record where the tree has no git")
    return parser.parse_args()


def environment(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return machine()
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "gpu": "none", "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__, "date": now.isoformat(timespec="seconds"),
    }  # fmt: skip


def main() -> None:
    """Measure every case and print a line for each."""
    arguments = parse()
    device = torch.device(arguments.device)
    header = environment(device) | {"python": platform.python_version()}
    if arguments.commit:
        header["commit"] = arguments.commit
    print(" | ".join(f"{k} {v}" for k, v in header.items()), flush=True)
    rows = []
    for layout in arguments.layout:
        for slots in arguments.slots:
            for programs in arguments.programs:
                row = measure(Case(layout, slots, programs), device, arguments.repeat)
                rows.append(row)
                print(show(row), flush=True)
                # The next pool may need the memory of this one.
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    if arguments.json:
        command = shlex.join(["python", *sys.argv])
        save(pathlib.Path(arguments.json), {"machine": header, "command": command, "rows": rows})


def show(row: dict[str, Any]) -> str:
    times = " ".join(
        f"{name} {row[name]['p50_us']:.0f}/{row[name]['p90_us']:.0f}/{row[name]['max_us']:.0f}"
        for name in ("compact", "allocation_after", "idle_looked", "idle_not_due")
    )
    enqueued = next(iter(row["operations"].values()))
    return (
        f"{row['layout']:12} {row['slots']:7} slots {row['programs']:6} us p50/p90/max {times} "
        f"moved {row['moved_rows']} enqueued {enqueued} sync {row['sync_debug']}"
    )


def save(folder: pathlib.Path, result: dict[str, Any]) -> None:
    gpu = result["machine"]["gpu"].lower().replace("nvidia", "").strip().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-host-time-{gpu}-{result['machine']['date'][:10]}.json"
    (folder / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
