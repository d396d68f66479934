"""The scalars that one arm of a simulation reports: the one place where each is defined.

The table, the JSON output, the HTML report and `docs/metrics.md` are all made from `METRICS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvdefrag.sim.metric import Better, Metric, Show


def get(name: str) -> Metric:
    """Look up a metric by name; raises KeyError for a name that is not in the list."""
    return _BY_NAME[name]


def value(metrics: Mapping[str, float], name: str) -> float | None:
    """Take a documented metric out of an arm's scalars; None if absent or not finite."""
    found = metrics.get(get(name).name)
    return found if found is not None and math.isfinite(found) else None


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Keep what two runs with the same inputs must agree on: everything but wall time."""
    return {k: v for k, v in metrics.items() if k not in _BY_NAME or _BY_NAME[k].repeatable}


def undocumented(names: Iterable[str]) -> list[str]:
    """Name the scalars that `METRICS` does not define, sorted."""
    return sorted(set(names) - _BY_NAME.keys())


def _share(
    name: str,
    title: str,
    definition: str,
    better: Better = Better.NEITHER,
    *,
    decisive: bool = False,
) -> Metric:
    return Metric(name, "share", title, definition, Show.PERCENT, better, decisive=decisive)


METRICS: tuple[Metric, ...] = (
    _share(
        "page_coverage_mean",
        "coverage %",
        "Tokens of running requests that fill aligned pages of P slots in token order, divided by "
        "all tokens of running requests (so long requests weigh more), averaged over simulated "
        "time.",
        Better.HIGHER,
        decisive=True,
    ),
    _share(
        "page_coverage_p10",
        "coverage p10 %",
        "10th percentile over simulated time of the token-weighted page coverage: nine tenths of "
        "the time coverage is at least this.",
        Better.HIGHER,
        decisive=True,
    ),
    _share(
        "page_coverage_request_mean",
        "per request %",
        "Page coverage of each running request by itself, averaged over requests and then over "
        "simulated time; a perfect packing is below 1, since every request ends in a partly used "
        "page.",
        Better.HIGHER,
    ),
    _share(
        "page_coverage_request_p10",
        "per request p10 %",
        "10th percentile of the page coverage of single requests, over all samples of all running "
        "requests.",
        Better.HIGHER,
        decisive=True,
    ),
    _share(
        "prefix_hit_rate",
        "prefix hits %",
        "Input tokens found in the prefix cache at admission, divided by the input tokens of all "
        "admitted requests.",
        Better.HIGHER,
    ),
    _share(
        "reserved_share",
        "reserved %",
        "Slots held in a request's row beyond its allocated length, divided by the pool size, "
        "averaged over simulated time.",
        Better.LOWER,
        decisive=True,
    ),
    Metric(
        "mean_run",
        "slots",
        "mean run",
        "Tokens of running requests divided by their runs, averaged over simulated time; a run is "
        "a longest stretch of tokens whose slots rise by exactly 1.",
        Show.DECIMAL,
        Better.HIGHER,
        decisive=True,
    ),
    Metric(
        "runs_per_4096",
        "runs",
        "runs per 4,096",
        "4,096 times the runs of running requests divided by their tokens, averaged over "
        "simulated time.",
        Show.DECIMAL,
        Better.LOWER,
    ),
    _share(
        "decode_coverage",
        "decode coverage %",
        "Decoded tokens of running requests that lie in aligned pages, divided by all decoded "
        "tokens of running requests, averaged over simulated time.",
        Better.HIGHER,
    ),
    _share(
        "whole_free_share",
        "whole-free %",
        "Free slots that lie in pages with all P slots free, divided by all free slots, averaged "
        "over simulated time.",
        Better.HIGHER,
    ),
    _share(
        "utilization_mean",
        "used %",
        "Slots that hold tokens (live plus cached) divided by the pool size, averaged over "
        "simulated time; reserved slots do not count.",
        decisive=True,
    ),
    _share(
        "live_utilization_mean",
        "live %",
        "Slots that running requests read, each counted once however many share it, divided by "
        "the pool size, averaged over simulated time.",
    ),
    _share(
        "cached_utilization_mean",
        "cached %",
        "Slots that only the prefix cache holds (they can be evicted), divided by the pool size, "
        "averaged over simulated time.",
    ),
    _share(
        "peak_utilization",
        "peak used %",
        "Highest share of the pool that held tokens (live plus cached) at any sample.",
    ),
    Metric(
        "largest_free_run",
        "slots",
        "largest free run",
        "Longest stretch of neighbouring free slots, averaged over simulated time.",
        Show.COUNT,
        Better.HIGHER,
    ),
    Metric(
        "moved_rows_per_decoded_token",
        "rows per token",
        "moved / token",
        "Rows (one slot in every layer) copied by relocation divided by decoded tokens.",
        Show.FINE,
        Better.LOWER,
        decisive=True,
    ),
    Metric(
        "bytes_moved",
        "bytes",
        "bytes moved",
        "Payload of all copied rows over all layers, counted once (a copy reads and writes as "
        "much each).",
        Show.BYTES,
        Better.LOWER,
    ),
    _share(
        "relocation_time_share",
        "relocation time %",
        "Modelled time of all copies divided by the modelled time of all steps.",
        Better.LOWER,
    ),
    Metric(
        "requests_finished",
        "requests",
        "finished",
        "Requests that produced all their output tokens.",
        Show.COUNT,
    ),
    Metric(
        "requests_rejected",
        "requests",
        "rejected",
        "Requests refused at arrival because input plus output cannot fit the pool.",
        Show.COUNT,
        Better.LOWER,
    ),
    Metric(
        "retractions",
        "times",
        "retractions",
        "Times a running request was put back into the queue because decode could not allocate.",
        Show.COUNT,
        Better.LOWER,
    ),
    Metric(
        "descriptors_per_request",
        "descriptors",
        "descriptors / request",
        "Transfer descriptors (one per run) that sending one running request's tokens of one "
        "layer needs, averaged over requests and simulated time.",
        Show.DECIMAL,
        Better.LOWER,
    ),
    Metric(
        "attention_us_stock",
        "us",
        "attention us stock",
        "Modelled attention time of all layers per decode step under the stock token-level "
        "kernel, by the cost profile, averaged over decode steps.",
        Show.COUNT,
        Better.LOWER,
    ),
    Metric(
        "attention_us_paged",
        "us",
        "attention us paged",
        "Modelled attention time of all layers per decode step under a kernel that reads aligned "
        "pages as blocks and the other slots one by one, by the cost profile, averaged over "
        "decode steps.",
        Show.COUNT,
        Better.LOWER,
    ),
    Metric(
        "modelled_tokens_per_second",
        "tokens/s",
        "tokens/s stock",
        "Decoded tokens divided by the modelled time of all steps, copies included, under the "
        "stock token-level kernel.",
        Show.COUNT,
        Better.HIGHER,
        decisive=True,
    ),
    Metric(
        "modelled_tokens_per_second_paged",
        "tokens/s",
        "tokens/s paged",
        "The same for the same steps with attention charged at the paged kernel's modelled time.",
        Show.COUNT,
        Better.HIGHER,
        decisive=True,
    ),
    Metric("steps", "steps", "steps", "Scheduler steps that ran a batch.", Show.COUNT),
    Metric(
        "decode_tokens",
        "tokens",
        "decoded tokens",
        "Tokens produced by decode steps, accepted ones only under speculation.",
        Show.COUNT,
    ),
    Metric(
        "simulated_s",
        "s",
        "simulated s",
        "Simulated time from the first arrival to the end of the last step.",
        Show.DECIMAL,
    ),
    Metric(
        "wall_s",
        "s",
        "wall s",
        "Time the simulator itself took for this arm on this machine; differs between equal runs.",
        Show.DECIMAL,
        repeatable=False,
    ),
)

_BY_NAME = {metric.name: metric for metric in METRICS}
