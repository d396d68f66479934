"""What a child can be asked to do; each takes a task and the checkpoints, returns plain values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.cases import BY_NAME, Case
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
    options = OPTIONS | case.options | {"enable_metrics": True}
    made = sglang.Engine(model_path=str(models / case.model), **options)
    asks = case.workload.asks
    answers = made.generate(
        input_ids=[list(a.tokens) for a in asks],
        sampling_params=[{"temperature": 0, "max_new_tokens": a.count} for a in asks],
    )
    states = made.get_server_info()["internal_states"]
    exported = _exported()
    made.shutdown()
    return {
        "outputs": {a.rid: r["output_ids"] for a, r in zip(asks, answers, strict=True)},
        "states": [state.get("kvdefrag") for state in states],
        "exported": exported,
    }


def _exported() -> list[dict[str, Any]]:
    # As the front end does it: from the folder that the processes share.
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    samples = [sample for family in registry.collect() for sample in family.samples]
    wanted = [s for s in samples if s.name.startswith(("kvdefrag:", "sglang:num_running_reqs"))]
    return [{"name": s.name, "labels": s.labels, "value": s.value} for s in wanted]


def refuse(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve a case on a scheduler that the plugin does not attach to; return what it shows."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    case = BY_NAME[task["case"]]
    with settings(task.get("settings", {})):
        run = Run(_with(case, task.get("options", {})), models, watched=False)
    try:
        served = run.serve()
        state = run.scheduler.get_internal_state(GetInternalStateReq()).internal_state
        return served | {"shown": state["kvdefrag"]}
    finally:
        run.engine.close()


def _with(case: Case, options: dict[str, Any]) -> Case:
    return replace(case, options=case.options | options)


def record(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve a case while its events are recorded; return what the log and a replay of it say."""
    from harness.recorded import Recorded

    with TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        with settings({"observe": {"events_path": log}} | task.get("settings", {})):
            run = Run(BY_NAME[task["case"]], models, chaos=task.get("chaos"))
        try:
            return Recorded(run, log).serve()
        finally:
            run.engine.close()


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


def command(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve a case while commands come in; `script` holds iteration and command."""
    from harness.commanded import Commanded, replayed

    with TemporaryDirectory() as folder:
        control = {"control": {"enabled": True, "events_dir": Path(folder)}}
        with settings(control | task.get("settings", {})):
            run = Run(BY_NAME[task["case"]], models, chaos=task.get("chaos"))
        try:
            served = Commanded(run, task["script"]).serve()
            logs = [c["path"] for c in served["control"]["commands"] if "path" in c]
            return served | {"logs": [replayed(Path(log)) for log in logs]}
        finally:
            run.engine.close()


def operate(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Run commands against a whole server under load; return what each prints."""
    from harness import served

    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in served.FILES.items():
            (folder / file).write_text(content)
        with served.server(models, folder / "server.log") as url, served.load(url):
            ran = [served.run(command, url, folder) for command in task["commands"]]
            return {"ran": ran, "states": served.states(url)}
