"""A pool of scattered rows with the parts of a step around it, for timing steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvdefrag.config import Config
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.defragmenter import Defragmenter
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.programs import Programs, TorchPrograms
from kvdefrag.core.readback import Readback
from kvdefrag.core.report import StepReport
from kvdefrag.core.view import EngineView
from kvdefrag.gpu import DeviceMover, DevicePrograms
from kvdefrag.profiles import default_profile

PAGE, RUNNING = 64, 64
# Buffers and bytes a row: DeepSeek's latent cache, and two layers of K and V.
LAYOUTS = {"mla-61x1152": (61, 1152), "mha-2x2048": (4, 2048)}


@dataclass(frozen=True)
class Case:
    """One pool and the programs that relocate in it."""

    layout: str
    slots: int
    programs: str


class Scene:
    """Rows of scattered tokens, whole free pages, and loose free slots between the live ones."""

    def __init__(self, case: Case, device: torch.device) -> None:
        buffers, row_bytes = LAYOUTS[case.layout]
        self.size, self.device = case.slots, device
        self.buffers = [
            torch.zeros(case.slots + 1, row_bytes, dtype=torch.uint8, device=device)
            for _ in range(buffers)
        ]
        numbers = torch.arange(case.slots + 1, device=device)
        self.buffers[-1][:, :8] = numbers.view(-1, 1).view(torch.uint8).view(-1, 8)
        rows = self._fill()
        self.readback = Readback(2)
        self.allocator = SlotAllocator(
            case.slots, table=self.table, page=PAGE, checks="off", device=device,
            readback=self.readback,
        )  # fmt: skip
        mover = DeviceMover(self.buffers)
        mover.prewarm()
        self.defragmenter = Defragmenter(
            settings(interval=1),
            allocator=self.allocator,
            table_rows=self.table.shape[0],
            mover=mover,
            profile=default_profile(),
            readback=self.readback,
            programs=self._programs(case.programs, mover),
        )
        self.lengths = np.full(RUNNING, rows, dtype=np.int64)
        self.steps = 0
        self.reset()

    def _fill(self) -> int:
        random = torch.Generator().manual_seed(3)
        pages = torch.randperm(self.size // PAGE - 1, generator=random) + 1
        whole, mixed = pages[: pages.numel() // 4], pages[pages.numel() // 4 :]
        loose = (mixed[:, None] * PAGE + torch.arange(PAGE)).flatten()
        loose = loose[torch.randperm(loose.numel(), generator=random)]
        tokens = int(0.8 * loose.numel()) // RUNNING
        table = torch.zeros(RUNNING + 1, tokens + PAGE, dtype=torch.int32)
        table[1:, :tokens] = loose[: tokens * RUNNING].view(RUNNING, tokens).int()
        free = torch.ones(self.size + 1, dtype=torch.bool)
        free[0] = free[table.flatten().long()] = False
        self.first_table = table.to(self.device)
        self.table = self.first_table.clone()
        self.first_free = free.nonzero().flatten().to(self.device)
        self.live = slice(0, tokens)
        assert whole.numel() > 0
        return tokens

    def _programs(self, name: str, mover: DeviceMover) -> Programs:
        if name == "torch":
            return TorchPrograms(mover, page=PAGE)
        programs = DevicePrograms(mover, page=PAGE)
        programs.prewarm(self.table, self.size)
        return programs

    def look(self) -> EngineView:
        rows = np.arange(1, RUNNING + 1, dtype=np.int64)
        zeros = np.zeros(RUNNING, dtype=np.int64)
        return EngineView(self.steps, self.table, rows, zeros, zeros, self.lengths, self.lengths)

    def step(self, *gates: str) -> StepReport:
        self.steps += 1
        return self.defragmenter.step(self.steps, self.look, gates=gates)

    def settle(self) -> None:
        """Let late results arrive."""
        for _ in range(3):
            self.step("settling")

    def reset(self) -> None:
        """Lay everything as at first; what is free came back slot by slot, as in a server."""
        self.settle()
        self.table.copy_(self.first_table)
        if self.steps > 3:
            numbers = torch.arange(self.size + 1, device=self.device)
            self.buffers[-1][:, :8] = numbers.view(-1, 1).view(torch.uint8).view(-1, 8)
        free_list = self.allocator.free_list
        free_list.clear(self.size)
        free_list.take_front(self.size)
        free_list.put(self.first_free)
        self.defragmenter.tracker.clear()

    def rest(self) -> None:
        """Say that no row needs tenure."""
        view = self.look()
        self.defragmenter.tracker.observe(view)
        self.defragmenter.tracker.confirm(view.rows, view.generations, view.committed)

    def decode(self) -> None:
        """Allocate a token for every row and give it back: the list is put in order for it."""
        rows = np.arange(1, RUNNING + 1, dtype=np.int64)
        slots = self.allocator.alloc_for(
            Demand(Kind.DECODE, rows, self.lengths, np.ones(RUNNING, dtype=np.int64))
        )
        assert slots is not None
        self.allocator.free(slots)

    def check(self) -> int:
        """Return how many tokens moved; raise if any token reads another's row, or is lost."""
        now, was = self.table[1:, self.live].long(), self.first_table[1:, self.live].long()
        read = self.buffers[-1][now.flatten(), :8].contiguous().view(torch.int64).view_as(was)
        if not torch.equal(read, was):
            raise AssertionError("a row reads another's token")
        named = torch.cat([now.flatten(), self.allocator.free_slots()]).sort().values
        if not torch.equal(named, torch.arange(1, self.size + 1, device=self.device)):
            raise AssertionError("a slot was lost or doubled")
        return int((now != was).sum())


def settings(*, interval: int) -> Config:
    """Return settings under which a step compacts as much as the shipped limits let one step."""
    relocation = {
        "mode": "threshold", "tenure_interval": interval, "duty_bytes_per_step": "64MiB",
        "bytes_per_step": "64MiB", "coverage_low": 0.999, "coverage_high": 1.0,
        "whole_free_low": 0.0, "whole_free_high": 0.001, "min_gain_rows": 0,
        "check_plans": "never",
    }  # fmt: skip
    return Config.model_validate({"page": PAGE, "relocation": relocation})
