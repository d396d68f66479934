"""What a child can be asked to do; each takes a task and the checkpoints, returns plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.cases import BY_NAME
from harness.runner import Run


def serve(task: dict[str, Any], models: Path) -> dict[str, Any]:
    """Serve a case; `chaos` holds a seed, `settings` is laid over the plugin's."""
    from harness.settings import settings

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
    from harness.injections import POINTS

    run = Run(BY_NAME[task["case"]], models, chaos=task["chaos"])
    try:
        with POINTS[task["point"]].planted(run):
            return run.serve()
    finally:
        run.engine.close()
