"""Triton kernels that move KV rows, rewrite slot numbers and read rows wherever they lie.

Each has a reference in torch.

Importing this package needs torch alone; launching a kernel needs Triton and a GPU (or Triton's
interpreter).
"""

from .attention_geometry import Geometry, Tile, Visible, default_tile
from .attention_merge import merge_attention
from .attention_metadata import attention_space, plan_attention
from .attention_reference import merge_attention_torch, tree_attention_torch
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
    void_tenure,
)
from .tree_attention import tree_attention

__all__ = [
    "BufferTable",
    "Geometry",
    "PageView",
    "Reason",
    "StatsSpace",
    "TenureSpace",
    "Tile",
    "Visible",
    "attention_space",
    "commit_tenure",
    "commit_tenure_torch",
    "compiled_variants",
    "default_tile",
    "layout_stats",
    "layout_stats_torch",
    "merge_attention",
    "merge_attention_torch",
    "order_free_list",
    "page_free_counts",
    "page_view",
    "page_view_buffers",
    "page_view_torch",
    "plan_attention",
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
    "tree_attention",
    "tree_attention_torch",
    "verdict",
    "void_tenure",
    "voided",
]
