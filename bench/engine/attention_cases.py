"""Steps of a real engine with our attention against SGLang's Triton backend.

Each engine serves the same prompts again and again out of its cache, one engine at a time, so
that what is timed is decode and verify steps alone.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkpoints
import torch
from safetensors.torch import save_file
from workers import Workers

if TYPE_CHECKING:
    from cases import Setup

# The plugin reads whether to replace the backend as it is loaded, before a worker's settings.
_ON = {"KVDEFRAG_ATTENTION__ENABLED": "true"}
_AS_STOCK = {
    "placement": {"free_list": "fifo", "reservation": False},
    "relocation": {"mode": "off"},
}
MODES: dict[str, dict[str, Any]] = {
    "stock": {"plugin": False},
    "attention": {"env": _ON, "settings": _AS_STOCK},
    "attention and placement": {"env": _ON, "settings": {"relocation": {"mode": "off"}}},
}
_NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 9}
_LIMITS = {"mem_fraction_static": 0.95, "cuda_graph_max_bs_decode": 16}


def ngram(setup: Setup) -> dict[str, Any]:
    """Verify trees of nine n-gram tokens with latent rows, 4 layers, by length and batch."""
    model = _smooth_mla(setup.models)
    return _by_scene(setup, model, _NGRAM, [(8_192, 1), (32_768, 1), (120_000, 1), (32_768, 16)])


def decode(setup: Setup) -> dict[str, Any]:
    """Decode with the same model; what a verify step is compared with."""
    model = _smooth_mla(setup.models)
    return _by_scene(setup, model, {}, [(8_192, 1), (32_768, 1), (120_000, 1), (32_768, 16)])


def eagle(setup: Setup) -> dict[str, Any]:
    """Trees of four branches from a draft model, keys and values of their own, 8 layers."""
    draft = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(setup.models / "eagle"),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    }
    return _by_scene(setup, setup.models / "smooth", draft, [(8_192, 1), (32_768, 1), (8_192, 16)])


def _by_scene(
    setup: Setup, model: Path, draft: Mapping[str, Any], scenes: list[tuple[int, int]]
) -> dict[str, Any]:
    if setup.small:
        scenes = [(96, 1), (64, 3)]
    most = max(length * requests for length, requests in scenes)
    options: dict[str, Any] = {
        "max_total_tokens": most + setup.some(65_536, 4_000),
        "max_running_requests": max(requests for _, requests in scenes),
        "context_length": max(length for length, _ in scenes) + 4_096,
        "chunked_prefill_size": 8_192,
    }
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        # To try the case itself: what a CPU has that verifies trees.
        options["attention_backend"] = "intel_amx"
    shared = {"model": str(model), "options": options | _LIMITS | draft}
    found: dict[str, Any] = {}
    with Workers({name: mode | shared for name, mode in MODES.items()}) as workers:
        for length, requests in scenes:
            load = setup.mixed(
                requests=requests, shortest=length, longest=length, shared=0,
                count=setup.some(256, 16),
            )  # fmt: skip
            # The first round fills the cache and is thrown away.
            orders = [{"flush": True, "load": load}]
            orders += [{"load": load, "outputs": True}] * max(2, setup.rounds // 2)
            served = workers.in_turn(orders)
            found[f"{length} tokens x {requests}"] = _compared(served)
    return {"scenes": found, "started": {n: s["state"] for n, s in workers.states.items()}}


def _compared(served: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rounds = {name: results[1:] for name, results in served.items()}
    right = rounds["stock"][0]["outputs"]
    found: dict[str, Any] = {}
    for name, results in rounds.items():
        last = dict(results[-1])
        steps = [r["steps_ms"]["all"]["p50"] for r in results]
        tokens = last.pop("outputs")
        found[name] = last | {
            "step_ms_p50": statistics.median(steps),
            "step_ms_p50_of_rounds": steps,
            "same": sum(tokens.get(rid) == out for rid, out in right.items()),
            "accepted_as_stock": last["tokens_per_verify"]
            == rounds["stock"][-1]["tokens_per_verify"],
        }
    stock = found["stock"]["step_ms_p50"]
    for result in found.values():
        result["step_ratio_to_stock"] = round(stock / result["step_ms_p50"], 3)
    return {"requests": len(right)} | found


def _smooth_mla(folder: Path) -> Path:
    """Write a model of latent rows whose first choice leads by far: rounding is harmless."""
    target = folder / "smooth-mla"
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        weights = checkpoints._smooth(checkpoints._mla(4))
        tensors = {k: w.to(torch.bfloat16).contiguous() for k, w in weights.items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        config = checkpoints._MLA | {"num_hidden_layers": 4}
        (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


Case = Callable[["Setup"], dict[str, Any]]
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "attention-ngram": (ngram, ()),
    "attention-decode": (decode, ()),
    "attention-eagle": (eagle, ("smooth", "eagle")),
}
