"""What the plugin is to one scheduler: its allocator taken over, and a step between its steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvdefrag import __version__
from kvdefrag.config import Config
from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.core.defragmenter import Defragmenter
from kvdefrag.core.mover import Mover, TorchMover
from kvdefrag.core.profile import DeviceProfile
from kvdefrag.core.programs import Programs, TorchPrograms
from kvdefrag.core.readback import Readback
from kvdefrag.core.report import StepReport
from kvdefrag.core.view import EngineView
from kvdefrag.errors import Busy
from kvdefrag.metrics import Figures, Tally
from kvdefrag.sglang.compat import Compat
from kvdefrag.sglang.control import Control
from kvdefrag.sglang.late import wait_for
from kvdefrag.sglang.looker import Looker
from kvdefrag.sglang.pools import all_buffers
from kvdefrag.sglang.recorder import LiveAllocator
from kvdefrag.sglang.recording import Recording, recording_of
from kvdefrag.sglang.rules import placement_options
from kvdefrag.sglang.state import state_of
from kvdefrag.sglang.support import check_server
from kvdefrag.sglang.telemetry import Layout, LayoutProbe, Measured, Telemetry, sinks_of
from kvdefrag.sglang.trees import tree_of

logger = logging.getLogger(__name__)


class Attachment:
    """Takes a scheduler's allocator over and relocates between its steps.

    Args:
        scheduler: SGLang's, fully made and idle.
        config: The settings.
        compat: How this version keeps its requests.
        profile: Prices of this GPU.

    Attributes:
        due: Control over the next step while a command is being served, else None.
        held: Names of gates that control keeps closed.

    Raises:
        Refusal: Something is not supported; the scheduler is as it was.
    """

    control: Control | None = None
    due: Control | None = None
    held: tuple[str, ...] = ()

    def __init__(
        self, scheduler: Any, config: Config, compat: Compat, profile: DeviceProfile
    ) -> None:
        check_server(scheduler)
        self.compat, self.config = compat, config
        self.allocator = scheduler.token_to_kv_pool_allocator
        self._table: Tensor = scheduler.req_to_token_pool.req_to_token
        buffers = all_buffers(scheduler, self.allocator.size)
        self.tree = tree_of(scheduler.tree_cache)
        self.looker = Looker(scheduler, compat, self.tree)
        self._probe = LayoutProbe(self._table, page=config.page)
        device = self._table.device
        readback = Readback(0 if device.type == "cpu" else config.relocation.readback_steps)
        self.readback = readback
        self.recording = recording_of(scheduler, config, compat)
        core = self._make_core(device, None if device.type == "cpu" else readback)
        self.mover = mover = _mover(buffers)
        self.programs = _programs(mover, self._table, core)
        self.defragmenter = Defragmenter(
            config,
            allocator=core,
            table_rows=self._table.shape[0],
            mover=mover,
            profile=profile,
            readback=readback,
            verify=not scheduler.spec_algorithm.is_none(),
            programs=self.programs,
        )
        self.allocator.take_over(core)
        self.allocator.on_clear = self.defragmenter.clear
        self.allocator.on_fault = self._fault
        self.error: str | None = None
        self.steps = 0
        self.last: StepReport | None = None
        self.telemetry = self._make_telemetry(scheduler, mover.row_bytes)
        if config.control.enabled:
            self.control = Control(self, scheduler)

    def describe(self) -> str:
        """Return the start-up line."""
        pool = type(self.allocator.get_kvcache()).__name__
        mode = self.config.relocation.mode
        return (
            f"kvdefrag {__version__} active: sglang {self.compat.version}, "
            f"{self.allocator.size} slots of {pool}, tree {self.tree.name}, "
            f"placement {self.config.placement.free_list}"
            f"{' with reservation' if self.config.placement.reservation else ''}, "
            f"relocation {mode}"
        )

    def step(self) -> None:
        """Do what the policy decides, at the top of the scheduler's loop; never raises.

        A fault of ours turns relocation off for good, says so once, and the server goes on.
        """
        self._let_news_arrive()
        if self.error is not None:
            self._hear()
            return
        began = perf_counter()
        if self.recording is not None:
            self._record(self.recording)
        try:
            if self.due is None:
                gates = self._gates()
                self.last = self.defragmenter.step(self.steps, self._look, gates=gates)
            else:
                self.last = self.due.step()
            self.steps += 1
        except Exception as error:
            self._fault(error)
            return
        self.telemetry.step(self.last, perf_counter() - began)

    def configure(self, config: Config) -> None:
        """Use other settings of the policy from the next step on.

        Raises:
            ConfigError: They do not go together; nothing has changed.
        """
        self.defragmenter.configure(config)
        self.config = config

    def state(self) -> dict[str, Any]:
        """Return what `/server_info` shows, in plain values."""
        return state_of(self, self._figures(self.telemetry.layout))

    def _fault(self, error: Exception) -> None:
        if self.error is None:
            self.error = f"{type(error).__name__}: {error}"
            logger.error(
                "kvdefrag: relocation is off after a fault; serving goes on", exc_info=error
            )
        if self.allocator.core is not None:
            # Nobody will move a group of single slots into a page any more.
            self.allocator.core.whole_groups = False
        self._stop_recording(error)
        if self.control is not None:
            self.control.fault(error)
        self.telemetry.fault()

    def _hear(self) -> None:
        # Placement goes on after a fault, and would never hear of the pages it has.
        try:
            self.readback.advance()
        except Exception:
            logger.exception("kvdefrag: a late result is passed over; relocation is off already")

    def _let_news_arrive(self) -> None:
        # Late results count on the engine waiting for each step's own; without a batch it waits
        # for nothing, and nobody is held up. An event: the debug mode for synchronisation, which
        # guards the steps of a busy engine, lets it pass.
        if self.readback.pending and self.looker.idle():
            wait_for(self._table.device)

    def _make_telemetry(self, scheduler: Any, row_bytes: int) -> Telemetry:
        tally, config = Tally(row_bytes), self.config
        tally.moved_rows = self.defragmenter.moved_by
        return Telemetry(
            tally,
            sinks_of(scheduler, config),
            interval=max(config.observe.log_interval, config.relocation.readback_steps + 1),
            measure=self._measure,
            figures=self._figures,
            late=self._table.device.type != "cpu",
        )

    def _make_core(self, device: torch.device, readback: Readback | None) -> SlotAllocator:
        options = placement_options(self.config) | {
            "table": self._table,
            "device": device,
            "readback": readback,
        }
        if self.recording is None:
            return SlotAllocator(self.allocator.size, **options)
        return LiveAllocator(self.allocator.size, recorder=self.recording.recorder, **options)

    def _look(self) -> EngineView:
        return self.looker.look(self.steps)

    def _gates(self) -> tuple[str, ...]:
        core = self.allocator.core
        return ("free group open",) if core is not None and core.in_free_group else self.held

    def _record(self, recording: Recording) -> None:
        try:
            recording.step(self.looker.view(self.steps))
        except Exception as fault:
            self._stop_recording(fault)

    def _stop_recording(self, why: Exception) -> None:
        if self.recording is not None:
            logger.warning("kvdefrag: recording of events has ended: %s", why)
            self.recording.recorder.close(wait_s=0.0)
            self.recording = None

    def _measure(self) -> Measured | None:
        with suppress(Busy):
            return self._probe.start(self.looker.view(self.steps))
        return None

    def _figures(self, layout: Layout | None) -> Figures:
        core, last = self.allocator.core, self.last
        pages = core.two_ended if core is not None else None
        tokens, runs, covered = layout or (0, 0, 0)
        return Figures(
            step=self.steps,
            active=self.error is None,
            backoff_steps=max(0, last.backoff_until - self.steps) if last is not None else 0,
            tokens=tokens,
            runs=runs,
            covered=covered,
            whole_free_pages=pages.whole_pages() if pages is not None else None,
            reserved_slots=core.reserved_size() if core is not None else 0,
            available_slots=self.allocator.available_size(),
        )


def _mover(buffers: Sequence[Tensor]) -> Mover:
    if buffers[0].device.type == "cpu":
        return TorchMover(buffers)
    from kvdefrag.gpu import DeviceMover

    mover = DeviceMover(buffers)
    mover.prewarm()
    return mover


def _programs(mover: Mover, table: Tensor, core: SlotAllocator) -> Programs:
    if table.device.type == "cpu":
        return TorchPrograms(mover, page=core.page)
    from kvdefrag.gpu import DeviceMover, DevicePrograms

    assert isinstance(mover, DeviceMover)
    programs = DevicePrograms(mover, page=core.page)
    programs.prewarm(table, core.size)
    return programs
