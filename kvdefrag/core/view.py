"""What a step knows of the engine: host numbers only, slots stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


def _no_values() -> Sequence[Tensor]:
    return ()


@dataclass(frozen=True)
class EngineView:
    """The running requests as the engine sees them at the top of a step.

    Attributes:
        step: Number of the step, the same on every rank.
        table: int32 [rows, width], the engine's `req_to_token`.
        rows: int64 [n], table rows of all live requests; distinct.
        generations: int64 [n], how often the row has been given out: with the row it names the
            request for good.
        protected: int64 [n], tokens at the front whose slots the prefix tree owns.
        committed: int64 [n], tokens that will not be taken back.
        allocated: int64 [n], tokens the row holds slots for on the engine's account.
        shared_values: Returns the slot tensors (int64) of the tree nodes that may move; asked
            for only by mechanisms that move shared slots.
        copies: Returns further tensors of slots that repeat what rows or tree name, and must
            follow them.
        at_work: Requests that run or wait to run; None if every row is such a request's. A row
            may be kept for a request to come, so that an idle engine may have rows.
    """

    step: int
    table: Tensor
    rows: IntArray
    generations: IntArray
    protected: IntArray
    committed: IntArray
    allocated: IntArray
    shared_values: Callable[[], Sequence[Tensor]] = field(default=_no_values)
    copies: Callable[[], Sequence[Tensor]] = field(default=_no_values)
    at_work: int | None = None

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self.table.device


def to_device(host: IntArray, device: torch.device) -> Tensor:
    """Return a device copy of host numbers without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(host))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
