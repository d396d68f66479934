"""Our kernel as a provider: every kind, any layout, one launch and a combination of its parts."""

from __future__ import annotations

from torch import Tensor, device

from kvdefrag.attention.provider import Absent, Numbers, Step, Task
from kvdefrag_kernels.attention_geometry import Tile
from kvdefrag_kernels.attention_metadata import (
    AttentionPlan,
    AttentionSpace,
    attention_space,
    plan_attention,
)
from kvdefrag_kernels.page_view import PageView, page_view, page_view_buffers
from kvdefrag_kernels.tree_attention import tree_attention


class TreeKernel:
    """Reads every slot by itself.

    Args:
        task: What it is made for.
        where: Device of the pool.
        tile: In place of what was tuned.

    Raises:
        Absent: The kernel does not take the task; names the reason.
    """

    name = "kernel"
    follows_lengths = True

    def __init__(self, task: Task, where: device | str, *, tile: Tile | None = None) -> None:
        self._space = _space(task, where, None, tile)
        self._plan: AttentionPlan | None = None

    def takes(self, numbers: Numbers) -> bool:
        """Say whether it can work with these factors: any."""
        return numbers.scale > 0

    def plan(self, step: Step) -> None:
        """Share out a step: one launch."""
        self._plan = plan_attention(
            self._space,
            step.lengths,
            indices=step.indices,
            indptr=step.indptr,
            tree_slots=step.tree_slots,
            mask_starts=step.mask_starts,
            lengths_hold_tree=False,
        )

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
        """Attend: two launches."""
        return _run(self._plan, q, k, v, numbers, mask, out)[0]

    def run_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor | None, *, numbers: Numbers
    ) -> tuple[Tensor, Tensor]:
        """The same, and the log-sum-exp of the scores in base 2."""
        return _run(self._plan, q, k, v, numbers, None, None)


class TreeKernelOverPages:
    """Reads whole aligned pages of the prefixes as blocks, the other slots by themselves.

    A step must bring `table` and `rows`; both stay readable until the last layer has run, since
    a request whose view ran over is read from the table. `longest` bounds a prefix, `most_left`
    the single slots of one that is read by pages.
    """

    name = "kernel_pages"
    follows_lengths = True

    def __init__(
        self,
        task: Task,
        where: device | str,
        *,
        longest: int,
        page: int = 64,
        most_left: int = 2048,
        tile: Tile | None = None,
    ) -> None:
        self._space = _space(task, where, page, tile)
        self._page = page
        self._view: PageView = page_view_buffers(
            task.requests, longest, most_left=most_left, page=page, device=where
        )
        self._plan: AttentionPlan | None = None

    def takes(self, numbers: Numbers) -> bool:
        """Say whether it can work with these factors: any."""
        return numbers.scale > 0

    def plan(self, step: Step) -> None:
        """View the prefixes as pages and share out a step: three launches."""
        if step.table is None or step.rows is None:
            raise ValueError("table and rows must be given to read pages")
        page_view(step.table, step.rows, step.lengths, self._view, page=self._page)
        self._plan = plan_attention(
            self._space,
            step.lengths,
            table=step.table,
            rows=step.rows,
            tree_slots=step.tree_slots,
            mask_starts=step.mask_starts,
            view=self._view,
            lengths_hold_tree=False,
        )

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
        """Attend: two launches."""
        return _run(self._plan, q, k, v, numbers, mask, out)[0]


def _space(task: Task, where: device | str, page: int | None, tile: Tile | None) -> AttentionSpace:
    try:
        return attention_space(
            task.geometry,
            requests=task.requests,
            queries=task.queries,
            kv_dtype=task.kv_dtype,
            visible=task.kind.visible,
            page=page,
            device=where,
            tile=tile,
        )
    except ValueError as error:
        raise Absent(f"our kernel does not take this: {error}") from error


def _run(
    plan: AttentionPlan | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    numbers: Numbers,
    mask: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if plan is None:
        raise RuntimeError("plan() must come before run()")
    return tree_attention(
        plan,
        q,
        k,
        v,
        scale=numbers.scale,
        logit_cap=numbers.logit_cap,
        k_scale=numbers.k_scale,
        v_scale=numbers.v_scale,
        mask=mask,
        out=out,
    )
