"""Nothing on the step path waits for the device: the device form is run on CPU tensors under a
trap for everything that would need a value, or a shape, that only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvdefrag.config import Config
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.plan import MovePlan, violation
from kvdefrag.core.policy import Gather, Lower
from kvdefrag.core.readback import Readback
from kvdefrag.core.report import StepReport
from tests.machine.engine import Engine, Shape, settings_for

WAITING = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "argwhere",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
HOST_READS = ("numpy", "tolist", "item", "cpu", "__array__")


class HostWait(AssertionError):
    """The host would have waited for the device."""


class Trap(TorchDispatchMode):
    """Raises `HostWait` on every operation that would make the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in WAITING:
            raise HostWait(name)
        indexes = name.rstrip("_") in ("index", "index_put", "_index_put_impl", "_unsafe_index")
        if indexes and any(_is_mask(i) for i in args[1]):
            raise HostWait(f"{name} with a mask")
        if name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 2:
            raise HostWait("repeat_interleave without output_size")
        return func(*args, **kwargs)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def trapped() -> Iterator[None]:
    """Trap waits in the block, but for what a `Readback` delivers."""
    advance = Readback.advance

    def deliver(readback: Readback) -> None:
        with torch.utils._python_dispatch._disable_current_modes(), allowed(patch):
            advance(readback)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Readback, "advance", deliver)
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, _refuse(name))
        patch.setattr(torch.Tensor, "__setitem__", _set_item)
        with Trap():
            yield


@contextmanager
def allowed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    refused = {name: getattr(torch.Tensor, name) for name in HOST_READS}
    for name in HOST_READS:
        setattr(torch.Tensor, name, ORIGINAL[name])
    try:
        yield
    finally:
        for name, method in refused.items():
            setattr(torch.Tensor, name, method)


ORIGINAL = {name: getattr(torch.Tensor, name) for name in HOST_READS}


_stock_set_item = torch.Tensor.__setitem__


def _set_item(tensor: Tensor, at: object, value: object) -> None:
    # A Python number scattered by a tensor of places becomes a host tensor, which is copied over
    # and waited for; `index_fill_` passes it with the launch.
    places = at if isinstance(at, tuple) else (at,)
    if isinstance(value, int | float) and any(isinstance(i, Tensor) for i in places):
        raise HostWait("a number scattered by a tensor")
    _stock_set_item(tensor, at, value)


def _refuse(name: str) -> Callable[..., None]:
    def method(*_: object, **__: object) -> None:
        raise HostWait(name)

    return method


# --- the trap itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: t.__setitem__(torch.tensor([1, 2]), 5),
        lambda t: int(t[0]),
        lambda t: bool((t > 0).any()),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: torch.where(t > 1),
        lambda t: t[t > 1],
        lambda t: t.__setitem__(t > 1, t[:1]),
        lambda t: t[t[1]],
        lambda t: t.masked_select(t > 1),
        lambda t: t.unique(),
        lambda t: t.unique_consecutive(),
        lambda t: t.bincount(),
        lambda t: torch.equal(t, t),
        lambda t: t.repeat_interleave(t),
        lambda t: torch.arange(t[1]),
        lambda t: t[: t[1]],
    ],
)
def test_the_trap_catches_every_way_to_wait(wait: Callable[[Tensor], object]) -> None:
    numbers = torch.tensor([1, 2, 3])
    with trapped(), pytest.raises((HostWait, TypeError)):
        wait(numbers)


def test_the_trap_lets_through_what_only_queues_work() -> None:
    numbers = torch.tensor([3, 1, 2])
    with trapped():
        torch.where(numbers > 1, numbers, 0)
        numbers.index_fill_(0, numbers.argsort(), 1)
        numbers.repeat_interleave(torch.ones_like(numbers), output_size=3)
        numbers.scatter_add(0, numbers, numbers).cumsum(0).sort()


def test_the_trap_leaves_nothing_behind() -> None:
    with pytest.raises(HostWait), trapped():
        torch.ones(1).tolist()
    assert torch.ones(2).tolist() == [1, 1]


# --- the step path -------------------------------------------------------------------------------


def device_form(*, reservation: bool = False, **shape: object) -> Engine:
    defaults: dict[str, object] = {"size": 130, "page": 4, "rows": 6, "width": 64, "delay": 2}
    return Engine(
        Shape(device_form=True, checks="off", reservation=reservation, **(defaults | shape))
    )


def scattered(engine: Engine) -> Engine:
    """Let requests with a shared prefix decode in turns, and one of them leave."""
    shared = list(range(1000, 1006))
    engine.admit([shared + engine.fresh_tokens(3)])
    engine.share(engine.requests[1])
    engine.admit([shared + engine.fresh_tokens(n) for n in (2, 5, 1)])
    for turn in range(14):
        for row in list(engine.requests)[:: 1 if turn % 3 else 2]:
            engine.decode([row])
    engine.finish(2)
    engine.admit([engine.fresh_tokens(n) for n in (1, 2, 1)])
    return engine


def look_without_waiting(engine: Engine) -> Callable[[], object]:
    view = engine.view()
    return lambda: view


def demand(kind: Kind, rows: list[int], starts: list[int], counts: list[int]) -> Demand:
    return Demand(kind, *(np.array(x, dtype=np.int64) for x in (rows, starts, counts)))


@pytest.mark.parametrize("reservation", [False, True])
def test_allocating_and_freeing_never_waits(reservation: bool) -> None:
    engine = device_form(reservation=reservation)
    allocator = engine.allocator
    with trapped():
        for round_ in range(6):
            prompts = allocator.alloc_for(demand(Kind.EXTEND, [1, 2], [0, 0], [9, 3]))
            assert prompts is not None
            engine.table[1, :9], engine.table[2, :3] = prompts[:9].int(), prompts[9:].int()
            allocator.free_group_begin()
            for at in range(5):
                token = allocator.alloc_for(demand(Kind.DECODE, [1, 2], [9 + at, 3 + at], [1, 1]))
                assert token is not None
                engine.table[1, 9 + at], engine.table[2, 3 + at] = token[0].int(), token[1].int()
            drafts = allocator.alloc_for(demand(Kind.SPECULATIVE, [1, 2], [14, 8], [6, 0]))
            assert drafts is not None
            engine.table[1, 14:20] = drafts.int()
            plain = allocator.alloc(round_)
            assert plain is not None
            allocator.free(plain)
            allocator.free(engine.table[1, :20].clone())
            allocator.free(engine.table[2, :8].clone())
            allocator.free_group_end()
            allocator.release(1, 20)
            allocator.release(2, 8)
            allocator.two_ended.reorder()
            engine.readback.advance()
    assert allocator.available_size() == engine.size
    allocator.check_integrity()


def test_giving_reserved_slots_back_under_pressure_never_waits() -> None:
    engine = device_form(reservation=True, size=31)
    engine.admit([engine.fresh_tokens(1), engine.fresh_tokens(1), engine.fresh_tokens(1)])
    reserved = engine.allocator.reserved_size()
    assert reserved > 0
    with trapped():
        slots = engine.allocator.alloc(engine.allocator.available_size() + reserved)
    assert slots is not None
    assert engine.allocator.reserved_size() == 0


def step_trapped(engine: Engine, mode: str, *, dry_run: bool = False) -> StepReport:
    config = settings_for(mode, bytes_per_step=1 << 20, dry_run=dry_run, max_live=32)
    # The checks of CPU tensors find words for an error, and wait for them.
    rules = config.relocation.model_copy(update={"check_plans": "never"})
    engine.defragmenter.configure(engine.paged(config.model_copy(update={"relocation": rules})))
    if mode == "gather":
        row = next(iter(engine.requests))
        engine.defragmenter.request(Gather(row, int(engine.generation[row])))
    elif mode == "lower":
        engine.defragmenter.request(Lower(20))
    engine.steps += 1
    look = look_without_waiting(engine)
    with trapped():
        return engine.defragmenter.step(engine.steps, look)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("reservation", [False, True])
@pytest.mark.parametrize("mode", ["tenure", "evacuation", "gather", "lower", "idle"])
def test_a_step_never_waits(mode: str, reservation: bool, dry_run: bool) -> None:
    engine = scattered(device_form(reservation=reservation))
    if mode == "idle":
        for row in list(engine.requests):
            engine.finish(row)
    for _ in range(5):
        report = step_trapped(engine, mode, dry_run=dry_run)
        assert report.mechanism in (mode, "none")
        engine.check()


@pytest.mark.parametrize("mode", ["tenure", "evacuation", "gather", "lower"])
def test_the_steps_under_the_trap_do_move_rows(mode: str) -> None:
    engine = scattered(device_form())
    for _ in range(5):
        step_trapped(engine, mode)
    assert sum(int(plan.moved_rows()) for plan in engine.mover.plans) > 0


def test_a_gather_with_a_shared_prefix_never_waits_behind_an_earlier_slice() -> None:
    engine = scattered(device_form())
    config = settings_for("gather", bytes_per_step=1, dry_run=False, max_live=32)
    rules = config.relocation.model_copy(update={"check_plans": "never"})
    engine.defragmenter.configure(engine.paged(config.model_copy(update={"relocation": rules})))
    engine.defragmenter.request(Gather(1, int(engine.generation[1])))
    for _ in range(6):
        look = look_without_waiting(engine)
        engine.steps += 1
        with trapped():
            engine.defragmenter.step(engine.steps, look)
        engine.check()


def test_judging_a_plan_on_the_device_never_waits() -> None:
    plan = MovePlan(src=torch.tensor([5, 6, 0]), dst=torch.tensor([1, 2, 0]))
    is_free = torch.tensor([False, True, True, True, False, False, False, False, False])
    with trapped():
        flag = violation(plan, is_free, 8)
    assert not flag


def test_a_step_that_is_blocked_never_looks_at_the_requests() -> None:
    engine = scattered(device_form())
    engine.defragmenter.configure(engine.paged(Config()))

    def look() -> None:
        raise AssertionError("looked")

    with trapped():
        assert engine.defragmenter.step(1, look).mechanism == "none"
        assert engine.defragmenter.step(2, look, gates=("transfer",)).gates == ("transfer",)
