"""Child processes with a real scheduler each, started once and shared by the tests that ask.

A test names its children with the marker `children`; they start with the first test that waits
for one, two at a time.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SGLANG = importlib.util.find_spec("sglang") is not None
sys.path.append(str(HERE))
if SGLANG:
    # Only beside SGLang: elsewhere these would stand in for the real packages in every other test.
    sys.path.insert(0, str(HERE / "stubs"))

LIMIT = 600  # seconds for one child


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "children(*names): child processes that a test waits for")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.sglang)
            # SGLang and what it imports warn on import.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not SGLANG:
                item.add_marker(pytest.mark.skip(reason="needs an installed sglang"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints."""
    from harness.models import write_models

    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


class Children:
    """Starts child processes and hands out their results.

    Args:
        names: Of the children that will be asked for.
        models: Folder of the checkpoints.
        folder: Where jobs, results and logs go.
    """

    def __init__(self, names: set[str], models: Path, folder: Path) -> None:
        from harness.jobs import jobs

        self._models, self._folder = models, folder
        self._pool = ThreadPoolExecutor(2)
        wanted = {name: job for name, job in jobs().items() if name in names}
        self._futures: dict[str, Future[dict[str, Any]]] = {
            name: self._pool.submit(self._run, name, job) for name, job in wanted.items()
        }

    def result(self, child: str, key: str) -> dict[str, Any]:
        """Wait for a child; return what came out of one of its tasks."""
        found = self._futures[child].result()
        if key not in found:
            log = (self._folder / f"{child}.log").read_text(errors="replace")
            pytest.fail(f"child {child!r} ended before {key!r}:\n{log[-4000:]}")
        return dict(found[key])

    def served(self, child: str, key: str) -> dict[str, Any]:
        """Like `result`, and fail if the task did."""
        found = self.result(child, key)
        if "error" in found:
            pytest.fail(f"{child}, {key}: {found['error']}\n{found['trace']}")
        return found

    def close(self) -> None:
        """Wait for all."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, name: str, job: Any) -> dict[str, Any]:
        from harness.environment import environment

        tasks = [{"key": key} | task for key, task in job.tasks.items()]
        wanted, result = self._folder / f"{name}.job", self._folder / f"{name}.result"
        wanted.write_text(json.dumps({"models": str(self._models), "tasks": tasks}))
        with (self._folder / f"{name}.log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "harness.child", str(wanted), str(result)],
                env=environment(plugin=job.plugin, extra=job.variables),
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                check=False,
            )
        return dict(json.loads(result.read_text())) if result.exists() else {}


@pytest.fixture(scope="session")
def children(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Children]:
    """The children that the selected tests ask for."""
    markers = [m for item in request.session.items for m in item.iter_markers("children")]
    names = {name for marker in markers for name in marker.args}
    made = Children(names, models, tmp_path_factory.mktemp("children"))
    yield made
    made.close()
