"""A step report in which a test changes only what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvdefrag.core.report import StepReport

_QUIET = StepReport(
    step=1,
    mechanism="none",
    reason="nothing_to_do",
    planned_rows=0,
    moved_rows=0,
    bytes=0,
    dry_run=False,
    gates=(),
    backoff_until=0,
    coverage=None,
    whole_free_pages=None,
    reserved_slots=0,
    available=1000,
    error=None,
)


@pytest.fixture
def report() -> Callable[..., StepReport]:
    """Build a report of a step in which nothing happened, but for what is given."""

    def build(**changes: Any) -> StepReport:
        return dataclasses.replace(_QUIET, **changes)

    return build
