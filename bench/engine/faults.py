"""Parts of a move that are left out on purpose, to show that each is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Buffers = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _all(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    return buffers


def _but_the_last(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    return buffers[:-1]


@dataclass(frozen=True)
class Fault:
    """One part left out.

    Attributes:
        plant: Takes it out of a worker whose engine is up.
        buffers: Chooses the buffers that are moved.
        copies: Whether rows are copied at all.
    """

    plant: Callable[[Any], None]
    buffers: Buffers = _all
    copies: bool = True

    @property
    def meddles(self) -> bool:
        """Whether the mover is another one."""
        return not self.copies or self.buffers is not _all


def _nothing(worker: Any) -> None:
    pass


def _no_wait(worker: Any) -> None:
    looker = worker.attachment.looker
    looker.look = looker.view


def _no_rows(worker: Any) -> None:
    attachment, table = worker.attachment, worker.scheduler.req_to_token_pool.req_to_token
    step = attachment.step

    def kept() -> None:
        # Nothing is allocated within the step, so this is the table without our rewrite.
        before = table.clone()
        step()
        table.copy_(before)

    attachment.step = kept


def _no_tree(worker: Any) -> None:
    looker = worker.attachment.looker
    values = looker.tree_values
    looker.tree_values = lambda ends: [value.clone() for value in values(ends)]


def _other_table(worker: Any) -> None:
    # A new table takes the place of the one that graphs and backends know.
    attachment, pool = worker.attachment, worker.scheduler.req_to_token_pool
    step, known = attachment.step, pool.req_to_token

    def exchanged() -> None:
        known.copy_(pool.req_to_token)
        kept = known.clone()
        step()
        pool.req_to_token = known.clone()
        known.copy_(kept)

    attachment.step = exchanged


FAULTS: dict[str, Fault] = {
    "nothing": Fault(_nothing),
    "the wait for the forward": Fault(_no_wait),
    "the copy": Fault(_nothing, copies=False),
    "the copy of one buffer": Fault(_nothing, _but_the_last),
    "the table rows": Fault(_no_rows),
    "the tree": Fault(_no_tree),
    "the rewrite in place": Fault(_other_table),
}
