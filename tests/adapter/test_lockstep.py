"""The simulator hands out the slots that the real scheduler does, operation for operation."""

from __future__ import annotations

from typing import Any

import pytest
from harness.jobs import LOCKSTEPS, VERSION, lockstep_key

KEYS = [lockstep_key(*how) for how in LOCKSTEPS]


@pytest.mark.skipif(VERSION != "0.5.17", reason="the simulator models the scheduler of 0.5.17")
@pytest.mark.children("lockstep")
@pytest.mark.parametrize("key", KEYS)
def test_slots_are_the_same_after_every_iteration_of_a_trace(children: Any, key: str) -> None:
    found = children.served("lockstep", key)

    assert found["finished"] == 60
    assert found["compared"] > 200
    assert found["evicted"] > 1_000
    assert found["hits"] > 100
