"""Exceptions raised at every point of our step, one point to a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from kvdefrag.core import commit, holders, programs, relocator
from kvdefrag.core.host_two_ended import HostTwoEndedFreeList


class Planted(RuntimeError):
    """Raised on purpose."""


MOVED = 30  # A point behind the mover raises once so many rows have moved, amid a real move.

Due = Callable[[], bool]


def _failing(original: Callable[..., Any], due: Due, *, after: bool) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        now = due()
        if now and not after:
            raise Planted("before")
        result = original(*args, **kwargs)
        if now:
            raise Planted("after")
        return result

    return fail


def _half_copied(original: Callable[..., Any], due: Due, *, after: bool) -> Callable[..., Any]:
    # Half of the buffers are copied when it fails: no live row has changed.
    def fail(mover: Any, plan: Any) -> None:
        if due():
            for buffer in mover._buffers[: len(mover._buffers) // 2]:
                buffer[plan.dst] = buffer[plan.src]
            raise Planted("half of the buffers are copied")
        original(mover, plan)

    return fail


class Point:
    """One place to raise at, once.

    Args:
        owner: Returns the object, class or module; given the run.
        name: Attribute that is called there.
        number: Call at which it raises; 0 raises amid a move of real rows.
        after: Raise once the call has done its work.
        make: Makes the failing function.
    """

    def __init__(
        self,
        owner: Callable[[Any], Any],
        name: str,
        number: int = 3,
        *,
        after: bool = False,
        make: Callable[..., Callable[..., Any]] = _failing,
    ) -> None:
        self._owner, self._name = owner, name
        self._number, self._after, self._make = number, after, make

    @contextmanager
    def planted(self, run: Any) -> Iterator[None]:
        """Raise in the run, inside."""
        owner, calls, fired = self._owner(run), itertools.count(1), []

        def due() -> bool:
            amid = run.mover.latest > 0 and run.mover.rows >= MOVED
            if fired or not (next(calls) == self._number if self._number else amid):
                return False
            fired.append(True)
            return True

        failing = self._make(getattr(owner, self._name), due, after=self._after)
        with patch.object(owner, self._name, failing):
            yield


def _mover(run: Any) -> Any:
    return type(run.mover._inner)


def _defragmenter(run: Any) -> Any:
    return run.attachment.defragmenter


def _core(run: Any) -> Any:
    return run.attachment.allocator.core


def _marks() -> Any:
    from kvdefrag.sglang import marks

    return marks


def _allocator() -> Any:
    from kvdefrag.sglang import allocator

    return allocator


# Behind SGLang's own allocation calls and not in our step: the allocator becomes stock again.
OUTSIDE: dict[str, Point] = {
    "demand of a prefill": Point(lambda run: _marks().ExtendMark, "demand", 3),
    "demand of a decode": Point(lambda run: _marks().DecodeMark, "demand", 7),
    "room": Point(lambda run: _allocator(), "make_room", 7),
    "placing": Point(_core, "alloc_for", 11),
    "placing done": Point(_core, "alloc_for", 11, after=True),
    "rows filled": Point(lambda run: _core(run)._filler, "fill", 5, after=True),
    "slots noted": Point(lambda run: _core(run).checks, "taken", 5),
    "row written": Point(lambda run: _core(run).reservations, "write", 5, after=True),
    "demand noted": Point(lambda run: _core(run).reservations, "commit", 11, after=True),
    "slots read": Point(lambda run: _core(run).reservations, "read", 11),
    "slots freed": Point(lambda run: _core(run).free_list, "put", 2),
    "frees of a group": Point(_core, "free_group_end", 2),
    "release": Point(_core, "release", 2),
}
POINTS: dict[str, Point] = {
    "readback": Point(lambda run: _defragmenter(run)._readback, "advance", 9),
    "policy blocked": Point(lambda run: run.policy, "blocked", 9),
    "policy decide": Point(lambda run: run.policy, "decide", 9),
    "look": Point(lambda run: run.attachment, "_look", 9),
    "tree": Point(lambda run: run.attachment.looker, "tree_values"),
    "copies": Point(lambda run: run.attachment.looker, "copies"),
    "observe": Point(lambda run: _defragmenter(run).tracker, "observe", 9),
    "planner of tenure": Point(lambda run: programs, "plan_tenure"),
    "planner of evacuation": Point(lambda run: relocator, "plan_evacuation"),
    "planner of gathering": Point(lambda run: relocator, "plan_gather"),
    "planner of lowering": Point(lambda run: relocator, "plan_lower"),
    "check": Point(lambda run: relocator, "check_plan"),
    "mover": Point(_mover, "copy", 0),
    "mover half done": Point(_mover, "copy", 0, make=_half_copied),
    "mover done": Point(_mover, "copy", 0, after=True),
    "look-up table": Point(lambda run: commit, "remap_all", 0),
    "rows": Point(lambda run: holders.TableRows, "remap", 0),
    "rows done": Point(lambda run: holders.TableRows, "remap", 0, after=True),
    "values": Point(lambda run: holders.ValueTensors, "remap", 0),
    "values done": Point(lambda run: holders.ValueTensors, "remap", 0, after=True),
    "substitute": Point(lambda run: HostTwoEndedFreeList, "substitute", 0),
    "substitute pages": Point(lambda run: HostTwoEndedFreeList, "substitute_front", 0),
    "account": Point(_core, "commit_moves", 0),
    "confirm": Point(lambda run: _defragmenter(run).tracker, "confirm", 0),
    "moved": Point(lambda run: _defragmenter(run).tracker, "moved", 0),
    "report": Point(_defragmenter, "_report", 9),
} | OUTSIDE
