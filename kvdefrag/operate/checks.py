"""What `kvdefrag doctor` looks at on this machine, each as one line of a table."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from kvdefrag import __version__
from kvdefrag.config import Config, load_with_origins
from kvdefrag.errors import KvdefragError
from kvdefrag.sglang.rules import placement_options, version_refusal

GROUP = "sglang.srt.plugins"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        found: What was found, in words.
        status: `ok`, `note` (worth knowing), `unknown` (cannot be told here) or `stop` (the plugin
            does not attach because of it).
        change: What to do about it; empty if nothing needs doing.
    """

    name: str
    found: str
    status: str = "ok"
    change: str = ""

    def plain(self) -> dict[str, str]:
        """Return it as a mapping."""
        return asdict(self)


def inspect_machine() -> Iterator[Finding]:
    """Yield what is installed here: Python, torch, Triton, GPU."""
    yield Finding("python", platform.python_version())
    yield _package("torch", "stop", "install torch 2.4 or newer")
    gpu = _gpu()
    needed = "stop" if gpu.status == "ok" else "note"
    yield _package("triton", needed, "install triton 3.0 or newer" if needed == "stop" else "")
    yield gpu


def inspect_sglang(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the SGLang of this Python would load the plugin."""
    found = _version("sglang")
    if found is None:
        yield Finding("sglang", "not installed in this Python", "unknown")
        return
    refusal = version_refusal(found)
    if refusal is None:
        yield Finding("sglang", found)
    else:
        yield Finding("sglang", str(refusal), "stop", refusal.change)
    names = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    if "kvdefrag" not in names:
        change = "install kvdefrag with pip in the server's Python"
        yield Finding("entry point", f"no `kvdefrag` in group {GROUP}", "stop", change)
    allowed = environ.get("SGLANG_PLUGINS")
    if allowed is not None and "kvdefrag" not in [name.strip() for name in allowed.split(",")]:
        yield Finding("SGLANG_PLUGINS", allowed, "stop", "add kvdefrag to SGLANG_PLUGINS")


def inspect_config(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the settings of this environment are valid, and turn the plugin on."""
    yield Finding("kvdefrag", __version__)
    file = environ.get("KVDEFRAG_CONFIG")
    where = f"environment and {file}" if file else "environment"
    try:
        loaded = load_with_origins(None, environ)
        _try_out(loaded.config)
    except KvdefragError as error:
        yield Finding("settings", str(error), "stop", f"correct it in the {where}")
        return
    count = len(loaded.origins)
    yield Finding("settings", f"valid; {count} set by {where}" if count else "valid; defaults")
    if loaded.config.enabled:
        yield Finding("enabled", f"true (from {loaded.origins['enabled']})")
    else:
        origin = loaded.origins.get("enabled", "default")
        change = "set KVDEFRAG_ENABLED=1 in the server's environment"
        yield Finding("enabled", f"false (from {origin})", "stop", change)


def _try_out(config: Config) -> None:
    # What the plugin makes of them when it attaches, on a pool of its own.
    from kvdefrag.profiles import profile_or_default

    profile_or_default(config.profile)
    if _version("torch") is None:
        return
    import torch

    from kvdefrag.core.allocator import SlotAllocator

    table = torch.zeros((2, 8), dtype=torch.int32)
    SlotAllocator(16 * config.page, table=table, **placement_options(config))


def _gpu() -> Finding:
    if _version("torch") is None:
        return Finding("gpu", "cannot be told without torch", "note")
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "none here; the plugin runs on CPU and CUDA servers", "note")
    count = torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability(0)
    name = torch.cuda.get_device_name(0)
    return Finding("gpu", f"{count} x {name}, capability {major}.{minor}")


def _package(name: str, status: str, change: str) -> Finding:
    found = _version(name)
    return Finding(name, found) if found else Finding(name, "not installed", status, change)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> Mapping[str, str]:
    """Return this process's environment."""
    return os.environ
