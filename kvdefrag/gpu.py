"""Movers, statistics, views and tenure on a GPU: our kernels there, their references elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kvdefrag_kernels as kernels
from kvdefrag.core.plan import MovePlan
from kvdefrag.errors import PlanError


class DeviceMover:
    """Copies the rows of a plan in every buffer, in one launch on a GPU.

    On a GPU a plan that names slot 0, a slot twice or a slot outside the pool moves nothing and
    sets a flag (`flag`); elsewhere it raises `PlanError`. Nothing waits for the device.

    Args:
        buffers: Tensors whose first dimension is the slot, any dtype, row shape and stride.
        scratch_bytes: Staging memory for overlapping moves.
    """

    def __init__(self, buffers: Sequence[Tensor], *, scratch_bytes: int = 32 << 20) -> None:
        self._buffers = tuple(buffers)
        on_gpu = buffers[0].device.type == "cuda"
        self._table = kernels.BufferTable(buffers, scratch_bytes=scratch_bytes) if on_gpu else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot over all buffers."""
        return sum(b[0].numel() * b.element_size() for b in self._buffers)

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
        try:
            if self._table is not None:
                kernels.relocate_rows(self._table, plan.src, plan.dst, disjoint=plan.disjoint)
            else:
                kernels.relocate_rows_torch(
                    self._buffers, plan.src, plan.dst, disjoint=plan.disjoint
                )
        except ValueError as error:
            raise PlanError(str(error)) from error
        return None if self._table is None else kernels.voided(self._table)

    def prewarm(self) -> None:
        """Build every kernel variant that a later copy needs; changes no byte."""
        if self._table is not None:
            kernels.prewarm(self._table)

    def refresh(self, buffers: Sequence[Tensor]) -> None:
        """Read addresses again after the pool was resized or remapped."""
        self._buffers = tuple(buffers)
        if self._table is not None:
            self._table.refresh(buffers)

    def flag(self) -> Tensor | None:
        """Return why plans were voided so far, an int64 scalar on the device; None elsewhere.

        Bits of `kvdefrag_kernels.Reason`; 0 while every plan was sound. For asynchronous read-back.
        """
        return self._table.history if self._table is not None else None

    @property
    def state(self) -> Tensor | None:
        """Launch state that a commit on the device reads; None where there is no device."""
        return self._table.state if self._table is not None else None


@dataclass(frozen=True)
class RowStats:
    """Layout of requests, as `kvdefrag.core.layout` defines it.

    Attributes:
        values: int32 [n, 4]: runs, longest run, tokens in aligned pages, tokens left over.
    """

    values: Tensor

    @property
    def runs(self) -> Tensor:
        """Runs of each request."""
        return self.values[:, 0]

    @property
    def longest_run(self) -> Tensor:
        """Tokens of each request's longest run."""
        return self.values[:, 1]

    @property
    def covered(self) -> Tensor:
        """Tokens of each request in aligned pages."""
        return self.values[:, 2]

    @property
    def left_over(self) -> Tensor:
        """Tokens of each request outside aligned pages."""
        return self.values[:, 3]


class DeviceStats:
    """Measures the layout of up to `rows` requests; on a GPU in one launch, without waiting.

    Args:
        rows: Requests at most.
        longest: Tokens of a request at most.
        page: Tokens to a page.
        device: Where the table is.
    """

    def __init__(self, rows: int, longest: int, *, page: int, device: torch.device) -> None:
        self._page, self._longest = page, longest
        self._space = None
        if device.type == "cuda":
            self._space = kernels.stats_space(rows, longest, page=page, device=device)

    def measure(self, table: Tensor, rows: Tensor, lengths: Tensor) -> RowStats:
        """Return the statistics; on a GPU in pinned host memory, valid once the stream is past."""
        if self._space is None:
            values = kernels.layout_stats_torch(table, rows, lengths, page=self._page)
            return RowStats(values)
        # Fresh each time: a reused buffer could be overwritten before it was read.
        host = torch.empty(rows.numel(), 4, dtype=torch.int32, pin_memory=True)
        kernels.layout_stats(
            table,
            rows,
            lengths,
            page=self._page,
            longest=self._longest,
            space=self._space,
            out=host,
        )
        return RowStats(host)


class DevicePageView:
    """Views requests as aligned pages plus left-over slots, in fixed buffers.

    Args:
        rows: Requests at most.
        longest: Tokens of a request at most.
        most_left: Left-over slots of a request at most; more set its overflow flag.
        page: Tokens to a page.
        device: Where the table is.
    """

    def __init__(
        self, rows: int, longest: int, *, most_left: int, page: int, device: torch.device
    ) -> None:
        self._page = page
        self.view = kernels.page_view_buffers(
            rows, longest, most_left=most_left, page=page, device=device
        )

    def fill(self, table: Tensor, rows: Tensor, lengths: Tensor) -> kernels.PageView:
        """Fill and return the view; capture-safe on a GPU."""
        on_gpu = table.device.type == "cuda"
        fill = kernels.page_view if on_gpu else kernels.page_view_torch
        return fill(table, rows, lengths, self.view, page=self._page)


class DeviceTableRows:
    """A holder: table rows within their live ranges, rewritten in place.

    Args:
        table: int32 or int64 [requests, width].
        rows: Distinct rows, int64 [n] on the table's device.
        starts, ends: Live range of each, int64 [n] on the table's device.
        longest: Tokens of a range at most, if the host knows.
    """

    def __init__(
        self, table: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, *, longest: int | None
    ) -> None:
        self._table, self._longest = table, longest
        self._ranges = rows, starts, ends

    def remap(self, lut: Tensor) -> None:
        """Replace every live slot s by `lut[s]`."""
        on_gpu = self._table.device.type == "cuda"
        remap = kernels.remap if on_gpu else kernels.remap_torch
        remap(lut, self._table, *self._ranges, longest=self._longest)


class DeviceValues:
    """A holder: slot tensors that others keep, rewritten in place in one launch.

    Args:
        values: Contiguous int32 or int64 tensors; no two share storage.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = tuple(values)

    def remap(self, lut: Tensor) -> None:
        """Replace every slot s by `lut[s]`."""
        on_gpu = lut.device.type == "cuda"
        remap = kernels.remap_values if on_gpu else kernels.remap_values_torch
        remap(lut, self._values)


class DeviceTenure:
    """A whole tenure step on the device: plan, copy, table rewrite, free-list substitution.

    Five launches on a GPU and nothing that waits. For lists of any order; the lowest whole free
    pages are used first.

    Args:
        mover: Copies the rows.
        size: Slots 1..size.
        groups: Groups a step, exactly.
        page: Tokens to a group.
        device: Where table and free list are.
    """

    def __init__(
        self, mover: DeviceMover, *, size: int, groups: int, page: int, device: torch.device
    ) -> None:
        self._mover, self._page = mover, page
        self._on_gpu = device.type == "cuda"
        self.space = kernels.tenure_space(size, groups, page=page, device=device)
        self._sound = torch.zeros(8, dtype=torch.int64, device=device)

    def step(self, table: Tensor, rows: Tensor, starts: Tensor, free: Tensor) -> Tensor:
        """Move tokens `[starts[g], starts[g] + page)` of `rows[g]`; a row below 0 is no group.

        Returns:
            int32 [groups] on the device: 1 where the group has moved. Valid until the next step.
        """
        plan = kernels.plan_tenure if self._on_gpu else kernels.plan_tenure_torch
        commit = kernels.commit_tenure if self._on_gpu else kernels.commit_tenure_torch
        plan(table, rows, starts, free, self.space, page=self._page)
        self._mover.copy(MovePlan(self.space.src, self.space.dst))
        state = self._mover.state
        commit(
            table,
            rows,
            starts,
            free,
            self.space,
            self._sound if state is None else state,
            page=self._page,
        )
        return self.space.moved
