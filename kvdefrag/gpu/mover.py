"""Copies rows in every buffer at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import kvdefrag_kernels as kernels
from kvdefrag.core.mover import row_bytes
from kvdefrag.core.plan import MovePlan
from kvdefrag.errors import PlanError
from kvdefrag.gpu.where import launches


class DeviceMover:
    """Copies the rows of a plan in every buffer, in one launch on a GPU.

    On a GPU a plan that names slot 0, a slot twice or a slot outside the pool moves nothing and
    sets a flag (`flag`); elsewhere it raises `PlanError`. Nothing waits for the device.

    Args:
        buffers: Tensors whose first dimension is the slot, any dtype, row shape and stride.
        scratch_bytes: Staging memory for overlapping moves.
    """

    def __init__(self, buffers: Sequence[Tensor], *, scratch_bytes: int = 32 << 20) -> None:
        self._keep(buffers)
        on_gpu = launches(buffers[0].device)
        self._table = kernels.BufferTable(buffers, scratch_bytes=scratch_bytes) if on_gpu else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot over all buffers."""
        return self._row_bytes

    @property
    def overhead_bytes(self) -> int:
        """Device memory held beside the buffers."""
        return self._table.overhead_bytes if self._table else 0

    def copy(self, plan: MovePlan) -> Tensor | None:
        """Copy `src` rows to `dst` rows; pairs that are equal cost nothing.

        Returns:
            On a GPU a bool scalar: whether the plan was voided and nothing was copied.

        Raises:
            PlanError: The plan breaks a rule (CPU), or more rows overlap than staging can take.
        """
        self.start(plan)
        return None if self._table is None else kernels.voided(self._table)

    def start(self, plan: MovePlan) -> None:
        """Copy as `copy` does, and leave it to a later launch to look at the verdict in `state`.

        Raises:
            PlanError: As `copy`.
        """
        try:
            if self._table is not None:
                kernels.relocate_rows(self._table, plan.src, plan.dst, disjoint=plan.disjoint)
            else:
                kernels.relocate_rows_torch(
                    self._buffers, plan.src, plan.dst, disjoint=plan.disjoint
                )
        except ValueError as error:
            raise PlanError(str(error)) from error

    def prewarm(self) -> None:
        """Build every kernel variant that a later copy needs; changes no byte."""
        if self._table is not None:
            kernels.prewarm(self._table)

    def refresh(self, buffers: Sequence[Tensor]) -> None:
        """Read addresses again after the pool was resized or remapped."""
        self._keep(buffers)
        if self._table is not None:
            self._table.refresh(buffers)

    def _keep(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = tuple(buffers)
        # Asked for at every step: a view of every buffer would be a tenth of a millisecond.
        self._row_bytes = row_bytes(buffers)

    def flag(self) -> Tensor | None:
        """Return why plans were voided so far, an int64 scalar on the device; None elsewhere.

        Bits of `kvdefrag_kernels.Reason`; 0 while every plan was sound. For asynchronous read-back.
        """
        return self._table.history if self._table is not None else None

    @property
    def state(self) -> Tensor | None:
        """Launch state that a commit on the device reads; None where there is no device."""
        return self._table.state if self._table is not None else None
