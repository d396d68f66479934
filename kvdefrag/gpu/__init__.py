"""A relocation on a GPU: our kernels there, their references elsewhere."""

from kvdefrag.gpu.holders import DeviceTableRows, DeviceValues
from kvdefrag.gpu.layout import DevicePageView, DeviceStats, RowStats
from kvdefrag.gpu.mover import DeviceMover
from kvdefrag.gpu.programs import DevicePrograms

__all__ = [
    "DeviceMover",
    "DevicePageView",
    "DevicePrograms",
    "DeviceStats",
    "DeviceTableRows",
    "DeviceValues",
    "RowStats",
]
