"""A run that is told things on the way, as an operator would, and what each step of it saw."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Commanded:
    """Feeds commands to a run among its requests.

    Args:
        run: Made with control on.
        script: Iteration, and a command without its id; `settings` alone makes a plain message.
    """

    def __init__(self, run: Any, script: Sequence[tuple[int, dict[str, Any]]]) -> None:
        self._run, self._script = run, list(script)
        self.trace: list[dict[str, Any]] = []
        engine, attachment = run.engine, run.attachment
        feed, finished, step = engine.feed, engine.finished, attachment.step
        engine.feed = lambda iteration: [*feed(iteration), *self._due(iteration)]
        engine.finished = lambda: finished() and not self._script and attachment.due is None

        def traced() -> None:
            moved, number = self._moved(), attachment.steps
            step()
            last = attachment.last
            self.trace.append(
                {
                    "step": number,
                    "moved": self._moved() - moved,
                    "mode": attachment.config.relocation.mode,
                    "reason": last.reason if last else None,
                    "gates": list(last.gates) if last else [],
                }
            )

        attachment.step = traced

    def serve(self) -> dict[str, Any]:
        """Serve the run and wait until every effect is known."""
        from sglang.srt.managers.io_struct import SetInternalStateReqOutput

        served = self._run.serve()
        control = self._run.attachment.control
        deadline = time.monotonic() + 20
        while any(c["status"] == "waiting" for c in control.state()["commands"]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        sent = self._run.engine.sent
        taken = [m.updated for m in sent if isinstance(m, SetInternalStateReqOutput)]
        return served | {"taken": taken, "control": control.state(), "trace": self.trace}

    def _moved(self) -> int:
        return int(self._run.mover.rows)

    def _due(self, iteration: int) -> list[Any]:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        due = [(at, command) for at, command in self._script if at <= iteration]
        self._script = self._script[len(due) :]
        found = []
        for at, command in due:
            text = json.dumps({"id": f"at-{at}"} | self._named(command))
            found.append(SetInternalStateReq(rid=text, server_args={"kvdefrag": 1}))
        return found

    def _named(self, command: dict[str, Any]) -> dict[str, Any]:
        # Whoever has run longest.
        if command.get("request") == "any":
            running = self._run.scheduler.running_batch.reqs
            return command | {"request": running[0].rid if running else "nobody"}
        return command


def replayed(path: Path) -> dict[str, Any]:
    """Return what a replay says of a log that a live scheduler has written for a while."""
    from kvdefrag.core.host_event_log import EventLog
    from kvdefrag.sim.arms import choose
    from kvdefrag.sim.replay import replay

    log = EventLog(path)
    kinds: dict[str, int] = {}
    for event in log:
        kinds[type(event).__name__] = kinds.get(type(event).__name__, 0) + 1
    arms = choose(["stock", "placement+reservation"], [], page=log.header.page)
    result = replay(EventLog(path), arms, path=path, sample_every=1)
    coverage = {arm.name: arm.metrics["page_coverage_mean"] for arm in result.arms}
    return {"kinds": kinds, "cut": log.cut, "coverage": coverage}
