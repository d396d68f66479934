"""Anything may happen in any order, and no row is ever lost; a forgotten holder is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvdefrag.core import programs
from kvdefrag.core.holders import TableRows, ValueTensors, live_rows
from kvdefrag.core.mover import TorchMover
from kvdefrag.core.plan import MovePlan
from tests.machine.engine import RecordingMover
from tests.machine.machine import DefragMachine

MACHINE = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
# Derandomised, and without shrinking: that it fails is all that is asked for.
PLANTED = settings(
    MACHINE,
    max_examples=300,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    print_blob=False,
)


def test_every_slot_has_one_owner_and_every_request_reads_what_it_wrote() -> None:
    run_state_machine_as_test(DefragMachine, settings=MACHINE)


# --- a test of the test: each bug below must be noticed ------------------------------------------


def forget_the_tree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ValueTensors, "remap", lambda self, lut: None)


def forget_a_row_that_shares_a_prefix(patch: pytest.MonkeyPatch) -> None:
    def all_but_the_last(view: object, held: object = None) -> TableRows:
        holder = live_rows(view, held)
        last = view.rows[-1:] * view.table.shape[1]
        keep = (holder._at < int(last[0])) if last.size else slice(None)
        holder._at = holder._at[keep]
        return holder

    patch.setattr(programs, "live_rows", all_but_the_last)


def forget_a_buffer(patch: pytest.MonkeyPatch) -> None:
    def copy(mover: RecordingMover, plan: MovePlan) -> None:
        TorchMover(mover.buffers[:-1]).copy(plan)

    patch.setattr(RecordingMover, "copy", copy)


@pytest.mark.parametrize(
    "plant",
    [
        forget_the_tree,
        forget_a_row_that_shares_a_prefix,
        forget_a_buffer,
    ],
)
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(DefragMachine, settings=PLANTED)
