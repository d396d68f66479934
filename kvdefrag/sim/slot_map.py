"""Which slot of a replay stands for which slot of the recorded run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvdefrag.core.demand import IntArray
from kvdefrag.core.plan import MovePlan
from kvdefrag.errors import SlotError


class SlotMap:
    """A one-to-one map between live recorded slots and live slots of the replay.

    After an error it is of no use any more.

    It is the replay's mover, too: what a replayed slot "holds" is the recorded slot's number, and
    that is what a relocation copies.

    Args:
        size: Slots 1..size on both sides.
        row_bytes: Bytes of one slot over all buffers.
    """

    def __init__(self, size: int, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self.clear(size)

    def clear(self, size: int) -> None:
        """Forget everything."""
        self._ours = np.zeros(size + 1, dtype=np.int64)
        self._theirs = np.zeros(size + 1, dtype=np.int64)

    @property
    def empty(self) -> bool:
        """Whether no slot is live."""
        return not self._ours.any()

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    def copy(self, plan: MovePlan) -> Tensor | None:
        real = (plan.src != plan.dst).numpy()
        src, dst = plan.src.numpy()[real], plan.dst.numpy()[real]
        theirs = self._theirs[src]
        self._ours[theirs] = dst
        self._theirs[src] = 0
        self._theirs[dst] = theirs
        return None

    def give(self, recorded: IntArray, slots: Tensor) -> None:
        """Let `slots` stand for `recorded`, pairwise, int64 [n] each.

        Raises:
            SlotError: A recorded slot is live already or named twice.
        """
        ours = slots.numpy()
        wrong = self._ours[recorded] != 0
        self._ours[recorded] = ours
        # Of a slot that is named twice only the last mention has stayed.
        wrong |= self._ours[recorded] != ours
        if wrong.any():
            raise _wrong("handed out twice", recorded[wrong])
        self._theirs[ours] = recorded

    def look(self, recorded: IntArray) -> IntArray:
        """Return the slots that stand for `recorded`, int64 [n].

        Raises:
            SlotError: A recorded slot is not live.
        """
        slots: IntArray = self._ours[recorded]
        if not slots.all():
            raise _wrong("not live", recorded[slots == 0])
        return slots

    def dead(self) -> npt.NDArray[np.bool_]:
        """Return which recorded slots are not live, bool [size + 1]."""
        dead: npt.NDArray[np.bool_] = self._ours == 0
        return dead

    def recorded(self, slots: IntArray) -> IntArray:
        """Return the recorded slots that `slots` stand for, int64 [n]; 0 for none."""
        theirs: IntArray = self._theirs[slots]
        return theirs

    def take(self, recorded: IntArray) -> IntArray:
        """Return the slots that stand for `recorded`, which are live no more.

        Raises:
            SlotError: A recorded slot is not live or named twice.
        """
        slots = self.look(recorded)
        count = np.arange(recorded.shape[0])
        self._ours[recorded] = count
        again = self._ours[recorded] != count
        if again.any():
            raise _wrong("named twice", recorded[again])
        self._ours[recorded] = 0
        self._theirs[slots] = 0
        return slots

    def rename(self, old: IntArray, new: IntArray) -> None:
        """Follow a relocation of the recorded run from `old` to `new`, int64 [n] each.

        Raises:
            SlotError: An old slot is not live, or a new one is.
        """
        slots = self.take(old)
        taken = new[self._ours[new] != 0]
        if taken.shape[0]:
            raise _wrong("live, so no row can move there", taken)
        self._ours[new] = slots
        self._theirs[slots] = new


def _wrong(what: str, slots: IntArray) -> SlotError:
    first = tuple(int(s) for s in slots[:8])
    return SlotError(f"recorded slots {list(first)} are {what}", first)
