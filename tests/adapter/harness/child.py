"""A process of its own for a group of cases: `python -m harness.child JOB RESULT`.

A scheduler that fails takes its process along, and hooks are applied once to a process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main(job_path: str, result_path: str) -> None:
    """Run the cases that the job names; write a result for each, errors in words."""
    logging.basicConfig(level=logging.WARNING)
    job = json.loads(Path(job_path).read_text())
    begun = time.time()
    from harness import patches
    from sglang.srt.plugins import load_plugins

    load_plugins()
    patches.apply()
    results: dict[str, Any] = {}
    for task in job["tasks"]:
        results[task["key"]] = _one(task, Path(job["models"]))
        Path(result_path).write_text(json.dumps(results))
    results["seconds"] = time.time() - begun
    Path(result_path).write_text(json.dumps(results))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the schedulers are still there.
    os._exit(0)


def _one(task: dict[str, Any], models: Path) -> dict[str, Any]:
    from harness import tasks

    begun = time.time()
    try:
        result = getattr(tasks, task["kind"])(task, models)
    except BaseException as error:
        result = {
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-6000:],
        }
    return result | {"seconds": round(time.time() - begun, 2)}


if __name__ == "__main__":
    main(*sys.argv[1:])
