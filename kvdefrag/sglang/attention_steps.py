"""What SGLang's metadata of a step says, in our words; and who serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvdefrag.attention import (
    Absent,
    Crossover,
    FlashMlaSparse,
    Kind,
    Provider,
    Step,
    Task,
    TreeKernel,
    ranked,
    sparse_forward,
)
from kvdefrag.sglang.attention_support import Rows
from kvdefrag_kernels.attention_geometry import BOUND

Make = Callable[[Task, torch.device], Provider]


class Described(NamedTuple):
    """A step that has a provider.

    Attributes:
        metadata: SGLang's, which names the same tensors.
        task, step: What is to be done.
        lengths: Where the prefixes' lengths are put when the step is planned.
        provider: Who does it.
    """

    metadata: Any
    task: Task
    step: Step
    lengths: Tensor
    provider: Provider

    def plan(self) -> None:
        """Plan the step, from the metadata as they stand on the device."""
        indptr = self.step.indptr
        torch.sub(indptr[1:], indptr[:-1], out=self.lengths)
        self.provider.plan(self.step)


class Providers:
    """Makes providers and keeps them: captured graphs hold addresses of their buffers.

    Args:
        rows: Of the pool.
        table: Who is fastest where.
        longest: Bound of a request's tokens.
        make: Makes our kernel, in place of `TreeKernel`.
    """

    def __init__(
        self, rows: Rows, table: Crossover, longest: int, make: Make | None = None
    ) -> None:
        self._rows, self._table, self._longest = rows, table, longest
        self._make = make or TreeKernel
        self._reserved = 1
        self._kernels: dict[tuple[Kind, int], tuple[int, Provider]] = {}
        self._kept: list[Provider] = []
        self._chosen: dict[Task, Provider | None] = {}

    def reserve(self, requests: int) -> None:
        """Make what is made from now on for so many requests at least."""
        self._reserved = max(self._reserved, requests)

    def of(self, kind: Kind, requests: int, queries: int) -> tuple[Task, Provider | None]:
        """Return the task of such a step and its provider; None: stock is to serve it."""
        # Powers of two: few tasks, and the choice is the same on every rank.
        bucket = 1 << max(0, requests - 1).bit_length()
        task = Task(kind, self._rows.geometry, bucket, queries, self._rows.dtype)
        if task not in self._chosen:
            self._chosen[task] = self._choose(task)
        return task, self._chosen[task]

    def names(self) -> dict[str, str]:
        """Return the provider of every task so far, in words."""
        return {
            f"{task.kind.value}, {task.requests} x {task.queries}": (
                provider.name if provider else "stock"
            )
            for task, provider in self._chosen.items()
        }

    def _choose(self, task: Task) -> Provider | None:
        for name in ranked(self._table, task, ("kernel", "flashmla_sparse", "stock")):
            if name == "stock":
                return None
            try:
                return self._kernel(task) if name == "kernel" else self._sparse(task)
            except Absent:
                continue
        return None

    def _kernel(self, task: Task) -> Provider:
        # One for all batches: its buffers hardly depend on how many requests there are.
        most, found = self._kernels.get((task.kind, task.queries), (0, None))
        if found is None or most < task.requests:
            most = max(task.requests, min(self._reserved, BOUND))
            found = self._make(task._replace(requests=most), self._rows.device)
            self._kernels[task.kind, task.queries] = most, found
            self._kept.append(found)
        return found

    def _sparse(self, task: Task) -> Provider:
        found = FlashMlaSparse(
            task, self._rows.device, longest=self._longest, forward=sparse_forward()
        )
        self._kept.append(found)
        return found


def describe(metadata: Any, batch: Any, providers: Providers) -> Described | None:
    """Return the step that fresh metadata describe, or None where stock is to serve it.

    Prompts are stock's. The tree is not in `kv_indices`: its slots are the batch's
    `out_cache_loc`, each attended to once.
    """
    mode, indptr = batch.forward_mode, metadata.kv_indptr
    requests = indptr.numel() - 1
    tree_slots: Tensor | None = None
    if mode.is_decode_or_idle():
        kind, queries = Kind.DECODE, 1
    elif mode.is_target_verify() or mode.is_draft_extend_v2():
        kind = Kind.CHAIN if metadata.custom_mask is None else Kind.TREE
        queries, tree_slots = int(metadata.max_extend_len), batch.out_cache_loc
        if tree_slots is None or tree_slots.numel() != requests * queries:
            return None
    else:
        return None
    if requests < 1 or not 1 <= queries <= 512:
        return None
    task, provider = providers.of(kind, requests, queries)
    if provider is None:
        return None
    lengths = torch.empty(requests, dtype=indptr.dtype, device=indptr.device)
    starts = metadata.mask_indptr if kind is Kind.TREE else None
    step = Step(lengths, metadata.kv_indices, indptr, tree_slots, starts)
    return Described(metadata, task, step, lengths, provider)
