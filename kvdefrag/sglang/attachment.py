"""What the plugin is to one scheduler: its allocator taken over, and a step between its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvdefrag import __version__
from kvdefrag.config import Config
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.defragmenter import Defragmenter
from kvdefrag.core.mover import Mover, TorchMover
from kvdefrag.core.profile import DeviceProfile
from kvdefrag.core.readback import Readback
from kvdefrag.core.report import StepReport
from kvdefrag.core.view import EngineView
from kvdefrag.errors import Busy
from kvdefrag.sglang.compat import Compat, owners_of
from kvdefrag.sglang.pools import all_buffers
from kvdefrag.sglang.support import check_server
from kvdefrag.sglang.trees import tree_of

logger = logging.getLogger(__name__)


class Attachment:
    """Takes a scheduler's allocator over and relocates between its steps.

    Args:
        scheduler: SGLang's, fully made and idle.
        config: The settings.
        compat: How this version keeps its requests.
        profile: Prices of this GPU.

    Raises:
        Refusal: Something is not supported; the scheduler is as it was.
    """

    def __init__(
        self, scheduler: Any, config: Config, compat: Compat, profile: DeviceProfile
    ) -> None:
        check_server(scheduler)
        self._scheduler, self._compat = scheduler, compat
        self.config = config
        self.allocator = scheduler.token_to_kv_pool_allocator
        self._table: Tensor = scheduler.req_to_token_pool.req_to_token
        buffers = all_buffers(scheduler, self.allocator.size)
        self.tree = tree_of(scheduler.tree_cache)
        device = self._table.device
        readback = Readback(0 if device.type == "cpu" else config.relocation.readback_steps)
        placement = config.placement
        core = SlotAllocator(
            self.allocator.size,
            table=self._table,
            page=config.page,
            discipline=placement.free_list,
            reservation=placement.reservation,
            reorder_interval=placement.reorder_interval,
            checks=placement.checks,
            device=device,
            readback=None if device.type == "cpu" else readback,
        )
        self.defragmenter = Defragmenter(
            config,
            allocator=core,
            table_rows=self._table.shape[0],
            mover=_mover(buffers),
            profile=profile,
            readback=readback,
            verify=not scheduler.spec_algorithm.is_none(),
        )
        self.allocator.take_over(core)
        self.allocator.on_clear = self.defragmenter.clear
        self.allocator.on_fault = self._fault
        self.error: str | None = None
        self.steps = 0
        self.last: StepReport | None = None

    def describe(self) -> str:
        """Return the start-up line."""
        pool = type(self.allocator.get_kvcache()).__name__
        mode = self.config.relocation.mode
        return (
            f"kvdefrag {__version__} active: sglang {self._compat.version}, "
            f"{self.allocator.size} slots of {pool}, tree {self.tree.name}, "
            f"placement {self.config.placement.free_list}"
            f"{' with reservation' if self.config.placement.reservation else ''}, "
            f"relocation {mode}"
        )

    def step(self) -> None:
        """Do what the policy decides, at the top of the scheduler's loop; never raises.

        A fault of ours turns relocation off for good, says so once, and the server goes on.
        """
        if self.error is not None:
            return
        try:
            self.last = self.defragmenter.step(self.steps, self._look)
            self.steps += 1
        except Exception as error:
            self._fault(error)

    def state(self) -> dict[str, Any]:
        """Return what `/server_info` shows, in plain values."""
        core = self.allocator.core
        last = self.last
        return {
            "version": __version__,
            "active": self.error is None,
            "error": self.error,
            "mode": self.config.relocation.mode,
            "steps": self.steps,
            "moved_rows": self.defragmenter.moved_rows,
            "reason": last.reason if last else None,
            "coverage": last.coverage if last else None,
            "reserved_slots": core.reserved_size() if core else 0,
            "available": self.allocator.available_size(),
        }

    def _fault(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        logger.error("kvdefrag: relocation is off after a fault; serving goes on", exc_info=error)

    def _look(self) -> EngineView:
        pool = self._scheduler.req_to_token_pool
        owners = owners_of(self._scheduler, self._compat)
        if len(owners) != self._table.shape[0] - 1 - len(pool.free_slots):
            raise Busy("a row of unknown owner")
        self._wait_for_forward()
        lengths = np.array([k for k, _ in owners], dtype=np.int64).reshape(-1, 4)
        lengths = lengths[np.argsort(lengths[:, 0], kind="stable")]
        rows = lengths[:, 0]
        return EngineView(
            step=self.steps,
            table=self._table,
            rows=rows,
            generations=pool.req_generation.numpy()[rows].astype(np.int64),
            protected=lengths[:, 1],
            committed=np.minimum(lengths[:, 2], lengths[:, 3]),
            allocated=lengths[:, 3],
            shared_values=lambda: self._tree_values(node for _, node in owners),
            copies=self._copies,
        )

    def _tree_values(self, ends: Iterable[Any]) -> Sequence[Tensor]:
        return self.tree.values(ends)

    def _copies(self) -> Sequence[Tensor]:
        chunked = self._scheduler.chunked_req
        return self._compat.copies(chunked) if chunked is not None else ()

    def _wait_for_forward(self) -> None:
        # On the device only: rows of the forward in flight are still being written, and slots of
        # requests that have just finished too.
        if self._table.device.type == "cuda" and self._scheduler.enable_overlap:
            torch.cuda.current_stream().wait_stream(self._scheduler.forward_stream)


def _mover(buffers: Sequence[Tensor]) -> Mover:
    if buffers[0].device.type == "cpu":
        return TorchMover(buffers)
    from kvdefrag.gpu import DeviceMover

    mover = DeviceMover(buffers)
    mover.prewarm()
    return mover
