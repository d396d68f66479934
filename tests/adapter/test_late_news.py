"""Results of the device that reach the host some steps late, whatever the engine does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvdefrag.core.readback import Readback


class Steps:
    """A defragmenter that only lets late results arrive."""

    def __init__(self, readback: Readback) -> None:
        self._readback = readback

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._readback.advance()


def attached(*, idle: bool) -> Any:
    """Return an attachment whose results arrive two steps late, and whose engine may be idle."""
    from kvdefrag.sglang.attachment import Attachment

    found = Attachment.__new__(Attachment)
    found.error, found.steps, found.recording = None, 0, None
    found.readback = Readback(2)
    found.defragmenter = Steps(found.readback)  # type: ignore[assignment]
    found.looker = SimpleNamespace(idle=lambda: idle)  # type: ignore[assignment]
    found.allocator = SimpleNamespace(core=None)
    found.telemetry = SimpleNamespace(step=lambda *args: None, fault=lambda: None)  # type: ignore[assignment]
    found._table = torch.zeros(1, 1)
    return found


def test_after_a_fault_news_still_arrive_and_nothing_piles_up() -> None:
    attachment, heard = attached(idle=False), list[int]()
    attachment.error = "RuntimeError: ours"
    for number in range(50):
        attachment.readback.submit(torch.tensor(number), heard.append)
        attachment.step()

    assert heard == list(range(49))
    assert attachment.readback.pending == 1


def test_after_a_fault_a_result_that_raises_is_said_and_the_next_ones_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attachment, heard = attached(idle=False), list[int]()
    attachment.error = "RuntimeError: ours"
    attachment.readback.submit(torch.tensor(1), lambda value: 1 // (value - 1))
    attachment.readback.submit(torch.tensor(2), heard.append)
    for _ in range(4):
        attachment.step()

    assert heard == [2]
    assert "a late result is passed over" in caplog.text


def test_after_a_fault_no_row_goes_on_with_single_slots() -> None:
    attachment = attached(idle=False)
    attachment.allocator.core = SimpleNamespace(whole_groups=True)

    attachment._fault(RuntimeError("ours"))

    assert attachment.allocator.core.whole_groups is False


@pytest.mark.parametrize("idle", [False, True])
def test_an_idle_engine_waits_for_what_is_under_way_and_a_busy_one_never(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvdefrag.sglang import attachment as module

    waits: list[torch.device] = []
    monkeypatch.setattr(module, "wait_for", waits.append)
    attachment = attached(idle=idle)

    attachment.step()
    assert waits == []  # nothing is under way

    attachment.readback.submit(torch.tensor(1), lambda _: None)
    attachment.step()
    assert len(waits) == int(idle)
