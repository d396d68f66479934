"""The matrix: models, caches, schedules, speculation and traffic, each case by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.workloads import Workload, sessions, shared_prefixes


@dataclass(frozen=True)
class Case:
    """One scheduler and what it serves.

    Attributes:
        name: Names it in results.
        workload: The requests.
        model: Folder among the checkpoints.
        draft: Folder of the draft's, or None.
        options: Server arguments.
        variables: Of the environment, while the scheduler is made.
        long: Run only where the longer matrix is asked for.
    """

    name: str
    workload: Workload
    model: str = "llama"
    draft: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    long: bool = False


OVERLAP = {"disable_overlap_schedule": False}
NO_TREE = {"disable_radix_cache": True}
CHUNKS = {"chunked_prefill_size": 32, "max_prefill_tokens": 64}
SMALL = {"max_total_tokens": 420}
TIGHT = {"max_total_tokens": 300, "schedule_conservativeness": 0.1}
TREES = {"attention_backend": "intel_amx"}
EAGLE = TREES | {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}
STANDALONE = TREES | {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
}
NGRAM = TREES | {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}  # 0.5.23
SESSIONS = {"enable_streaming_session": True}

PLAIN = shared_prefixes(requests=12, count=28, seed=1)
LONG_PROMPTS = shared_prefixes(requests=9, count=20, seed=2, prefix=70, own=(10, 60), groups=2)
ABORTED = shared_prefixes(requests=14, count=28, seed=3, abort=0.5)
TWICE = shared_prefixes(requests=8, count=20, seed=4, flush=True)
FEW = shared_prefixes(requests=8, count=36, seed=5, spread=16)
FEW_ABORTED = shared_prefixes(requests=9, count=60, seed=5, spread=16, abort=0.8)
CROWDED = shared_prefixes(requests=10, count=100, seed=6, prefix=6, own=(3, 8), groups=2)

TALK = sessions(turns=3, count=14, seed=8)

CASES = (
    Case("llama", PLAIN),
    Case("llama-overlap", PLAIN, options=OVERLAP),
    Case("llama-python-core", PLAIN, variables=PYTHON_CORE),
    Case("llama-no-tree", PLAIN, options=NO_TREE),
    Case("llama-no-tree-overlap-abort", ABORTED, options=NO_TREE | OVERLAP),
    Case("llama-chunked", LONG_PROMPTS, options=CHUNKS),
    Case("llama-chunked-overlap-small-abort", ABORTED, options=CHUNKS | OVERLAP | SMALL),
    Case("llama-retract", CROWDED, options=TIGHT),
    Case("llama-retract-overlap", CROWDED, options=TIGHT | OVERLAP),
    Case("llama-no-tree-retract", CROWDED, options=TIGHT | NO_TREE, long=True),
    Case("llama-abort-overlap", ABORTED, options=OVERLAP, long=True),
    Case("llama-flush", TWICE, options=OVERLAP),
    Case("llama-sessions", TALK, options=SESSIONS),
    Case("llama-sessions-overlap", TALK, options=SESSIONS | OVERLAP, long=True),
    Case("mla", PLAIN, model="mla"),
    Case("mla-overlap-chunked-small-abort", ABORTED, "mla", options=CHUNKS | OVERLAP | SMALL),
    Case("mla-no-tree", PLAIN, "mla", options=NO_TREE),
    Case("mla-no-tree-overlap", PLAIN, "mla", options=NO_TREE | OVERLAP, long=True),
    Case("mla-retract-overlap", CROWDED, "mla", options=TIGHT | OVERLAP),
    Case("mla-flush", TWICE, "mla", options=OVERLAP, long=True),
    Case("eagle-topk-4", FEW, "smooth", "eagle", options=EAGLE),
    Case("eagle-topk-4-overlap-chunked", FEW, "smooth", "eagle", options=EAGLE | OVERLAP | CHUNKS),
    Case(
        "eagle-topk-4-no-tree-abort-retract",
        FEW_ABORTED,
        "smooth",
        "eagle",
        options=EAGLE | NO_TREE | {"max_total_tokens": 700},
    ),
    Case("standalone-topk-2", FEW, draft="draft", options=STANDALONE),
    Case("standalone-topk-2-overlap", FEW, draft="draft", options=STANDALONE | OVERLAP),
    Case("standalone-mla-target", FEW, "mla", draft="draft", options=STANDALONE, long=True),
    Case("ngram", FEW, options=NGRAM, long=True),
    Case("ngram-overlap", FEW, options=NGRAM | OVERLAP),
    Case(
        "ngram-overlap-small",
        PLAIN,
        options=NGRAM | OVERLAP | {"max_total_tokens": 700},
        long=True,
    ),
)
BY_NAME = {case.name: case for case in CASES}
