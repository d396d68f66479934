"""The whole server, with its HTTP front end, as `sglang.launch_server` starts it on a CPU."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from harness.engine import OPTIONS, _free_port

KEYS = {"SGLANG_API_KEY": "secret", "SGLANG_ADMIN_API_KEY": "very-secret"}
FILES = {
    "policy.yaml": "relocation:\n  mode: threshold\n  bytes_per_step: 1MiB\n",
    "wrong.yaml": "relocation:\n  mode: sometimes\n",
    "restart.yaml": "placement:\n  free_list: fifo\n  reservation: false\n",
}
DOCUMENTED = "http://localhost:30000"
_START_S = 300


@contextmanager
def server(models: Path, log: Path) -> Iterator[str]:
    """Start a server with keys of its own; yield its address."""
    port = _free_port()
    options = OPTIONS | {"host": "127.0.0.1", "port": port, "disable_radix_cache": True}
    options |= {"model_path": str(models / "llama"), "enable_metrics": True}
    options |= {"api_key": KEYS["SGLANG_API_KEY"], "admin_api_key": KEYS["SGLANG_ADMIN_API_KEY"]}
    words = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in options.items():
        if value is not False:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep eight requests running."""
    stop = Event()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        while not stop.is_set():
            tokens = [draw.randrange(3, 1000) for _ in range(draw.randint(5, 60))]
            sampling = {"temperature": 0, "max_new_tokens": draw.randint(60, 160)}
            with suppress(OSError):
                _post(url, "/generate", {"input_ids": tokens, "sampling_params": sampling})

    threads = [Thread(target=ask, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1.5)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


def run(command: str, url: str, folder: Path) -> dict[str, Any]:
    """Run a command of the documentation; return what it prints and its exit code."""
    words = shlex.split(command.replace(DOCUMENTED, url))
    if words[0] == "kvdefrag":
        words = [sys.executable, "-m", "kvdefrag", *words[1:]]
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | KEYS | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for path in re.findall(r"^recorded (\S+)$", done.stderr, re.MULTILINE):
        Path(path).unlink(missing_ok=True)
    return {
        "command": command,
        "code": done.returncode,
        "out": done.stdout.replace(url, DOCUMENTED),
        "err": done.stderr.replace(url, DOCUMENTED),
    }


def states(url: str) -> list[dict[str, Any]]:
    """Return what the plugin shows."""
    found = json.loads(_get(url, "/server_info"))
    return [state["kvdefrag"] for state in found["internal_states"]]


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            _get(url, "/server_info")
            return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _get(url: str, path: str) -> bytes:
    return _open(urllib.request.Request(url + path))


def _post(url: str, path: str, body: Any) -> bytes:
    headers = {"Content-Type": "application/json"}
    return _open(urllib.request.Request(url + path, json.dumps(body).encode(), headers))


def _open(request: urllib.request.Request) -> bytes:
    request.add_header("Authorization", f"Bearer {KEYS['SGLANG_API_KEY']}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
        return content
