"""Triton kernels that move KV rows and the slot numbers naming them, with torch references.

Importing this package needs torch alone; launching a kernel needs Triton and a GPU (or Triton's
interpreter).
"""

from .buffer_table import BufferTable
from .free_pages import order_free_list, page_free_counts, substitute
from .layout_stats import StatsSpace, layout_stats, layout_stats_torch, stats_space
from .page_view import PageView, page_view, page_view_buffers, page_view_torch
from .relocate import (
    Reason,
    compiled_variants,
    prewarm,
    relocate_rows,
    relocate_rows_torch,
    verdict,
    voided,
)
from .remap import remap, remap_torch, remap_values, remap_values_torch
from .tenure import (
    TenureSpace,
    commit_tenure,
    commit_tenure_torch,
    plan_tenure,
    plan_tenure_torch,
    tenure_space,
)

__all__ = [
    "BufferTable",
    "PageView",
    "Reason",
    "StatsSpace",
    "TenureSpace",
    "commit_tenure",
    "commit_tenure_torch",
    "compiled_variants",
    "layout_stats",
    "layout_stats_torch",
    "order_free_list",
    "page_free_counts",
    "page_view",
    "page_view_buffers",
    "page_view_torch",
    "plan_tenure",
    "plan_tenure_torch",
    "prewarm",
    "relocate_rows",
    "relocate_rows_torch",
    "remap",
    "remap_torch",
    "remap_values",
    "remap_values_torch",
    "stats_space",
    "substitute",
    "tenure_space",
    "verdict",
    "voided",
]
