"""Ranks policies by what they make of a recording, and writes settings for the one to use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvdefrag.config import Config
from kvdefrag.core.host_event_log import EventLog
from kvdefrag.errors import TraceError
from kvdefrag.sim.arms import NAMES, Arm, choose
from kvdefrag.sim.metrics import value
from kvdefrag.sim.replay import replay
from kvdefrag.sim.results import RunResult

# An arm that is worse by less than this is as good, if it is cheaper.
SAME_POINTS = 1.0


@dataclass(frozen=True)
class Ranked:
    """One policy on a recording.

    Attributes:
        name: The arm.
        coverage, p10: Page coverage in percent: mean, and 10th percentile over time.
        reserved: Slots held ahead of need, in percent of the pool.
        moved: Rows copied for each decoded token.
        gain: Modelled tokens/s over stock with a kernel that reads pages, in percent.
    """

    name: str
    coverage: float
    p10: float
    reserved: float
    moved: float
    gain: float | None


@dataclass(frozen=True)
class Advice:
    """What a recording says.

    Attributes:
        ranked: Best coverage first.
        chosen: The arm to use: the cheapest of those that are about as good as the best.
        reason: Why, in one sentence.
        settings: Content of a settings file for it.
        warnings: What to keep in mind.
    """

    ranked: tuple[Ranked, ...]
    chosen: str
    reason: str
    settings: str
    warnings: tuple[str, ...]


def advise(
    path: Path,
    *,
    files: Sequence[Path] = (),
    profile: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Advice:
    """Replay a recording under every policy but the bound, and compare them.

    Args:
        path: The recording.
        files: Settings files to try beside the built-in arms.
        profile: Prices of the GPU.
        progress: Called with the bytes of text that have been read.

    Raises:
        TraceError: It cannot be read, or is too short to say anything.
    """
    log = EventLog(path)
    names = [name for name in NAMES if name != "packed"]
    arms = choose(names, files, page=log.header.page)
    result = replay(log, arms, path=path, profile=profile, progress=progress)
    return judge(result, arms)


def judge(result: RunResult, arms: Sequence[Arm]) -> Advice:
    """Compare the arms of a result; `arms` are in the order of their cost.

    Raises:
        TraceError: Nothing was measured.
    """
    found = {arm.name: _ranked(result, arm.name) for arm in result.arms}
    known = [ranked for ranked in found.values() if ranked is not None]
    if not known or not any(len(arm.series["time_s"]) for arm in result.arms):
        raise TraceError("the recording is too short: no decode step was sampled")
    ranked = sorted(known, key=lambda r: -r.coverage)
    best = ranked[0]
    good = {r.name for r in known if r.coverage >= best.coverage - SAME_POINTS}
    chosen = next(arm for arm in arms if arm.name in good)
    return Advice(
        tuple(ranked),
        chosen.name,
        _reason(found[chosen.name] or best, best, found.get("stock")),
        settings_for(chosen),
        result.warnings,
    )


def settings_for(arm: Arm) -> str:
    """Return a settings file under which a server does what an arm did."""
    head = f"# kvdefrag advise: the policy {arm.name!r}.\n"
    if arm.name == "stock":
        return (
            head + "# Nothing is to be gained on this load: the plugin stays off.\nenabled: false\n"
        )
    update: dict[str, Any] = {"enabled": True}
    if arm.name in NAMES:
        # What serves a comparison and not a server: no checks, and copies without a bound.
        rules, default = arm.config.relocation, Config()
        bounds = ("bytes_per_step", "duty_bytes_per_step")
        usual = {name: getattr(default.relocation, name) for name in bounds}
        update["relocation"] = rules.model_copy(update=usual)
        checks = default.placement.checks
        update["placement"] = arm.config.placement.model_copy(update={"checks": checks})
    config = arm.config.model_copy(update=update)
    changed = _changed(Config().model_dump(mode="json"), config.model_dump(mode="json"))
    return head + str(yaml.safe_dump(changed, sort_keys=False))


def _reason(chosen: Ranked, best: Ranked, stock: Ranked | None) -> str:
    text = f"{chosen.name}: page coverage {chosen.coverage:.1f} %"
    if stock is not None and stock.name != chosen.name:
        text += f" where stock has {stock.coverage:.1f} %"
    if best.name != chosen.name:
        text += f"; {best.name} has {best.coverage:.1f} % and costs more"
    if chosen.name == "stock":
        text += "; nothing is to be gained on this load"
    return text


def _ranked(result: RunResult, name: str) -> Ranked | None:
    metrics = {arm.name: arm.metrics for arm in result.arms}
    own = metrics[name]
    coverage, p10 = value(own, "page_coverage_mean"), value(own, "page_coverage_p10")
    if coverage is None:
        return None
    fast = "modelled_tokens_per_second_paged"
    base, speed = value(metrics.get("stock", {}), fast), value(own, fast)
    return Ranked(
        name,
        100 * coverage,
        100 * (p10 or 0.0),
        100 * (value(own, "reserved_share") or 0.0),
        value(own, "moved_rows_per_decoded_token") or 0.0,
        100 * (speed / base - 1) if base and speed else None,
    )


def _changed(default: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, content in now.items():
        if isinstance(content, dict):
            inner = _changed(default[key], content)
            if inner:
                found[key] = inner
        elif content != default[key]:
            found[key] = content
    return found
