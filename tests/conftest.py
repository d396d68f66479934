"""Markers that skip visibly, the device under test, and Hypothesis settings for small machines."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="Device for tests that take one.")


def pytest_configure(config: pytest.Config) -> None:
    # Triton looks at this when a kernel is defined, so it must stand before any import of one.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # No test may fail because the machine is slow; CI must fail or pass the same way each time.
    settings.register_profile("local", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if importlib.util.find_spec("sglang") is None:
        missing["sglang"] = pytest.mark.skip(reason="needs an installed sglang")
    for item in items:
        for marker, skip in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that --device names."""
    return torch.device(request.config.getoption("--device"))
