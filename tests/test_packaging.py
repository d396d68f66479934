"""What is installed is what the sources promise."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import kvdefrag

ROOT = Path(__file__).parents[1]
DISTRIBUTION = importlib.metadata.distribution("kvdefrag")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def sources(top: Path) -> set[str]:
    return {
        path.relative_to(top.parent).as_posix()
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_version_is_the_same_everywhere() -> None:
    assert DISTRIBUTION.version == kvdefrag.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvdefrag.__version__)


def test_both_packages_can_be_imported() -> None:
    for name in ("kvdefrag", "kvdefrag_kernels"):
        assert importlib.import_module(name).__name__ == name


def test_the_kernels_folder_is_no_package() -> None:
    # It would shadow the `kernels` that SGLang imports, wherever the root is on the path.
    assert (ROOT / "kernels" / "kvdefrag_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_console_script_is_declared() -> None:
    scripts = {
        point.name: point.value
        for point in DISTRIBUTION.entry_points
        if point.group == "console_scripts"
    }

    assert scripts == {"kvdefrag": "kvdefrag.cli:main"}


def test_every_declared_entry_point_leads_somewhere() -> None:
    for point in DISTRIBUTION.entry_points:
        assert callable(point.load()), point


def test_the_licence_is_there_and_declared() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")

    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert DISTRIBUTION.metadata["License-Expression"] == "Apache-2.0"


def test_the_wheel_holds_every_source_and_data_file(wheel: set[str]) -> None:
    wanted = sources(ROOT / "kvdefrag") | sources(ROOT / "kernels" / "kvdefrag_kernels")

    assert {name for name in wanted if name.startswith("kvdefrag/data/")}
    assert {"kvdefrag/py.typed", "kvdefrag_kernels/py.typed"} <= wheel
    assert sorted(wanted - wheel) == []


def test_the_wheel_holds_the_licence_and_nothing_else_than_the_packages(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    information = f"kvdefrag-{kvdefrag.__version__}.dist-info"

    assert f"{information}/licenses/LICENSE" in wheel
    assert tops == {"kvdefrag", "kvdefrag_kernels", information}
