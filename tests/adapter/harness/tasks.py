"""What a child can be asked to do; each takes a task and the checkpoints, returns plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.cases import BY_NAME
from harness.runner import Run
from harness.settings import settings


def serve(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve a case; `chaos` holds a seed, `settings` is laid over the plugin's."""
    with settings(task.get("settings", {})):
        run = Run(
            BY_NAME[task["case"]],
            models,
            chaos=task.get("chaos"),
            dawdle=task.get("dawdle", 0.0),
        )
    try:
        return run.serve()
    finally:
        run.engine.close()


def plant(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve a case with a fault planted; `watched` says whether our own checks look on."""
    from harness.plants import PLANTS

    planted, buffers = PLANTS[task["plant"]]
    run = Run(
        BY_NAME[task["case"]],
        models,
        chaos=task["chaos"],
        watched=task["watched"],
        buffers=buffers,
    )
    try:
        with planted(run):
            return run.serve()
    finally:
        run.engine.close()


def inject(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve a case in which one point of our step raises."""
    from harness.injections import OUTSIDE, POINTS

    with settings({"placement": {"reservation": task["point"] in OUTSIDE}}):
        run = Run(BY_NAME[task["case"]], models, chaos=task["chaos"])
    try:
        with POINTS[task["point"]].planted(run):
            return run.serve()
    finally:
        run.engine.close()


def engine(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve with `sglang.Engine`: the scheduler in a process of its own, hooks by entry point."""
    import sglang
    from harness.engine import OPTIONS

    case = BY_NAME["llama-overlap"]
    made = sglang.Engine(model_path=str(models / case.model), **OPTIONS | case.options)
    asks = case.workload.asks
    answers = made.generate(
        input_ids=[list(a.tokens) for a in asks],
        sampling_params=[{"temperature": 0, "max_new_tokens": a.count} for a in asks],
    )
    states = made.get_server_info()["internal_states"]
    made.shutdown()
    return {
        "outputs": {a.rid: r["output_ids"] for a, r in zip(asks, answers, strict=True)},
        "states": [state.get("kvdefrag") for state in states],
    }


def lockstep(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Run simulator and scheduler side by side; an error tells where they part."""
    from harness.lockstep import Lockstep

    both = Lockstep(
        models,
        discipline=task["discipline"],
        reservation=task["reservation"],
        overlap=task["overlap"],
        pool=task["pool"],
    )
    both.run()
    totals = both.model.totals
    both.engine.close()
    return {
        "compared": both.compared,
        "finished": totals.arrived,
        "evicted": totals.evicted_tokens,
        "hits": totals.hit_tokens,
    }
