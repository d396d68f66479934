"""The engine benchmarks: each starts engines, lets them serve, and returns figures.

Modes of the plugin by name: `stock` never loads it, `disabled` loads it and leaves it off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers import Workers

_EVERYTHING = {
    "mode": "threshold",
    "coverage_low": 0.9999,
    "coverage_high": 1.0,
    "bytes_per_step": "1GiB",
    "duty_bytes_per_step": "1GiB",
}
_CHAOS = _EVERYTHING | {"check_plans": "always", "min_gain_rows": 0}
MODES: dict[str, dict[str, Any]] = {
    "stock": {"plugin": False},
    "disabled": {"enabled": False},
    "placement+reservation": {"settings": {"relocation": {"mode": "off"}}},
    "default": {},
    "policy": {"settings": {"relocation": {"mode": "threshold"}}},
    "tenure": {
        "settings": {
            "placement": {"reservation": False},
            "relocation": _EVERYTHING | {"mechanisms": {"evacuation": False}},
        }
    },
    "chaos": {
        "chaos": 1,
        "settings": {"page": 16, "placement": {"reservation": False}, "relocation": _CHAOS},
    },
    "chaos, pages of 64, reservation": {"chaos": 2, "settings": {"relocation": _CHAOS}},
    "sorted": {
        "settings": {
            "placement": {"free_list": "sorted", "reservation": False},
            "relocation": {"mode": "off"},
        }
    },
}
_LIMITS = {"mem_fraction_static": 0.95, "cuda_graph_max_bs_decode": 64}


@dataclass(frozen=True)
class Setup:
    """Where things are, and how much to do.

    Attributes:
        models: Folder of the checkpoints.
        traces: Folder of traces, by file name.
        rounds: Rounds of what is compared in turn.
        small: Far less of everything, to try the benchmark itself.
    """

    models: Path
    traces: Path | None = None
    rounds: int = 6
    small: bool = False

    def mixed(self, **shape: Any) -> dict[str, Any]:
        """Return a load of kind `mixed`; the small models know few tokens."""
        return {"kind": "mixed", **shape} | ({"vocabulary": 900} if self.small else {})

    def some(self, many: int, few: int) -> int:
        """Return how many of something to take."""
        return few if self.small else many


def identity(setup: Setup, model: str = "llama") -> dict[str, Any]:
    """Compare the tokens of every mode with those of stock; layouts before and after."""
    options = {"max_total_tokens": setup.some(65_536, 6_000), "max_running_requests": 32}
    load = setup.mixed(
        requests=setup.some(64, 6),
        count=setup.some(512, 40),
        longest=setup.some(680, 90),
        spread=setup.some(200, 10),
    )
    modes = ("stock", "default", "chaos", "chaos, pages of 64, reservation", "tenure")
    return _compare(setup, model, modes, options, load)


def speculation(setup: Setup) -> dict[str, Any]:
    """The same with drafts: EAGLE's trees of four branches, and n-grams, on the large machine."""
    load = setup.mixed(
        requests=setup.some(32, 4), count=setup.some(256, 24), longest=setup.some(680, 60)
    )
    eagle = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(setup.models / "eagle"),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    }
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    options = {"max_total_tokens": setup.some(65_536, 6_000), "max_running_requests": 16}
    modes = ("stock", "default", "chaos", "tenure")
    found = {}
    for name, draft in (("eagle-topk-4", eagle), ("ngram", ngram)):
        found[name] = _compare(setup, "smooth", modes, options | draft, load)
    return found


def oversights(setup: Setup) -> dict[str, Any]:
    """Leave out one part of a move at a time, with the forward held up on the device."""
    from faults import FAULTS

    options = {"max_total_tokens": setup.some(24_000, 4_000), "max_running_requests": 16}
    # Short answers: what a request that has just ended still writes is what must not be overtaken.
    load = setup.mixed(
        requests=setup.some(160, 12), fewest=4, count=setup.some(48, 24), longest=200, spread=60
    )
    late = {"delay_us": 3_000, "options": options | _LIMITS, "model": str(setup.models / "llama")}
    specs: dict[str, dict[str, Any]] = {"stock": late | MODES["stock"]}
    for fault in FAULTS:
        specs[fault] = late | MODES["chaos"] | {"fault": fault}
    found = _noticed(specs, {"load": load, "outputs": True})
    right = found["stock"].pop("outputs")
    for name, result in found.items():
        if name != "stock":
            result["same"] = _same(right, result.pop("outputs", {}))
            fault = result.get("error") or result["state"]["error"]
            result["noticed"] = fault or (result["same"] < len(right) and "other tokens") or None
    return {"requests": len(right), "left_out": found}


def throughput(setup: Setup, model: str = "llama") -> dict[str, Any]:
    """Serve the same load in turn, each mode in an engine of its own; ratios to stock by round.

    `deep` takes 8 ms and more for a step, and so much memory that only three engines fit at once.
    """
    if model == "llama":
        groups = (("stock", "disabled", "placement+reservation", "policy", "tenure"),)
        options: dict[str, Any] = {"max_total_tokens": setup.some(65_536, 6_000)}
        shape = {"requests": setup.some(64, 4), "count": setup.some(640, 24), "longest": 300}
    else:
        groups = (("stock", "disabled", "placement+reservation"), ("stock", "policy", "tenure"))
        options = {"max_total_tokens": 40_960, "load_format": "dummy"}
        shape = {"requests": 64, "count": 256, "shortest": 100, "longest": 300}
    options["max_running_requests"] = 64
    # The first round compiles and is thrown away.
    orders = [
        {"flush": True, "load": setup.mixed(seed=seed, **shape)} for seed in range(setup.rounds + 1)
    ]
    found = []
    for modes in groups:
        with Workers(_specs(setup, model, modes, options)) as workers:
            rounds = {k: v[1:] for k, v in workers.in_turn(orders).items()}
        summary = {name: _against(rounds["stock"], r) for name, r in rounds.items()}
        found.append({"summary": summary, "rounds": rounds})
    return {"groups": {str(number): group for number, group in enumerate(found)}}


def aged(setup: Setup) -> dict[str, Any]:
    """Replay an hour of churn, then a steady load of long prompts; layout of what runs."""
    if setup.traces is None:
        raise SystemExit("this case needs --traces, a folder with both traces")
    options = {
        "max_total_tokens": 262_144,
        "max_running_requests": 64,
        "chunked_prefill_size": 8_192,
        "context_length": 16_384,
    }
    specs = _specs(setup, "llama", ("stock", "sorted", "default"), options)
    specs = {name: spec | {"sample": 16} for name, spec in specs.items()}
    azure = str(setup.traces / "AzureLLMInferenceTrace_conv.csv")
    mooncake = str(setup.traces / "conversation_trace.jsonl")
    churn = {"kind": "trace", "form": "azure", "path": azure, "divide": 4}
    steady = {"kind": "trace", "form": "mooncake", "path": mooncake, "most": 6_000}
    with Workers(specs) as workers:
        hour = workers.together({"load": churn | {"limit": setup.some(1_000_000, 50)}})
        after = workers.together(
            {"load": steady | {"limit": setup.some(700, 20)}, "settle": setup.some(150, 5)}
        )
    return {"churn": hour, "steady": after}


def ranks(setup: Setup, model: str = "llama") -> dict[str, Any]:
    """Two ranks that share a model by tensors: the same tokens, and the same plans on both."""
    options = {
        "max_total_tokens": 65_536,
        "max_running_requests": 32,
        "tp_size": 2,
        "disable_custom_all_reduce": True,
        **_LIMITS,
    }
    load = setup.mixed(requests=64, count=512, spread=200)
    found: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    for number, mode in enumerate(("stock", "default", "chaos", "tenure")):
        spec = MODES[mode] | {
            "model": str(setup.models / model),
            "hash": mode != "stock",
            "sample": 16,
            "options": options | {"nccl_port": 23_456 + number},
        }
        with Workers({f"rank {rank}": spec | {"rank": rank} for rank in (0, 1)}) as workers:
            both = workers.together({"load": load, "outputs": True})
        outputs[mode] = [both[rank].pop("outputs") for rank in ("rank 0", "rank 1")]
        plans = {result["plans"] for result in both.values()}
        found[mode] = {
            "ranks": both,
            "same_as_stock": _same(outputs["stock"][0], outputs[mode][0]),
            "ranks_agree": outputs[mode][0] == outputs[mode][1],
            "plans_equal": len(plans) == 1,
        }
    return {"requests": len(outputs["stock"][0]), "modes": found}


def _specs(
    setup: Setup, model: str, modes: tuple[str, ...], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    path = str(setup.models / model)
    return {name: MODES[name] | {"model": path, "options": _LIMITS | options} for name in modes}


def _compare(
    setup: Setup,
    model: str,
    modes: tuple[str, ...],
    options: Mapping[str, Any],
    load: Mapping[str, Any],
) -> dict[str, Any]:
    specs = _specs(setup, model, modes, options)
    for name, spec in specs.items():
        spec |= {"sample": 16, "oracles": True, "strict": name != "stock" and not setup.small}
    specs["stock again"] = dict(specs["stock"])
    with Workers(specs) as workers:
        results = workers.together({"load": load, "outputs": True})
        states = workers.states
    right = results["stock"]["outputs"]
    for name, result in results.items():
        result["same"] = _same(right, result.pop("outputs"))
        result["started"] = states[name]["state"]
    return {"requests": len(right), "modes": results}


def _noticed(specs: Mapping[str, dict[str, Any]], order: Mapping[str, Any]) -> dict[str, Any]:
    from workers import WorkerError

    with Workers(specs) as workers:
        for worker in workers.by_name.values():
            worker.order(order)
        found = {}
        for name, worker in workers.by_name.items():
            try:
                found[name] = worker.answer()
            except WorkerError as error:
                found[name] = {"error": str(error)[:300]}
    return found


def _same(right: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    return sum(found.get(rid) == tokens for rid, tokens in right.items())


def _against(stock: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    # Same load, same round: the ratio of times is that of throughputs.
    def ratios(of: str) -> list[float]:
        return [round(s[of] / f[of], 4) for s, f in zip(stock, found, strict=True)]

    tail = [
        f["steps_ms"]["all"]["p99"] / s["steps_ms"]["all"]["p99"]
        for s, f in zip(stock, found, strict=True)
    ]
    return {
        "throughput_ratio": round(statistics.median(ratios("seconds")), 4),
        "throughput_ratios": ratios("seconds"),
        "decode_ratio": round(statistics.median(ratios("decode_seconds")), 4),
        "decode_ratios": ratios("decode_seconds"),
        "step_p99_ratio": round(statistics.median(tail), 4),
        "step_ms_p50": found[-1]["steps_ms"]["all"]["p50"],
        "steps_ms": found[-1]["steps_ms"],
        "host_us": found[-1]["host_us"],
        "moved_rows": (found[-1]["state"] or {}).get("moved_rows"),
        "same_tokens": sum(a["hash"] == b["hash"] for a, b in zip(stock, found, strict=True)),
    }


Case = Callable[[Setup], dict[str, Any]]
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "identity-mha": (lambda s: identity(s, "llama"), ("llama",)),
    "identity-mla": (lambda s: identity(s, "mla"), ("mla",)),
    "speculation": (speculation, ("smooth", "eagle")),
    "oversights": (oversights, ("llama",)),
    "throughput-small": (lambda s: throughput(s, "llama"), ("llama",)),
    "throughput-deep": (lambda s: throughput(s, "deep"), ("deep",)),
    "aged": (aged, ("llama",)),
    "ranks-mha": (lambda s: ranks(s, "llama"), ("llama",)),
    "ranks-mla": (lambda s: ranks(s, "mla"), ("mla",)),
}
