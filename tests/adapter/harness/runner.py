"""Serves one case in this process and says what came out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.cases import Case
from harness.chaos import ChaosPolicy, disturb
from harness.engine import Engine, generate
from harness.movers import recording
from harness.watch import Codebook, Watch
from harness.workloads import Ask
from torch import Tensor


class Run:
    """One case on one scheduler.

    Args:
        case: What to serve.
        models: Folder of the checkpoints.
        chaos: Seed of the random policy, or None for the policy as it is.
        watched: Whether every row is checked around every step.
        prepare: Called with the run before anything is served: plants a fault.
        buffers: Chooses the buffers that are moved.
        dawdle: Seconds to wait in every seventh iteration.
    """

    def __init__(
        self,
        case: Case,
        models: Path,
        *,
        chaos: int | None = None,
        watched: bool = True,
        prepare: Callable[[Run], None] = lambda run: None,
        buffers: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda buffers: buffers,
        dawdle: float = 0.0,
    ) -> None:
        draft = {"speculative_draft_model_path": str(models / case.draft)} if case.draft else {}
        with recording(buffers) as movers, patch.dict(os.environ, case.variables):
            self.engine = Engine(model_path=str(models / case.model), **case.options, **draft)
        self.mover = movers[0] if movers else None
        self.scheduler = self.engine.scheduler
        self.attachment = getattr(self.scheduler, "kvdefrag", None)
        self._case, self._dawdle = case, dawdle
        self._todo: list[Ask] = list(case.workload.asks)
        self._requests: dict[str, Any] = {}
        self._rounds = 2 if case.workload.flush else 1
        self.outputs: dict[str, list[int]] = {}
        self.policy: ChaosPolicy | None = None
        self.watch = self._watch(models) if watched else None
        if self.attachment is not None and chaos is not None:
            self.policy = disturb(self.scheduler, self.attachment, chaos)
        prepare(self)
        if self.watch is not None and self.attachment is not None:
            self._step_watched()
        self.engine.at_top, self.engine.feed = self._at_top, self._feed
        self.engine.finished = lambda: not self._todo and self._rounds <= 1

    def serve(self) -> dict[str, Any]:
        """Serve everything, check the idle pool, return what is to be compared."""
        self.engine.run()
        self._collect()
        s = self.scheduler
        allocator, tree = s.token_to_kv_pool_allocator, s.tree_cache
        if hasattr(getattr(tree, "tree_core", None), "sanity_check"):
            tree.tree_core.sanity_check([], [])
        return {
            "outputs": self.outputs,
            "left": allocator.size - allocator.available_size() - tree.evictable_size(),
            "retractions": sum(r.retraction_count for r in self._requests.values()),
            "iterations": self.engine.iteration,
            "cached": sum(getattr(r, "cached_tokens", 0) for r in self._requests.values()),
            "verified": sum(getattr(r, "spec_verify_ct", 0) for r in self._requests.values()),
            "watched_rows": self.watch.rows if self.watch else 0,
            "attached": type(allocator).__name__ if self.attachment is not None else None,
            "state": self.attachment.state() if self.attachment is not None else None,
            "plans": self.mover.hash.hexdigest() if self.mover else None,
            "moved": self.mover.rows if self.mover else 0,
            "chosen": dict(self.policy.chosen) if self.policy else {},
        }

    def _at_top(self, iteration: int) -> None:
        self._collect()
        if self._dawdle and iteration % 7 == 0:
            time.sleep(self._dawdle)
        if self.watch is not None:
            self.watch.at_top()

    def _feed(self, iteration: int) -> Sequence[Any]:
        from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput

        self._collect()
        found: list[Any] = self._open_sessions() if iteration == 1 else []
        due = [a for a in self._todo if a.at <= iteration and not self._waits(a)]
        for ask in due:
            self._todo.remove(ask)
            tag = "" if self._rounds == 2 or not self._case.workload.flush else "again-"
            found.append(generate(tag + ask.rid, ask.tokens, ask.count, session=ask.session))
        found += [AbortReq(rid=rid) for rid, at in self._case.workload.aborts if at == iteration]
        if not found and not self._todo and self._rounds == 2 and self.engine.idle():
            self._rounds, self._todo = 1, list(self._case.workload.asks)
            found.append(FlushCacheReqInput())
        return found

    def _open_sessions(self) -> list[Any]:
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        names = sorted({a.session for a in self._case.workload.asks if a.session})
        return [
            OpenSessionReqInput(capacity_of_str_len=1000, session_id=name, streaming=True)
            for name in names
        ]

    def _waits(self, ask: Ask) -> bool:
        # A turn comes when the one before is over.
        if ask.session is None or ask.rid.endswith("t0"):
            return False
        head, turn = ask.rid.rsplit("t", 1)
        before = self._requests.get(f"{head}t{int(turn) - 1}")
        return before is None or not before.finished()

    def _collect(self) -> None:
        wanted = {a.rid: a.count for a in self._case.workload.asks}
        for request in self.engine.requests():
            self._requests[request.rid] = request
        for rid, request in self._requests.items():
            # A verify step may run past the last token; what is sent out is cut.
            count = wanted.get(rid.removeprefix("again-"), 0)
            self.outputs[rid] = list(request.output_ids)[:count]

    def _watch(self, models: Path) -> Watch:
        from kvdefrag.sglang.pools import _draft_runners

        book = Codebook(models / self._case.model)
        drafts = [runner.token_to_kv_pool for runner in _draft_runners(self.scheduler)]
        return Watch(self.scheduler, book, drafts)

    def _step_watched(self) -> None:
        attachment, watch = self.attachment, self.watch
        step = attachment.step

        def watched() -> None:
            watch.before()
            step()
            watch.after()

        attachment.step = watched
