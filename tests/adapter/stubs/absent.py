"""Names of packages that are not installed here: they may be imported, and fail when called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class AbsentError(RuntimeError):
    """Something that is not installed on this machine was called."""


class Absent:
    """A function, object or submodule of an absent package."""

    def __init__(self, path: str) -> None:
        self.__name__ = self.__qualname__ = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AbsentError(self.__name__)


class AbsentType(type):
    """A class of an absent package: good for annotations, base classes and class attributes."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def names_of(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`: a capital letter begins a class, any other an object."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            found: Any = AbsentType(name, (), {"__module__": module})
        else:
            found = Absent(f"{module}.{name}")
        setattr(sys.modules[module], name, found)
        return found

    return find


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = names_of(module.__name__)  # type: ignore[method-assign]


def package(name: str) -> Callable[[str], Any]:
    """Let every submodule of `name` be imported too; return the package's `__getattr__`."""
    sys.meta_path.append(_Submodules(name))
    return names_of(name)
