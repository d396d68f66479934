"""Run the kernel tests on a GPU where there is one, in Triton's interpreter where there is not."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Triton decides at decoration: before the first kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if request.param == "cuda" and not ON_GPU:
        pytest.skip("no CUDA device")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels take CPU tensors in the interpreter only (TRITON_INTERPRET=1)")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    if not ON_GPU:
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def no_sync() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Give a context in which synchronising with the device is an error."""

    @contextlib.contextmanager
    def forbid() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbid


class Pool(NamedTuple):
    """Buffers under test and an untouched twin for the reference."""

    buffers: list[torch.Tensor]
    memory: list[torch.Tensor]
    twin: list[torch.Tensor]
    twin_memory: list[torch.Tensor]

    def same(self) -> bool:
        """Compare rows and guards, byte for byte."""
        return all(map(torch.equal, self.memory, self.twin_memory))


MakePool = Callable[..., Pool]


@pytest.fixture(scope="session")
def make_pool() -> MakePool:
    """Make `slots` random rows of each width (bytes) with `guard` bytes around each row."""

    def make(
        widths: Sequence[int],
        slots: int,
        device: torch.device,
        *,
        guard: int = 16,
        dtype: torch.dtype = torch.uint8,
        seed: int = 0,
    ) -> Pool:
        random = torch.Generator().manual_seed(seed)
        pool = Pool([], [], [], [])
        for width in widths:
            whole = torch.randint(0, 256, (slots, width + 2 * guard), generator=random)
            for rows, memory in ((pool.buffers, pool.memory), (pool.twin, pool.twin_memory)):
                bytes_ = whole.to(torch.uint8).to(device, copy=True)
                memory.append(bytes_)
                rows.append(bytes_[:, guard : guard + width].view(dtype))
        return pool

    return make
