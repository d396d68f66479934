"""A scheduler's tables as they are at one moment, on their way to the host."""

from __future__ import annotations

from typing import Any

import torch

from kvdefrag.control.preview import Snapshot
from kvdefrag.core.view import EngineView, to_device
from kvdefrag.sglang.late import Late


class Frozen:
    """Copies everything now; somebody who may wait for the device reads it.

    Args:
        attachment: Whose tables.
        view: Its running requests.
    """

    def __init__(self, attachment: Any, view: EngineView) -> None:
        core, device = attachment.allocator.core, view.device
        self._view, self._size, self._page = view, core.size, core.page
        self._row_bytes = attachment.mover.row_bytes
        attachment.defragmenter.tracker.observe(view)
        self._tenured = attachment.defragmenter.tracker.tenured(view)
        width = int(view.allocated.max(initial=0))
        rows = view.table[:, :width].index_select(0, to_device(view.rows, device))
        self._table = Late(rows.reshape(-1))
        self._shape = rows.shape
        values = [value.long() for value in view.shared_values()]
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self._shared = Late(torch.cat([none, *values]))
        self._free = Late(core.free_slots())

    def wait(self) -> Snapshot:
        """Return it; waits for the device."""
        view = self._view
        table = torch.from_numpy(self._table.wait()).view(self._shape).int()
        return Snapshot(
            size=self._size,
            page=self._page,
            row_bytes=self._row_bytes,
            table=table,
            generations=view.generations,
            protected=view.protected,
            committed=view.committed,
            allocated=view.allocated,
            tenured=self._tenured,
            shared=torch.from_numpy(self._shared.wait()),
            free=torch.from_numpy(self._free.wait()),
        )
