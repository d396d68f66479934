"""Kernels can be defined, not launched: the wheel is large and nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import absent

__version__ = "3.7.1"
__getattr__ = absent.package(__name__)


class Kernel:
    """What a decorated function becomes."""

    def __init__(self, function: Any) -> None:
        self.fn, self.arg_names, self.src, self.params = function, [], "", []
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise absent.AbsentError(f"triton kernel {self.__name__}")


class Config:
    """Settings of a kernel that is never tuned."""

    def __init__(self, kwargs: Any = None, **rest: Any) -> None:
        self.kwargs = kwargs or {}
        self.__dict__.update(rest)


def jit(function: Any = None, **options: Any) -> Any:
    """Decorate, with or without options."""
    return Kernel if function is None else Kernel(function)


def autotune(*args: Any, **kwargs: Any) -> Any:
    """Decorate a kernel that may be decorated already."""
    return lambda inner: inner if isinstance(inner, Kernel) else Kernel(inner)


heuristics = autotune


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the lowest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


from triton import language  # noqa: E402, F401  SGLang reads it as an attribute
