"""A live recording beside the replay of it: the same slots at the top of every step."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from kvdefrag.core import events as ev
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.host_event_log import EventLog
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.view import EngineView
from kvdefrag.profiles import default_profile
from kvdefrag.sim.arms import Arm
from kvdefrag.sim.lookahead import Lookahead
from kvdefrag.sim.replay import replay
from kvdefrag.sim.replay_run import ArmReplay


class Recorded:
    """Serves a run that records itself, then replays the log under the same policy.

    Args:
        run: Made with a path to record to.
        log: That path.
    """

    def __init__(self, run: Any, log: Path) -> None:
        self._run, self._log = run, log
        self._live: list[str] = []
        looker, attachment = run.attachment.looker, run.attachment
        step = attachment.step

        def watched() -> None:
            # Before anything moves: the moment that the log's steps speak of.
            core = attachment.allocator.core
            self._live.append(_statistics(core, looker.view(0), core.page))
            step()

        attachment.step = watched

    def serve(self) -> dict[str, Any]:
        """Serve, close the log, replay it."""
        served = self._run.serve()
        attachment = self._run.attachment
        recorder = attachment.recording.recorder
        recorder.close()
        log = EventLog(self._log)
        config = attachment.config.model_copy(
            update={"relocation": attachment.config.relocation.model_copy(update={"mode": "off"})}
        )
        arm = Arm("as recorded", "The policy of the recorded run.", config)
        replayed, kinds = self._follow(log, arm)
        result = replay(EventLog(self._log), [arm], path=self._log, sample_every=1)
        return served | {
            "live": self._live,
            "replayed": replayed,
            "kinds": kinds,
            "cut": log.cut,
            "dropped": recorder.dropped,
            "metrics": result.arms[0].metrics,
        }

    def _follow(self, log: EventLog, arm: Arm) -> tuple[list[str], dict[str, int]]:
        ahead = Lookahead(log)
        run = ArmReplay(arm, log.header, ahead, default_profile())
        found, kinds = [], {}
        for event in ahead:
            run.apply(event)
            name = type(event).__name__
            kinds[name] = kinds.get(name, 0) + 1
            if isinstance(event, ev.Step):
                found.append(_statistics(run.allocator, run._view(), log.header.page))
        return found, kinds


def _statistics(core: SlotAllocator, view: EngineView, page: int) -> str:
    # Rows and free slots by number, and the layout that they make up.
    tables = [
        view.table[row, :end].tolist()
        for row, end in zip(view.rows.tolist(), view.allocated.tolist(), strict=True)
    ]
    free = sorted(core.free_slots().tolist())
    digest = hashlib.sha256(repr((view.rows.tolist(), tables, free)).encode()).hexdigest()[:12]
    rows, ends = view.rows.tolist(), view.allocated
    covered = runs = 0
    if rows:
        at, lengths = torch.from_numpy(view.rows), torch.from_numpy(ends)
        stats = layout_stats(view.table, at, lengths, page_sizes=(page,))
        covered, runs = int(stats.covered[page].sum()), int(stats.runs.sum())
    return (
        f"{len(rows)} rows, {int(ends.sum())} tokens, {runs} runs, {covered} in pages, "
        f"{core.available_size()} free, {core.reserved_size()} reserved, {digest}"
    )
