"""What `kvdefrag top` shows of a server: one glance, as lines of text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BAR = 40
_LISTED = 4
_SERVED = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:gen_throughput": "tokens/s",
}


@dataclass(frozen=True)
class Glance:
    """A server's states at one moment.

    Attributes:
        at: Seconds, of a clock that never goes back.
        states: One for each data-parallel rank.
        served: Of SGLang's own metrics those that are shown; empty where they are off.
    """

    at: float
    states: Sequence[Mapping[str, Any]]
    served: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def now(cls, states: Sequence[Mapping[str, Any]], served: Mapping[str, float]) -> Glance:
        """Return what was found as of now."""
        return cls(time.monotonic(), states, served)


def served(exported: str) -> dict[str, float]:
    """Return the metrics that are shown from the text of `/metrics`, summed over their labels."""
    found: dict[str, float] = {}
    for line in exported.splitlines():
        name, _, rest = line.partition("{")
        if name in _SERVED:
            value = float(rest.rpartition(" ")[2])
            found[_SERVED[name]] = found.get(_SERVED[name], 0.0) + value
    return found


def lines_of(url: str, now: Glance, before: Glance | None) -> list[str]:
    """Return the view.

    Args:
        url: The server.
        now: How it stands.
        before: How it stood some time ago, for rates; None without.
    """
    requests = ", ".join(f"{value:,.0f} {name}" for name, value in now.served.items())
    lines = [f"kvdefrag at {url}" + (f": {requests}" if requests else "")]
    for rank, state in enumerate(now.states):
        lines.append("")
        if len(now.states) > 1:
            lines.append(f"data-parallel rank {rank}")
        old = before.states[rank] if before and rank < len(before.states) else None
        elapsed = now.at - before.at if before else 0.0
        lines += _rank(state, old, elapsed)
    return lines


def _rank(state: Mapping[str, Any], old: Mapping[str, Any] | None, elapsed: float) -> Iterator[str]:
    if not state.get("active"):
        why = state.get("error") or state.get("refused") or "unknown"
        yield f"not active       {why}"
        return
    control = state.get("control")
    paused = ", paused" if control and control.get("paused") else ""
    yield f"active           {state.get('description', '')}{paused}"
    yield f"pool             {_pool(state)}"
    yield f"                 {_bar(state)}"
    yield f"page coverage    {_share(state.get('coverage'))}{_layout(state)}"
    yield f"whole free pages {_count(state.get('whole_free_pages'))} of {_pages(state):,}"
    yield f"moved            {_moved(state, old, elapsed)}"
    yield f"steps            {_rate(state, old, 'steps', elapsed)}{_host_time(state, old)}"
    yield f"now              {state.get('reason')}, back-off {state.get('backoff_steps', 0)} steps"
    yield f"skipped          {_most(state.get('skips'))}"
    yield f"gates closed     {_most(state.get('gates_closed'))}"
    yield f"errors           {state.get('error') or 'none'}"


def _pool(state: Mapping[str, Any]) -> str:
    size, free = int(state.get("size", 0)), int(state.get("available", 0))
    held = int(state.get("reserved_slots", 0))
    used = size - free - held
    return f"{size:,} slots: {used:,} hold tokens, {held:,} reserved, {free:,} free"


def _bar(state: Mapping[str, Any]) -> str:
    size, free = int(state.get("size", 0)), int(state.get("available", 0))
    if not size:
        return ""
    # Whole free pages apart from the other free slots: that is what is worth seeing.
    whole = min(free, int(state.get("whole_free_pages") or 0) * int(state.get("page", 64)))
    held = int(state.get("reserved_slots", 0))
    parts = (size - free - held, held, free - whole, whole)
    ends = [round(_BAR * sum(parts[: i + 1]) / size) for i in range(4)]
    widths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return (
        "[" + "".join(mark * width for mark, width in zip("#+.=", widths, strict=True)) + "]"
        "  # tokens  + reserved  . free in pieces  = whole free pages"
    )


def _layout(state: Mapping[str, Any]) -> str:
    tokens, runs = int(state.get("tokens") or 0), int(state.get("runs") or 0)
    if not tokens:
        return "  (nobody has run since the last measurement)"
    return f"  {tokens:,} tokens in {runs:,} runs, {tokens / max(runs, 1):,.1f} to a run"


def _moved(state: Mapping[str, Any], old: Mapping[str, Any] | None, elapsed: float) -> str:
    by = ", ".join(f"{name} {rows:,}" for name, rows in (state.get("moved_by") or {}).items())
    rows = _rate(state, old, "moved_rows", elapsed)
    size = _rate(state, old, "moved_bytes", elapsed)
    return f"{rows} rows, {size} bytes" + (f" ({by})" if by else "")


def _rate(
    state: Mapping[str, Any], old: Mapping[str, Any] | None, name: str, elapsed: float
) -> str:
    total = int(state.get(name, 0))
    if old is None or elapsed <= 0:
        return f"{total:,}"
    return f"{total:,} (+{(total - int(old.get(name, 0))) / elapsed:,.0f}/s)"


def _host_time(state: Mapping[str, Any], old: Mapping[str, Any] | None) -> str:
    begin = old or {}
    steps = int(state.get("steps", 0)) - int(begin.get("steps", 0))
    seconds = float(state.get("seconds", 0)) - float(begin.get("seconds", 0))
    return f", {1e6 * seconds / steps:,.1f} us of host time each" if steps > 0 else ""


def _most(counts: Mapping[str, int] | None) -> str:
    ordered = sorted((counts or {}).items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{name} {count:,}" for name, count in ordered[:_LISTED]) or "never"


def _pages(state: Mapping[str, Any]) -> int:
    return (int(state.get("size", 0)) + 1) // int(state.get("page", 64)) - 1


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
