"""Server arguments as they are written on a command line, without SGLang to parse them."""

from __future__ import annotations

import shlex
from typing import Any

from kvdefrag.errors import ConfigError

_ALIASES = {
    "pipeline_parallel_size": "pp_size",
    "decode_context_parallel_size": "dcp_size",
    "attention_context_parallel_size": "attn_cp_size",
}
_SIZES = frozenset({"page_size", "pp_size", "dcp_size", "attn_cp_size"})


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a launch command by their names in `ServerArgs`.

    A flag without a value is True; what stands before the first flag is passed over, so that a
    whole command may be given.

    Raises:
        ConfigError: The text cannot be split, or a size is not a number.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--sglang-args: {error}") from error
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _ALIASES.get(name, name)
            found[name] = _value(name, value) if equals else True
        elif name and found[name] is True:
            found[name] = _value(name, word)
    return found


def _value(name: str, text: str) -> Any:
    if name not in _SIZES:
        return {"true": True, "false": False}.get(text.lower(), text)
    if not text.isdecimal():
        raise ConfigError(f"--sglang-args: --{name.replace('_', '-')} {text!r} is not a number")
    return int(text)
