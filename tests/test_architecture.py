"""Imports go one way, and the step path of the core never waits for the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path.relative_to(ROOT)
    for top in ("kvdefrag", "kernels/kvdefrag_kernels")
    for path in (ROOT / top).rglob("*.py")
)

# Where a file lies -> what it may not import. Every rule that fits a file holds for it.
FORBIDDEN = {
    "kernels/kvdefrag_kernels/": ("kvdefrag", "sglang"),
    "kvdefrag/core/": (
        "kvdefrag.cli",
        "kvdefrag.gpu",
        "kvdefrag.metrics",
        "kvdefrag.sglang",
        "kvdefrag.sim",
        "triton",
    ),
    "kvdefrag/metrics/": ("kvdefrag.cli", "kvdefrag.gpu", "kvdefrag.sglang", "kvdefrag.sim"),
    "kvdefrag/config/": (
        "kvdefrag.cli",
        "kvdefrag.core",
        "kvdefrag.gpu",
        "kvdefrag.metrics",
        "kvdefrag.sglang",
        "kvdefrag.sim",
        "torch",
    ),
    "kvdefrag/sim/": ("kvdefrag.cli", "kvdefrag.gpu", "kvdefrag.sglang", "triton"),
    "kvdefrag/attention/": (
        "kvdefrag.cli",
        "kvdefrag.core",
        "kvdefrag.gpu",
        "kvdefrag.metrics",
        "kvdefrag.sglang",
        "kvdefrag.sim",
        "triton",
    ),
    "kvdefrag/control/": (
        "kvdefrag.cli",
        "kvdefrag.gpu",
        "kvdefrag.metrics",
        "kvdefrag.operate",
        "kvdefrag.sglang",
        "kvdefrag.sim",
        "triton",
    ),
    "kvdefrag/operate/": ("kvdefrag.cli", "kvdefrag.gpu", "triton"),
    "kvdefrag/sglang/": ("kvdefrag.cli", "kvdefrag.operate", "kvdefrag.sim"),
}
# What only some files may import.
RESERVED = {
    "sglang": ("kvdefrag/sglang/",),
    "kvdefrag_kernels": (
        "kernels/",
        "kvdefrag/attention/",
        "kvdefrag/gpu/",
        "kvdefrag/sglang/",
    ),
}

# Calls that make the host wait for the device, or give a shape that only the device knows.
WAITING = {
    "argwhere",
    "bincount",
    "cpu",
    "item",
    "masked_select",
    "nonzero",
    "numpy",
    "synchronize",
    "tolist",
    "unique",
    "unique_consecutive",
}
# Functions of the core that are not on the step path, each with the reason.
OFF_THE_STEP_PATH = {
    "kvdefrag/core/free_stats.py::free_stats": "figures for reports, and says that it waits",
    "kvdefrag/core/layout.py::regions": "a figure for reports",
    "kvdefrag/core/plan.py::check_plan": "CPU tensors by contract; finds words for the error",
    "kvdefrag/core/relocator.py::Relocator._confirm": "takes what has been read back already",
    "kvdefrag/core/tracker.py::Tracker.learn_late": "takes what has been read back already",
    "kvdefrag/core/slot_checks.py::HostChecks": "CPU tensors by contract",
}
# Wherever it stands: `check_integrity` runs in tests and when idle, and must say what it found.
OFF_THE_STEP_PATH_BY_NAME = {"check_integrity"}


def module_of(path: Path) -> list[str]:
    parts = list(path.with_suffix("").parts)
    parts = parts[1:] if parts[0] == "kernels" else parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything imported anywhere in a file."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def wrong_imports(source: str, path: Path) -> list[str]:
    found = []
    place = path.as_posix()
    for line, name in imports(ast.parse(source), path):
        barred = [
            module
            for start, modules in FORBIDDEN.items()
            if place.startswith(start)
            for module in modules
        ]
        barred += [module for module, where in RESERVED.items() if not place.startswith(where)]
        found += [f"{place}:{line}: {name}" for module in barred if within(name, module)]
    return found


def waits(node: ast.Call) -> bool:
    name = called(node)
    keywords = {keyword.arg for keyword in node.keywords}
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "np":
        return False
    if name == "repeat_interleave":
        return "output_size" not in keywords
    if name == "where":
        return len(node.args) == 1 and not node.keywords
    if name == "to":
        return any(isinstance(value, ast.Constant) and value.value == "cpu" for value in values)
    return name in WAITING


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the qualified name of every function and class in a tree."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def exempt_lines(tree: ast.AST, path: Path) -> set[int]:
    lines: set[int] = set()
    for name, node in functions(tree):
        listed = f"{path.as_posix()}::{name}" in OFF_THE_STEP_PATH
        if listed or name.rpartition(".")[2] in OFF_THE_STEP_PATH_BY_NAME:
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def waiting_calls(source: str, path: Path) -> list[str]:
    if path.name.startswith("host_"):
        return []
    tree = ast.parse(source)
    exempt = exempt_lines(tree, path)
    return [
        f"{path.as_posix()}:{node.lineno}: {called(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and waits(node) and node.lineno not in exempt
    ]


def test_imports_go_one_way() -> None:
    assert SOURCES

    assert [wrong for path in SOURCES for wrong in wrong_imports(read(path), path)] == []


def test_the_step_path_of_the_core_never_waits_for_the_device() -> None:
    core = [path for path in SOURCES if path.parts[:2] == ("kvdefrag", "core")]
    assert core

    assert [call for path in core for call in waiting_calls(read(path), path)] == []


def test_every_exempt_function_exists_and_has_a_reason() -> None:
    for entry, reason in OFF_THE_STEP_PATH.items():
        path, name = entry.split("::")
        names = {found for found, _ in functions(ast.parse(read(Path(path))))}
        assert name in names, entry
        assert reason, entry


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kvdefrag/core/policy.py", "import kvdefrag_kernels"),
        ("kvdefrag/core/policy.py", "from kvdefrag.sim import engine"),
        ("kvdefrag/core/policy.py", "from kvdefrag import sim"),
        ("kvdefrag/core/policy.py", "from ..sim import engine"),
        ("kvdefrag/core/policy.py", "from .. import sim"),
        ("kvdefrag/core/__init__.py", "from ..gpu import TritonMover"),
        ("kvdefrag/core/policy.py", "def step():\n    import triton.language as tl"),
        ("kvdefrag/core/policy.py", "if TYPE_CHECKING:\n    from sglang.srt import pool"),
        ("kvdefrag/core/policy.py", "importlib.import_module('kvdefrag.sim.engine')"),
        ("kvdefrag/core/policy.py", "__import__('sglang')"),
        ("kvdefrag/sim/engine.py", "import kvdefrag_kernels.gather"),
        ("kvdefrag/sim/readers/csv.py", "from kvdefrag import sglang"),
        ("kvdefrag/metrics/log.py", "import sglang"),
        ("kvdefrag/cli/simulate_cmd.py", "from kvdefrag_kernels import gather_copy"),
        ("kvdefrag/gpu/mover.py", "import sglang"),
        ("kvdefrag/sglang/plugin.py", "from kvdefrag.sim import arms"),
        ("kernels/kvdefrag_kernels/gather.py", "from kvdefrag.core import plan"),
        ("kernels/kvdefrag_kernels/gather.py", "import kvdefrag"),
    ],
)
def test_an_import_against_the_direction_is_found(path: str, line: str) -> None:
    assert len(wrong_imports(line, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kvdefrag/core/policy.py", "import torch\nfrom kvdefrag.core.plan import Plan"),
        ("kvdefrag/core/policy.py", "from kvdefrag.config import Relocation"),
        ("kvdefrag/core/policy.py", "import kvdefrag_simple, sglang_like"),
        ("kvdefrag/sim/engine.py", "from kvdefrag.core.allocator import SlotAllocator"),
        ("kvdefrag/gpu/mover.py", "import kvdefrag_kernels, triton"),
        ("kvdefrag/sglang/plugin.py", "import sglang, kvdefrag_kernels, kvdefrag.core"),
        (
            "kernels/kvdefrag_kernels/gather.py",
            "from kvdefrag_kernels import _gather\nimport triton",
        ),
        ("kernels/kvdefrag_kernels/gather.py", "from . import _gather"),
    ],
)
def test_an_import_along_the_direction_is_left_alone(path: str, line: str) -> None:
    assert wrong_imports(line, Path(path)) == []


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "x.sum().tolist()",
        "x.cpu()",
        "x.to('cpu')",
        "x.to(device='cpu')",
        "torch.nonzero(x)",
        "x.nonzero()",
        "torch.bincount(x)",
        "torch.repeat_interleave(x, counts)",
        "x.repeat_interleave(counts)",
        "torch.masked_select(x, mask)",
        "x.numpy()",
        "torch.where(x > 0)",
        "torch.unique(x)",
        "class A:\n    def step(self):\n        return self.x.item()",
    ],
)
def test_a_call_that_waits_for_the_device_is_found(line: str) -> None:
    assert len(waiting_calls(line, Path("kvdefrag/core/policy.py"))) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kvdefrag/core/policy.py", "torch.nonzero_static(x, size=4)"),
        ("kvdefrag/core/policy.py", "torch.repeat_interleave(x, counts, output_size=9)"),
        ("kvdefrag/core/policy.py", "torch.where(x > 0, x, y)"),
        ("kvdefrag/core/policy.py", "x.to(torch.int64)"),
        ("kvdefrag/core/policy.py", "np.unique(x)"),
        ("kvdefrag/core/policy.py", "class A:\n    def check_integrity(self):\n        x.item()"),
        ("kvdefrag/core/host_pages.py", "x.numpy().tolist()"),
    ],
)
def test_a_call_that_does_not_wait_is_left_alone(path: str, line: str) -> None:
    assert waiting_calls(line, Path(path)) == []


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
