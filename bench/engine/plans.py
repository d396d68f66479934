"""Keeps account of every plan that a mover carries out, on a CPU and on a GPU alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvdefrag.core.plan import MovePlan


class Account:
    """Hash and number of all pairs so far; reading them waits for the device.

    Attributes:
        hash: Over the sources and destinations of every plan, in order.
        rows: Rows that were really moved.
    """

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.rows = 0

    def note(self, plan: MovePlan) -> None:
        """Add a plan."""
        src, dst = plan.src.cpu(), plan.dst.cpu()
        self.rows += int((src != dst).sum())
        self.hash.update(src.numpy().tobytes() + dst.numpy().tobytes())


@contextmanager
def recording(
    choose: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda buffers: buffers,
    *,
    copies: bool = True,
) -> Iterator[list[Account]]:
    """Record what the schedulers made inside move.

    Args:
        choose: Returns the buffers that are moved, of all that should be.
        copies: Whether anything is copied at all.
    """
    from kvdefrag.sglang import attachment

    made: list[Account] = []
    original: Any = attachment._mover

    def recorded(buffers: Sequence[Tensor]) -> Any:
        mover, account = original(choose(buffers)), Account()
        made.append(account)
        # On a GPU everything goes through `start`, on a CPU through `copy`.
        name = "start" if hasattr(mover, "start") else "copy"
        move = getattr(mover, name)

        def noted(plan: MovePlan) -> Any:
            account.note(plan)
            return move(plan) if copies else None

        setattr(mover, name, noted)
        return mover

    attachment._mover = recorded
    try:
        yield made
    finally:
        attachment._mover = original
