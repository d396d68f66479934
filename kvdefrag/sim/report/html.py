"""The result as one HTML file that needs no network: tables, verdict, charts and pool maps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path

from kvdefrag.errors import ConfigError
from kvdefrag.sim.metric import Metric
from kvdefrag.sim.metrics import METRICS
from kvdefrag.sim.report import payload
from kvdefrag.sim.report.table import BOUND, best_arms
from kvdefrag.sim.results import ArmResult, RunResult

_SCRIPTS = ("charts.js", "pool_map.js", "main.js")


def write_html(result: RunResult, path: Path) -> None:
    """Write the report; equal results give equal bytes.

    Raises ConfigError if plotly, which the extra `report` brings, is not installed.
    """
    path.write_text(render(result), encoding="utf-8")


def render(result: RunResult) -> str:
    """Make the whole document as text."""
    name = str(result.trace.get("name", "trace"))
    parts = {
        "title": escape(f"kvdefrag: {name}"),
        "trace": escape(name),
        "style": _asset("report.css"),
        "about": _facts(result.trace),
        "warnings": _sentences(result.warnings, "warnings"),
        "verdict": _sentences(result.verdict, "verdict"),
        "summary": _table(result.arms, [m for m in METRICS if m.decisive], "Decisive metrics"),
        "details": _table(result.arms, [m for m in METRICS if not m.decisive], "Other metrics"),
        "arms": _definitions((arm.name, arm.description) for arm in result.arms),
        "options": _facts(result.options),
        "versions": _facts(result.versions),
        "metrics": _definitions((m.title, f"{m.definition} [{m.name}]") for m in METRICS),
        "data": payload.embed_json(payload.describe(result)),
        "maps": payload.pack(payload.map_bytes(result)),
        "plotly": payload.pack(_plotly().encode()),
        "script": "\n".join(_asset(script) for script in _SCRIPTS),
    }
    # One pass, so that braces inside a value are never taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            "the HTML report needs plotly, which is not installed: pip install 'kvdefrag[report]'"
        ) from error
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    folder = resources.files("kvdefrag.sim.report") / "assets"
    return (folder / name).read_text(encoding="utf-8")


def _sentences(sentences: Iterable[str], kind: str) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _facts(facts: Mapping[str, object]) -> str:
    rows = (f"<tr><th scope=row>{escape(key)}<td>{_fact(facts[key])}" for key in facts)
    return f'<table class="facts">{"".join(rows)}</table>'


def _fact(value: object) -> str:
    if value is None:
        return '<span class="none">not set</span>'
    return f"<code>{escape(str(value).lower() if isinstance(value, bool) else str(value))}</code>"


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    rows = (f"<dt>{escape(term)}<dd>{escape(text)}" for term, text in pairs)
    return f"<dl>{''.join(rows)}</dl>"


def _table(arms: tuple[ArmResult, ...], metrics: list[Metric], caption: str) -> str:
    head = "".join(
        f'<th scope=col title="{escape(m.definition)}">{escape(m.title)}' for m in metrics
    )
    best = [best_arms(arms, metric) for metric in metrics]
    rows = []
    for arm in arms:
        kind = ' class="bound"' if arm.name == BOUND else ""
        cells = "".join(
            f"<td{' class=best' if arm.name in winners else ''}>"
            f"{escape(metric.text(arm.metrics.get(metric.name)))}"
            for metric, winners in zip(metrics, best, strict=True)
        )
        title = escape(arm.description)
        rows.append(f'<tr{kind}><th scope=row title="{title}">{escape(arm.name)}{cells}')
    return (
        f'<div class="scroll"><table class="arms"><caption>{escape(caption)}</caption>'
        f"<thead><tr><th scope=col>arm{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
