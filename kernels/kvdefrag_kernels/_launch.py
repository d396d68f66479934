"""Launch a program again without the look at every argument that its first launch takes."""

from __future__ import annotations

import functools
from typing import Any


class Variants:
    """Compiled programs by key, for programs none of whose arguments is specialised.

    One variant then serves every value of the arguments, and Triton need not look at each of them,
    which costs 15 to 30 microseconds a launch. The key must tell apart whatever else a variant
    depends on: device, types of the tensors, constants. Numbers must fit into 32 bits.
    """

    def __init__(self) -> None:
        self._ready: dict[Any, Any] = {}

    def launch(
        self,
        key: Any,
        program: Any,
        grid: tuple[int, int, int],
        *arguments: Any,
        num_warps: int,
        **constants: Any,
    ) -> None:
        """Launch `program`; `constants` are its last parameters, in their order."""
        ready = self._ready.get(key)
        if ready is not None:
            ready[grid](*arguments, *constants.values())
            return
        compiled = program[grid](*arguments, num_warps=num_warps, **constants)
        # The interpreter compiles nothing.
        if compiled is not None and _takes_constants():
            self._ready[key] = compiled


@functools.cache
def _takes_constants() -> bool:
    # From Triton 3.3 on a compiled program takes its constants too, and does not look at them.
    import triton

    return tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 3)
