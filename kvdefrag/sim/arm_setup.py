"""Builds what an arm's policy needs: the same objects for the engine model and for a replay."""

from __future__ import annotations

from torch import Tensor

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.defragmenter import Defragmenter
from kvdefrag.core.events import Recorder
from kvdefrag.core.host_recording import RecordingAllocator
from kvdefrag.core.mover import Mover
from kvdefrag.core.profile import DeviceProfile
from kvdefrag.core.readback import Readback
from kvdefrag.core.tracker import Tracker
from kvdefrag.sim.arms import Arm


def make_allocator(
    arm: Arm, size: int, table: Tensor, recorder: Recorder | None = None
) -> SlotAllocator:
    """Return the arm's allocator of slots 1..size, which tells `recorder` of its work."""
    placement = arm.config.placement
    settings = {
        "table": table,
        "page": arm.config.page,
        "discipline": placement.free_list,
        "reservation": placement.reservation,
        "reorder_interval": placement.reorder_interval,
        "evict_for_pages": placement.evict_for_pages,
        "checks": placement.checks,
    }
    if recorder is not None:
        return RecordingAllocator(size, recorder=recorder, **settings)
    return SlotAllocator(size, **settings)  # type: ignore[arg-type]


def make_defragmenter(
    arm: Arm,
    allocator: SlotAllocator,
    table: Tensor,
    *,
    mover: Mover,
    profile: DeviceProfile,
    verify: bool,
) -> Defragmenter:
    """Return the arm's defragmenter, whose results come at once."""
    return Defragmenter(
        arm.config,
        allocator=allocator,
        table_rows=table.shape[0],
        mover=mover,
        profile=profile,
        readback=Readback(0),
        verify=verify,
    )


def tracker_of(arm: Arm, defragmenter: Defragmenter, table: Tensor) -> Tracker:
    """Return the tracker to measure with: the defragmenter's own if it runs."""
    if relocates(arm):
        return defragmenter.tracker
    return Tracker(table.shape[0], page=arm.config.page)


def relocates(arm: Arm) -> bool:
    """Say whether the arm's defragmenter may ever move a row."""
    return arm.config.relocation.mode != "off"
