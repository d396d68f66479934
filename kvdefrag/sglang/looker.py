"""Looks at a scheduler's requests between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvdefrag.core.view import EngineView
from kvdefrag.errors import Busy
from kvdefrag.sglang.census import census
from kvdefrag.sglang.compat import Compat
from kvdefrag.sglang.trees import Tree


class Looker:
    """Makes views of a scheduler's rows.

    Args:
        scheduler: SGLang's.
        compat: How this version keeps its requests.
        tree: Values of its prefix tree.
    """

    def __init__(self, scheduler: Any, compat: Compat, tree: Tree) -> None:
        self._scheduler, self._compat, self._tree = scheduler, compat, tree
        self._table: Tensor = scheduler.req_to_token_pool.req_to_token

    def idle(self) -> bool:
        """Say whether the step before ran no batch."""
        return self._scheduler.last_batch is None

    def look(self, step: int) -> EngineView:
        """Return the rows, which may be moved from now on: the device waits for the forward.

        Raises:
            Busy: Names what must be over before anything moves.
        """
        view = self.view(step)
        # On the device only: rows of the forward in flight are still being written, and slots of
        # requests that have just finished too.
        if self._table.device.type == "cuda" and self._scheduler.enable_overlap:
            torch.cuda.current_stream().wait_stream(self._scheduler.forward_stream)
        return view

    def view(self, step: int) -> EngineView:
        """Return the rows to be read only.

        Raises:
            Busy: Not all of them are understood now.
        """
        found = census(self._scheduler, self._compat)
        if found.beams:
            raise Busy("beam search")
        pool = self._scheduler.req_to_token_pool
        if len(found.holders) != self._table.shape[0] - 1 - len(pool.free_slots):
            raise Busy("a row of unknown owner")
        # Flat: NumPy takes several times as long over a list of tuples.
        lengths = np.array([n for held, _, _ in found.holders for n in held], dtype=np.int64)
        lengths = lengths.reshape(-1, 4)
        lengths = lengths[np.argsort(lengths[:, 0], kind="stable")]
        rows = lengths[:, 0]
        return EngineView(
            step=step,
            table=self._table,
            rows=rows,
            generations=pool.req_generation.numpy()[rows].astype(np.int64),
            protected=lengths[:, 1],
            committed=np.minimum(lengths[:, 2], lengths[:, 3]),
            allocated=lengths[:, 3],
            shared_values=lambda: self.tree_values(found.end_nodes(self._compat)),
            copies=self.copies,
            at_work=found.at_work,
        )

    def tree_values(self, ends: Iterable[Any]) -> Sequence[Tensor]:
        """Return the slots of every tree node on the paths to `ends`."""
        return self._tree.values(ends)

    def copies(self) -> Sequence[Tensor]:
        """Return tensors of the chunked request that repeat slots of its row."""
        chunked = self._scheduler.chunked_req
        return self._compat.copies(chunked) if chunked is not None else ()
