"""What a scheduler tells a recorder between two steps, and which scheduler has one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from kvdefrag import __version__
from kvdefrag.config import Config
from kvdefrag.core.demand import IntArray
from kvdefrag.core.events import Header, Opened, Shared
from kvdefrag.core.view import EngineView
from kvdefrag.sglang.compat import Compat
from kvdefrag.sglang.late import Late
from kvdefrag.sglang.recorder import Facts, LiveRecorder


class Recording:
    """Records one scheduler.

    Args:
        scheduler: SGLang's.
        recorder: Where events go.
        path: Its file.

    Attributes:
        steps: Steps that have been told.
    """

    def __init__(self, scheduler: Any, recorder: LiveRecorder, path: Path) -> None:
        self._scheduler, self.recorder, self.path = scheduler, recorder, path
        self.steps = 0
        self._began = time.monotonic()
        self._committed = np.zeros(scheduler.req_to_token_pool.req_to_token.shape[0], np.int64)
        self._prompt_tokens = self._output_tokens = 0

    def open(self, view: EngineView, free: Tensor) -> None:
        """Record how a pool in use stands, before anything else.

        Args:
            view: The rows.
            free: int64 [n], every slot that the log is to take for free, in list order.
        """
        record = self.recorder.record
        record(Opened(cast("IntArray", Late(free))))
        for row, end in zip(view.rows.tolist(), view.allocated.tolist(), strict=True):
            record(Shared(row, 0, cast("IntArray", Late(view.table[row, :end]))))
        self._committed[view.rows] = view.committed
        self.step(view)

    def step(self, view: EngineView) -> None:
        """Record how the rows stand at the top of a step."""
        self.steps += 1
        batch, ran, tokens = self._scheduler.last_batch, "", 0
        grown = int((view.committed - self._committed[view.rows]).clip(0).sum())
        if batch is not None and batch.forward_mode.is_extend():
            ran, tokens = "prefill", int(batch.extend_num_tokens or 0)
            self._prompt_tokens += tokens
        elif batch is not None:
            ran, tokens = "decode", int(view.committed.sum())
            self._output_tokens += grown
        self._committed[:] = 0
        self._committed[view.rows] = view.committed
        counts = {"prompt_tokens": self._prompt_tokens, "output_tokens": self._output_tokens}
        cached = int(self._scheduler.tree_cache.evictable_size())
        elapsed = time.monotonic() - self._began
        self.recorder.step(view, Facts(elapsed, ran, tokens, cached, counts))

    def state(self) -> dict[str, Any]:
        """Return what `/server_info` shows of it."""
        return {"dropped_events": self.recorder.dropped}


def recording_of(scheduler: Any, config: Config, compat: Compat) -> Recording | None:
    """Return the recording that the settings ask for; one to each data-parallel rank.

    Raises:
        ConfigError: The file cannot be written.
    """
    path = config.observe.events_path
    if path is None or not scheduler.metrics_collector_context.is_stats_logging_rank:
        return None
    return recording_to(path, scheduler, config, compat)


def recording_to(path: Path, scheduler: Any, config: Config, compat: Compat) -> Recording:
    """Return a recording into a file; a data-parallel rank's own has its number in its name.

    Raises:
        ConfigError: The file cannot be written.
    """
    table = scheduler.req_to_token_pool.req_to_token
    header = Header(
        size=scheduler.token_to_kv_pool_allocator.size,
        page=config.page,
        rows=table.shape[0],
        context=table.shape[1],
        window=0 if scheduler.spec_algorithm.is_none() else _window(scheduler),
        evicts_for_pages=config.placement.evicts_for_pages,
        policy="live",
        kvdefrag=__version__,
    )
    path = _of_rank(path, compat.dp_rank(scheduler))
    most = config.observe.events_max_bytes
    recorder = LiveRecorder(path, header, max_bytes=most, device=table.device)
    return Recording(scheduler, recorder, path)


def _window(scheduler: Any) -> int:
    return int(scheduler.server_args.speculative_num_draft_tokens or 1)


def _of_rank(path: Path, rank: int | None) -> Path:
    # Data-parallel ranks have pools of their own: a file each.
    return path if rank is None else path.with_name(f"dp{rank}-{path.name}")
