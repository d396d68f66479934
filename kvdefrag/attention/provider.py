"""What every provider of attention is given, and what it must be able to do."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvdefrag_kernels.attention_geometry import Geometry, Visible


class Absent(Exception):
    """Why a provider takes no part in a task; says what it takes instead."""


class Kind(enum.Enum):
    """What the queries of a step are to each other.

    DECODE: one a request, in the prefix itself. CHAIN: each sees those before it. TREE: a mask
    says which it sees, in the form of `Visible.TREE_OF_FULL`.
    """

    DECODE = "decode"
    CHAIN = "chain"
    TREE = "tree"

    @property
    def visible(self) -> Visible:
        """What our kernel calls it."""
        return _VISIBLE[self]


_VISIBLE = {
    Kind.DECODE: Visible.ALL,
    Kind.CHAIN: Visible.CHAIN,
    Kind.TREE: Visible.TREE_OF_FULL,
}


class Task(NamedTuple):
    """What is known of a step before it is captured: nothing here follows the tokens.

    `requests` is the most that a step may have, `queries` what each of them has.
    """

    kind: Kind
    geometry: Geometry
    requests: int
    queries: int
    kv_dtype: torch.dtype


class Step(NamedTuple):
    """Where the tokens of a step are: device tensors, read on the device alone.

    `lengths` [n]: tokens of each prefix; with DECODE they include the query's own, else they
    leave the queries out. `indices` and `indptr` [n + 1]: slots of the prefixes. `tree_slots`
    [n * queries]: slots of the queries, None with DECODE. `mask_starts` [n or n + 1]: first mask
    byte of each request, None where masks are packed or there is none. `table` int32 and `rows`
    name the same prefixes; only who reads pages needs them.
    """

    lengths: Tensor
    indices: Tensor
    indptr: Tensor
    tree_slots: Tensor | None = None
    mask_starts: Tensor | None = None
    table: Tensor | None = None
    rows: Tensor | None = None


class Numbers(NamedTuple):
    """Factors of scores and values, see `kvdefrag_kernels.tree_attention.tree_attention`."""

    scale: float
    logit_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0


class Provider(Protocol):
    """One way to run a task; owns fixed buffers, so that a graph may capture both calls.

    Attributes:
        name: As the crossover table has it.
        follows_lengths: Whether its time follows the lengths on the device; if not, it always
            costs as much as the longest step it was made for.
    """

    name: str
    follows_lengths: bool

    def takes(self, numbers: Numbers) -> bool:
        """Say whether it can work with these factors."""
        ...

    def plan(self, step: Step) -> None:
        """Share out a step; no synchronisation. Valid until the next one."""
        ...

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        numbers: Numbers,
        mask: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend with one layer's rows; returns [n * queries, heads, v_dim]."""
        ...
