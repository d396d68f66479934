"""Give the data files that ship with the package; `SOURCE.md` says where each is from."""

from __future__ import annotations

from importlib import resources
from typing import IO

ATTENTION_CROSSOVER = "attention_h200.json"
CONVERSATION_TRACE = "mooncake_conversation_1200.jsonl"
DEFAULT_PROFILE = "h200_mla61.json"
EAGLE_MTBENCH = "eagle_mtbench_tokens_per_step.csv"


def open_data(name: str) -> IO[bytes]:
    """Open a shipped data file for reading; the caller closes it.

    Works from a wheel, a checkout and a zipped package alike.

    Raises:
        FileNotFoundError: The package holds no such file.
    """
    return resources.files(__name__).joinpath(name).open("rb")
