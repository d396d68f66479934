"""Types that kernels name in their annotations."""

from __future__ import annotations

from typing import Any

import absent

__path__: list[str] = []
__getattr__ = absent.names_of(__name__)


class dtype(str):
    """A type by its name."""


class constexpr:
    """A compile-time constant."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class tensor:
    """Named in annotations only."""


for _bits in (8, 16, 32, 64):
    for _kind in ("int", "uint"):
        globals()[f"{_kind}{_bits}"] = dtype(f"{_kind}{_bits}")
for _name in ("int1", "float8e4nv", "float8e5", "float16", "bfloat16", "float32", "float64"):
    globals()[_name] = dtype(_name)
