"""Tenure and the rewriting of holders in a few launches, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import kvdefrag_kernels as kernels
from kvdefrag.core.demand import IntArray
from kvdefrag.core.disciplines import TwoEnded
from kvdefrag.core.holders import Holder, live_lengths
from kvdefrag.core.plan import MovePlan
from kvdefrag.core.plan_tenure import waiting, walks
from kvdefrag.core.programs import Refused, Tenured
from kvdefrag.core.two_ended import TwoEndedFreeList
from kvdefrag.core.view import EngineView, to_device
from kvdefrag.gpu.holders import DeviceTableRows, DeviceValues
from kvdefrag.gpu.mover import DeviceMover
from kvdefrag.gpu.where import launches


class DevicePrograms:
    """The programs of a relocation on a GPU; decides as `kvdefrag.core.programs.TorchPrograms`.

    A tenure step is five launches (two to plan, two to check and copy, one to commit) beside one
    copy to the device and one of the free list, and nothing waits. The free list is left in any
    order: taken from next, it renews it.

    Args:
        mover: Copies the rows.
        page: Tokens to a group.
    """

    def __init__(self, mover: DeviceMover, *, page: int) -> None:
        self._mover, self._page = mover, page
        self._spaces: dict[int, kernels.TenureSpace] = {}
        self._most: kernels.TenureSpace | None = None
        self._sound = torch.zeros(8, dtype=torch.int64)
        self._counting: kernels.StatsSpace | None = None

    def tenure(
        self,
        view: EngineView,
        starts: IntArray,
        free_list: TwoEnded,
        *,
        max_groups: int,
        dry_run: bool,
        refused: Refused,
    ) -> Tenured | None:
        """Plan a tenure step and carry it out; see `kvdefrag.core.programs.Programs`."""
        assert isinstance(free_list, TwoEndedFreeList)
        if dry_run and free_list.dirty:
            # As the reference leaves it: a dry run must not change what is handed out next.
            free_list.reorder()
        of = waiting(view, starts, page=self._page, max_groups=max_groups)
        if of is None:
            return None
        host = walks(view, starts, of)
        space = self._space(host.shape[1], free_list.size, view.table)
        free = free_list.slots()
        self._plan(view.table, to_device(host, view.device), free, space)
        moves = MovePlan(space.src, space.dst, counted=space.moved)
        refusal = refused(moves)
        if refusal is not None:
            kernels.void_tenure(space, refusal)
        if not dry_run:
            self._mover.start(moves)
            self._commit(view.table, free, space)
            free_list.replace(free, pages=space.lanes)
        return Tenured(moves, space.reached, of)

    def measure(self, view: EngineView) -> Tensor:
        """Return runs and tokens in aligned pages of each row, int32 [2, n], by one launch."""
        numbers = to_device(np.stack([view.rows, view.committed]), view.device)
        longest = int(view.committed.max(initial=0))
        if not launches(view.device):
            stats = kernels.layout_stats_torch(view.table, *numbers, page=self._page)
        else:
            stats = kernels.layout_stats(
                view.table, *numbers, page=self._page, longest=longest, space=self._counting
            )
        return stats[:, ::2].T

    def rows(self, view: EngineView, held: IntArray | None) -> Holder:
        """Return the holder of all live rows."""
        lengths = live_lengths(view, held)
        ranges = to_device(np.stack([view.rows, lengths * 0, lengths]), view.device)
        longest = int(lengths.max(initial=0))
        return DeviceTableRows(view.table, ranges[0], ranges[1], ranges[2], longest=longest)

    def values(self, values: Sequence[Tensor]) -> Holder:
        """Return the holder of slot tensors that others keep."""
        return DeviceValues(values)

    def prewarm(self, table: Tensor, size: int) -> None:
        """Take the memory and build every kernel variant that later steps need.

        Args:
            table: The engine's; none of its bytes change.
            size: Slots 1..size.
        """
        space = self._space(1, size, table)
        if not launches(table.device):
            return
        rows, width = table.shape
        self._counting = kernels.stats_space(rows, width, page=self._page, device=table.device)
        none = torch.zeros(3, 1, dtype=torch.int64, device=table.device)
        kernels.layout_stats(table, none[0], none[0], page=self._page, space=self._counting)
        one = torch.ones(1, dtype=torch.int64, device=table.device)
        self._plan(table, none, one, space)
        self._commit(table, one, space)
        identity = torch.arange(2, device=table.device)
        DeviceTableRows(table, none[0], none[1], none[2], longest=1).remap(identity)
        DeviceValues([one]).remap(identity)

    def _plan(self, table: Tensor, lanes: Tensor, free: Tensor, space: kernels.TenureSpace) -> None:
        plan = kernels.plan_tenure if launches(table.device) else kernels.plan_tenure_torch
        plan(table, lanes, free, space, page=self._page)

    def _commit(self, table: Tensor, free: Tensor, space: kernels.TenureSpace) -> None:
        commit = kernels.commit_tenure if launches(table.device) else kernels.commit_tenure_torch
        state = self._mover.state
        commit(table, free, space, self._sound if state is None else state, page=self._page)

    def _space(self, lanes: int, size: int, table: Tensor) -> kernels.TenureSpace:
        # One memory for any number of lanes, cut once for each: slicing costs host time too.
        most = self._most
        if most is None or most.size != size or most.lanes < lanes:
            rows = max(lanes, 1 << (table.shape[0] - 1).bit_length())
            most = kernels.tenure_space(size, rows, page=self._page, device=table.device)
            self._most, self._spaces = most, {}
        if lanes not in self._spaces:
            self._spaces[lanes] = most.narrow(lanes)
        return self._spaces[lanes]
