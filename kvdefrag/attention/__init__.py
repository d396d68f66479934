"""Attention of decode and verify steps over slots: who can run it, and who is fastest."""

from kvdefrag.attention.crossover import Crossover, default_crossover, load_crossover, ranked
from kvdefrag.attention.flashmla import FlashMlaSparse, sparse_forward
from kvdefrag.attention.kernel import TreeKernel, TreeKernelOverPages
from kvdefrag.attention.provider import Absent, Kind, Numbers, Provider, Step, Task

__all__ = [
    "Absent",
    "Crossover",
    "FlashMlaSparse",
    "Kind",
    "Numbers",
    "Provider",
    "Step",
    "Task",
    "TreeKernel",
    "TreeKernelOverPages",
    "default_crossover",
    "load_crossover",
    "ranked",
    "sparse_forward",
]
