"""An idle engine packs what sessions hold between their turns."""

from __future__ import annotations

from typing import Any

import pytest
from harness.jobs import IDLE, LONG


@pytest.mark.children("stock", "idle")
@pytest.mark.parametrize("case", IDLE if LONG else IDLE[:1])
def test_case_45_an_idle_engine_with_open_sessions_packs_their_rows(
    children: Any, case: str
) -> None:
    stock, idle = children.served("stock", case), children.served("idle", case)

    assert idle["outputs"] == stock["outputs"]
    assert idle["state"]["active"]
    assert set(idle["state"]["moved_by"]) == {"idle"}
    assert idle["state"]["moved_rows"] == idle["moved"] > 0
