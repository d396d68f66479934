"""Variables of a child process: SGLang on a CPU, its own checks armed, kvdefrag as asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ADAPTER = Path(__file__).parents[1]

CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",  # a scheduler would bind every core to itself
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the helpers of speculation would compile for 20 s
    "PYTHONWARNINGS": "ignore",
}
ORACLES = {
    # The second does nothing without the first.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
}
PLUGIN = {
    "KVDEFRAG_ENABLED": "true",
    "KVDEFRAG_PAGE": "16",
    "KVDEFRAG_PLACEMENT__CHECKS": "strict",
    "KVDEFRAG_RELOCATION__CHECK_PLANS": "always",
    "KVDEFRAG_RELOCATION__MODE": "threshold",
}


def environment(*, plugin: bool, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a child."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVDEFRAG_", "SGLANG_"))}
    paths = [str(ADAPTER), str(ADAPTER / "stubs"), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    # GCC 13 and later find std::size_t in a header of 0.5.17 only with this.
    kept["CXX"] = str(ADAPTER / "stubs" / "cxx-with-cstddef")
    return kept | CPU | ORACLES | (PLUGIN if plugin else {}) | dict(extra)
