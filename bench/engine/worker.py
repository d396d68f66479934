"""One engine in a process of its own: reads orders as JSON lines, answers each with one.

`python worker.py SPEC.json` makes SGLang's real scheduler as the specification says, answers
`{"up": ...}`, and then serves one load for each order until its input ends.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import logging
import os
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from faults import FAULTS
from harness.chaos import disturb
from harness.engine import Engine, generate
from harness.settings import settings
from loads import Ask, load
from plans import Account, recording
from probes import Layout, StepTimer, quantiles

GPU = {
    "device": "cuda",
    "attention_backend": "triton",
    "dtype": "bfloat16",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": False,
    "disable_overlap_schedule": False,
    "disable_prefill_cuda_graph": True,
    "chunked_prefill_size": 4096,
    "context_length": 4096,
    "watchdog_timeout": 600,
}
CPU = {"disable_overlap_schedule": False}


class Worker:
    """An engine and what watches it.

    Args:
        spec: `model`, `options` (server arguments), `plugin` (whether it is loaded), `settings`
            (over its defaults), `chaos` (seed of the random policy), `fault` (what is left out),
            `delay_us` (by which each forward is held up on the device), `strict` (no
            synchronisation in our step), `sample` (iterations between samples of the layout),
            `hash` (keep account of every plan), `rank`.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        device = CPU if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" else GPU
        fault = FAULTS[spec["fault"]] if spec.get("fault") else None
        with ExitStack() as stack:
            stack.enter_context(settings(spec.get("settings", {})))
            plans: list[Account] = []
            how = fault or FAULTS["nothing"]
            # An account waits for the device, which would hide a race.
            if spec.get("hash") or how.meddles:
                plans = stack.enter_context(recording(how.buffers, copies=how.copies))
            options = dict(spec.get("options", {}))
            self.engine = Engine(
                rank=spec.get("rank", 0), model_path=spec["model"], **device | options
            )
        self._plans = plans[0] if plans else None
        self.scheduler = self.engine.scheduler
        self.attachment = getattr(self.scheduler, "kvdefrag", None)
        self._known: dict[str, Any] = {}
        self._times: list[tuple[float, str, bool]] = []
        self._follow_requests()
        if spec.get("delay_us"):
            self._delay(float(spec["delay_us"]))
        if self.attachment is not None and spec.get("chaos") is not None:
            disturb(self.scheduler, self.attachment, int(spec["chaos"]))
        if fault is not None:
            fault.plant(self)
        self._timer = StepTimer(self.attachment, strict=bool(spec.get("strict")))
        self._layout = Layout(self.scheduler, page=64, every=int(spec.get("sample", 0)))

    def serve(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a load and return what came out; `flush` empties the cache before.

        With `settle` the probes start anew once so many requests have arrived.
        """
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        asks, engine = load(order["load"]), self.engine
        self._known.clear()
        self._clear()
        feed = _Feed(asks, self.scheduler, flush=bool(order.get("flush")))
        settle = int(order.get("settle", 0))

        def next_messages(iteration: int) -> Sequence[Any]:
            before = len(feed.wanted)
            found: list[Any] = [FlushCacheReqInput()] if feed.flush_now() else []
            found += [generate(a.rid, a.tokens, a.count) for a in feed.due()]
            if before < settle <= len(feed.wanted):
                self._clear()
            return found

        engine.iteration = 0
        engine.at_top, engine.feed, engine.finished = self._top, next_messages, feed.finished
        begun = time.perf_counter()
        engine.run()
        seconds = time.perf_counter() - begun
        return self._result(feed.wanted, seconds, bool(order.get("outputs")))

    def _clear(self) -> None:
        self._timer.clear()
        self._layout.clear()
        self._times.clear()

    def _top(self, iteration: int) -> None:
        s = self.scheduler
        decoding = not s.waiting_queue and s.chunked_req is None
        self._times.append((time.perf_counter(), self._timer.latest, decoding))
        self._layout.look(iteration)

    def _follow_requests(self) -> None:
        s = self.scheduler
        original = s.process_input_requests

        def followed(messages: Any) -> Any:
            found = original(messages)
            self._known.update({r.rid: r for r in s.waiting_queue})
            return found

        s.process_input_requests = followed

    def _delay(self, microseconds: float) -> None:
        worker = self.scheduler.model_worker
        forward = worker.forward_batch_generation
        cycles = int(microseconds * 1_500)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda._sleep(cycles)
            return forward(*args, **kwargs)

        worker.forward_batch_generation = delayed

    def _result(self, wanted: Mapping[str, int], seconds: float, outputs: bool) -> dict[str, Any]:
        s = self.scheduler
        # A verify step may run past the last token; what is sent out is cut.
        out = {rid: list(r.output_ids)[: wanted[rid]] for rid, r in self._known.items()}
        allocator, tree = s.token_to_kv_pool_allocator, s.tree_cache
        tokens = sum(map(len, out.values()))
        accepted = sum(getattr(r, "spec_verify_ct", 0) for r in self._known.values())
        found: dict[str, Any] = {
            "seconds": round(seconds, 4),
            "requests": len(out),
            "tokens": tokens,
            "iterations": self.engine.iteration,
            "hash": hashlib.sha256(json.dumps(sorted(out.items())).encode()).hexdigest()[:16],
            "left": allocator.size - allocator.available_size() - tree.evictable_size(),
            "retractions": sum(r.retraction_count for r in self._known.values()),
            "cached": sum(getattr(r, "cached_tokens", 0) for r in self._known.values()),
            "tokens_per_verify": round(tokens / accepted, 3) if accepted else None,
            "decode_seconds": round(sum(_decode_intervals(self._times)) / 1e3, 4),
            "steps_ms": _intervals(self._times),
            "host_us": self._timer.result(),
            "layout": self._layout.result(),
            "attention": _attention(self.scheduler),
            "state": self.attachment.state() if self.attachment is not None else None,
            "plans": self._plans.hash.hexdigest()[:16] if self._plans else None,
            "moved": self._plans.rows if self._plans else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
        if outputs:
            found["outputs"] = out
        return found


class _Feed:
    def __init__(self, asks: Iterator[Ask], scheduler: Any, *, flush: bool) -> None:
        self._asks, self._scheduler, self._flush = asks, scheduler, flush
        self._next = next(asks, None)
        self._iteration = 0
        self.wanted: dict[str, int] = {}

    def flush_now(self) -> bool:
        flush, self._flush = self._flush, False
        return flush

    def due(self) -> list[Ask]:
        self._iteration += 1
        found: list[Ask] = []
        while self._next is not None and self._arrives(self._next, len(found)):
            found.append(self._next)
            self.wanted[self._next.rid] = self._next.count
            self._next = next(self._asks, None)
        return found

    def finished(self) -> bool:
        return self._next is None

    def _arrives(self, ask: Ask, already: int) -> bool:
        if ask.at:
            return ask.at <= self._iteration
        # As fast as the engine takes them.
        return len(self._scheduler.waiting_queue) + already < 4


def _decode_intervals(times: list[tuple[float, str, bool]]) -> list[float]:
    return [(b - a) * 1e3 for (a, _, x), (b, _, y) in itertools.pairwise(times) if x and y]


def _intervals(times: list[tuple[float, str, bool]]) -> dict[str, dict[str, float]]:
    # Time between two decode steps, by what our step between them did.
    kinds: dict[str, list[float]] = {}
    for (a, _, first), (b, kind, second) in itertools.pairwise(times):
        if first and second:
            kinds.setdefault(kind, []).append((b - a) * 1e3)
            kinds.setdefault("all", []).append((b - a) * 1e3)
    return {kind: quantiles(values) for kind, values in kinds.items()}


def _attention(scheduler: Any) -> list[Any]:
    # Who served the layers; empty where the backend is stock's.
    from kvdefrag.sglang.attention_hooks import backends_of

    return [backend.kvdefrag_state() for backend in backends_of(scheduler)]


def _do_without_deep_gemm() -> None:
    # Draft workers name these two classes while they capture graphs; where the package that both
    # modules import is not installed, nobody could use them anyway.
    if importlib.util.find_spec("deep_gemm") is not None:
        return
    for module, name in (
        ("dsa_backend", "DeepseekSparseAttnBackend"),
        ("deepseek_v4_backend", "DeepseekV4AttnBackend"),
    ):
        stand_in = types.ModuleType(module)
        setattr(stand_in, name, type(name, (), {}))
        sys.modules[f"sglang.srt.layers.attention.{module}"] = stand_in


def main(spec_path: str) -> None:
    """Answer orders until the input ends."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    # Only answers go where the answers are read; whatever else prints, prints to the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(found: Mapping[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    with open(spec_path, encoding="utf-8") as file:
        spec = json.load(file)
    try:
        if spec.get("plugin", True):
            from sglang.srt.plugins import load_plugins

            load_plugins()
        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
            from harness import patches

            patches.apply()
        _do_without_deep_gemm()
        begun = time.perf_counter()
        worker = Worker(spec)
        state = worker.attachment.describe() if worker.attachment is not None else None
        answer({"up": round(time.perf_counter() - begun, 1), "state": state})
        for line in sys.stdin:
            with torch.inference_mode():
                answer(worker.serve(json.loads(line)))
    except BaseException as error:
        answer({"error": f"{type(error).__name__}: {error}"[:500]})
        traceback.print_exc()
    answers.flush()
    sys.stderr.flush()
    # Threads of the scheduler are still there.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
