"""Starts engines in processes of their own and gives them orders, together or in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
HARNESS = HERE.parents[1] / "tests" / "adapter"
ORACLES = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}


class WorkerError(RuntimeError):
    """An engine failed; says how, and what it printed last."""


class Worker:
    """One engine's process.

    Args:
        name: For messages.
        spec: See `worker.Worker`; `env` holds more variables.
    """

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self.name, self.spec = name, spec
        folder = Path(tempfile.mkdtemp(prefix="engine-"))
        (folder / "spec.json").write_text(json.dumps(spec))
        self._log = folder / "log"
        self._output = self._log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(folder / "spec.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=_environment(spec),
            text=True,
        )

    def wait_up(self) -> dict[str, Any]:
        """Wait until the engine is up; return what it says of itself."""
        return self.answer()

    def order(self, order: Mapping[str, Any]) -> None:
        """Give an order; `answer` waits for what comes of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            WorkerError: The engine failed.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in found:
            raise WorkerError(f"{self.name}: {found['error']}\n{self.tail()}")
        return found

    def do(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Give an order and wait for what comes of it."""
        self.order(order)
        return self.answer()

    def tail(self) -> str:
        """Return the last lines that the process printed."""
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._output.close()


class Workers:
    """Several engines at once; made together, since making one takes long.

    Args:
        specs: By name.
    """

    def __init__(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
        self.by_name = {name: Worker(name, spec) for name, spec in specs.items()}
        self.states: dict[str, Any] = {}

    def __enter__(self) -> Workers:
        for name, worker in self.by_name.items():
            self.states[name] = worker.wait_up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for worker in self.by_name.values():
            worker.close()

    def together(self, order: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Give all the same order at once."""
        for worker in self.by_name.values():
            worker.order(order)
        return {name: worker.answer() for name, worker in self.by_name.items()}

    def in_turn(
        self, orders: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """Let all serve each order one after the other; every second round backwards."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names or self.by_name}
        for number, order in enumerate(orders):
            turn = list(found)
            for name in turn if number % 2 == 0 else reversed(turn):
                found[name].append(self.by_name[name].do(order))
        return found


def _environment(spec: Mapping[str, Any]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVDEFRAG_")}
    paths = [str(HERE), str(HARNESS)]
    if kept.get("SGLANG_USE_CPU_ENGINE") == "1":
        paths.append(str(HARNESS / "stubs"))
    kept["PYTHONPATH"] = os.pathsep.join(p for p in [*paths, kept.get("PYTHONPATH", "")] if p)
    kept.update(ORACLES if spec.get("oracles") else {})
    kept["KVDEFRAG_ENABLED"] = "true" if spec.get("enabled", True) else "false"
    return kept | dict(spec.get("env", {}))
