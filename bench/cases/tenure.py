"""A whole tenure step: plan, copy of 64 pages, table rewrite, free-list substitution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from measure import Entry, Run
from pools import table_of

from cases.relocate import SHAPES
from kvdefrag_kernels import (
    commit_tenure,
    order_free_list,
    page_free_counts,
    plan_tenure,
    relocate_rows,
    tenure_space,
)

SIZE, FREE, GROUPS, PAGE = 2 << 20, 1 << 19, 64, 64
ROW_BYTES = 1152


def entries() -> Iterator[Entry]:
    """The step at 2 M slots with 0.5 M free, its parts, and the list programs."""
    params = {"slots": SIZE, "free": FREE, "pages": GROUPS, "layers": 61, "row_bytes": ROW_BYTES}
    moved = 2 * 61 * ROW_BYTES * GROUPS * PAGE
    made = Inputs()
    for part in ("step", "plan", "copy", "commit"):
        bytes_ = moved if part in ("step", "copy") else 0
        yield Entry("tenure", params | {"part": part}, "kvdefrag", bytes_,
                    lambda p=part: made.part(p), made.check if part == "step" else None,
                    host=True)  # fmt: skip
    for slots in (SIZE, 2 * SIZE):
        free = (torch.randperm(slots)[: slots // 4] + 1).cuda()
        for name, run in (
            ("order_free_list", lambda f=free, s=slots: order_free_list(f, s)),
            ("page_free_counts", lambda f=free, s=slots: page_free_counts(f, s)),
        ):
            yield Entry("free_pages", {"slots": slots, "free": slots // 4, "op": name}, "torch", 0,
                        lambda r=run: r, host=True)  # fmt: skip


class Inputs:
    """A pool of 2 M slots whose KV rows lie in 131,072 of them, which is all the copy sees.

    The move plan is taken from the real planner on the large pool, then folded onto the rows that
    exist: 2 M slots of 61 layers would need 147 GB.
    """

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(7)
        layers, self.rows_held = SHAPES[ROW_BYTES]
        # Live slots: whole pages mostly, and 64 groups of decode tokens scattered over others.
        pages = torch.randperm(SIZE // PAGE - 2, generator=random) + 1
        whole = pages[:6000]
        rest = pages[6000:]
        loose = (rest[:, None] * PAGE + torch.arange(PAGE)).flatten()
        loose = loose[torch.randperm(loose.numel(), generator=random)]
        free = torch.cat([(whole[:, None] * PAGE + torch.arange(PAGE)).flatten(),
                          loose[: FREE - 6000 * PAGE]])  # fmt: skip
        self.first_free = free[torch.randperm(FREE, generator=random)].cuda()
        self.free = self.first_free.clone()
        live = loose[FREE - 6000 * PAGE :]
        self.table = torch.zeros(257, 8192, dtype=torch.int32)
        self.table[1:65, :4096] = live[: 64 * 4096].view(64, 4096).int()
        self.first_table = self.table.cuda()
        self.table = self.first_table.clone()
        rows = torch.arange(1, GROUPS + 1)
        first, end = (rows * 7) % PAGE, torch.full((GROUPS,), 4096)
        # Each step moves the next 64 tokens of every row, as long as the rows last.
        self.walks = [torch.stack([rows, first + PAGE * k, end]).cuda() for k in range(60)]
        self.steps = 0
        self.space = tenure_space(SIZE, GROUPS, device="cuda")
        self.layers = layers
        start = torch.randperm(self.rows_held // PAGE - 1, generator=random)[:GROUPS] + 1
        target = (start[:, None] * PAGE + torch.arange(PAGE)).flatten()
        other = torch.ones(self.rows_held, dtype=torch.bool)
        other[0] = other[target] = False
        other = other.nonzero().flatten()
        self.src = other[torch.randperm(other.numel(), generator=random)[: target.numel()]].cuda()
        self.dst = target.cuda()

    def part(self, name: str) -> Run:
        """Give the whole step or one part of it."""
        buffers = table_of(self.layers, ROW_BYTES, self.rows_held)

        def plan() -> None:
            plan_tenure(self.table, self.next(), self.free, self.space)

        def copy() -> None:
            relocate_rows(buffers, self.src, self.dst, disjoint=True, distinct_src=True)

        def commit() -> None:
            commit_tenure(self.table, self.free, self.space, buffers.state)

        def step() -> None:
            plan()
            copy()
            commit()

        return {"step": step, "plan": plan, "copy": copy, "commit": commit}[name]

    def next(self) -> torch.Tensor:
        """Give the next groups; begin again from the first scene once all have moved."""
        if self.steps % len(self.walks) == 0:
            self.table.copy_(self.first_table)
            self.free.copy_(self.first_free)
        self.steps += 1
        return self.walks[(self.steps - 1) % len(self.walks)]

    def check(self) -> None:
        """Raise unless every group moved and no slot was lost."""
        if int(self.space.moved) != GROUPS * PAGE:
            raise AssertionError(f"{int(self.space.moved)} of {GROUPS * PAGE} tokens moved")
        named = torch.cat([self.table[self.table > 0].long(), self.free]).sort().values
        first = torch.cat([self.first_table[self.first_table > 0].long(), self.first_free])
        if not torch.equal(named, first.sort().values):
            raise AssertionError("slots were lost or doubled")
