"""What attention kernels are built for: heads, widths, what a query sees, shapes of programs."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

BOUND = 4096
PAGES = (16, 32, 64, 128, 256)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.bfloat16, torch.float16)


class Visible(enum.Enum):
    """What a query sees of its request's tokens: the prefix, then the tree (the queries' own).

    ALL: everything; no tree is told apart. CHAIN: the prefix, and the tree up to itself.
    TREE: the prefix, and of the tree what a byte mask says, queries x tree a request, packed.
    TREE_OF_FULL: the same out of a mask over prefix and tree, queries x (prefix + tree) a request,
    packed (SGLang's `custom_mask`), whose bytes over the prefix are taken for true and not read.
    FULL: that mask, its bytes over the prefix read too: slower, and no view as pages.
    """

    ALL = "all"
    CHAIN = "chain"
    TREE = "tree"
    TREE_OF_FULL = "tree_of_full"
    FULL = "full"


SEES = {
    Visible.ALL: 0,
    Visible.CHAIN: 1,
    Visible.TREE: 2,
    Visible.TREE_OF_FULL: 2,
    Visible.FULL: 3,
}


class Geometry(NamedTuple):
    """Heads and widths. `latent`: a value is the first `v_dim` numbers of its key (MLA)."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    latent: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def nope(self) -> int:
        """The first part of a key, a power of two."""
        return 1 << (self.k_dim.bit_length() - 1)

    @property
    def rope(self) -> int:
        """The second part of a key, a power of two or 0."""
        return self.k_dim - self.nope

    @property
    def value(self) -> int:
        """The values' width rounded up to a power of two."""
        return 1 << (self.v_dim - 1).bit_length()


class Tile(NamedTuple):
    """Shape of a program: rows (queries x heads), tokens a unit, warps, stages of the loop over
    single slots and of the one over pages, programs a multiprocessor holds.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    page_stages: int
    resident: int


def default_tile(geometry: Geometry, queries: int, kv_dtype: torch.dtype) -> Tile:
    """Give the shape that was fastest on an H200; see bench/attention_tune.py."""
    rows = queries * geometry.group
    wide = max(geometry.nope, geometry.value)
    if rows <= 16:
        return Tile(16, 32 if wide > 256 else 64, 4, 3, 3, 2)
    if geometry.latent:
        return Tile(64, 64, 8, 2, 2, 1)
    if wide > 128:
        return Tile(64, 32, 8, 3, 3, 1)
    return Tile(64, 64, 4, 3, 3, 2) if rows <= 64 else Tile(128, 64, 8, 3, 3, 1)


def check_geometry(
    geometry: Geometry,
    requests: int,
    queries: int,
    kv_dtype: torch.dtype,
    visible: Visible,
    page: int | None,
) -> None:
    g = geometry
    for name in ("heads", "kv_heads", "k_dim", "v_dim"):
        if getattr(g, name) < 1:
            raise ValueError(f"{name} must be 1 or more, got {getattr(g, name)}")
    if g.heads % g.kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads {g.kv_heads}, got {g.heads}")
    if g.nope not in (16, 32, 64, 128, 256, 512) or (g.rope and g.rope not in (16, 32, 64, 128)):
        raise ValueError(f"k_dim must be 16 to 512, plus 16, 32, 64 or 128 at most, got {g.k_dim}")
    if g.latent and g.v_dim != g.nope:
        raise ValueError(f"v_dim of latent rows of {g.k_dim} must be {g.nope}, got {g.v_dim}")
    if g.v_dim % 16 or g.v_dim > 512:
        raise ValueError(f"v_dim must be a multiple of 16 up to 512, got {g.v_dim}")
    if not 1 <= requests <= BOUND:
        raise ValueError(f"requests must be 1 to {BOUND}, got {requests}")
    if not 1 <= queries <= 512:
        raise ValueError(f"queries must be 1 to 512, got {queries}")
    if kv_dtype not in WIDE + FP8:
        raise ValueError(f"kv_dtype must be one of {[*WIDE, *FP8]}, got {kv_dtype}")
    if page is not None and page not in PAGES:
        raise ValueError(f"page must be None or one of {list(PAGES)}, got {page}")
    if page is not None and visible is Visible.FULL:
        raise ValueError("visible FULL follows token order: page must be None, got a page size")
