"""Make `docs/metrics.md` and `docs/simulate.schema.json`: `python -m kvdefrag.sim.report.docs`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvdefrag.metrics.prometheus import COUNTERS, GAUGES
from kvdefrag.sim.metric import Metric
from kvdefrag.sim.metrics import METRICS
from kvdefrag.sim.report.json_out import SERIES, schema

_INTRO = """\
<!-- Made by `python -m kvdefrag.sim.report.docs`; change kvdefrag/sim/metrics.py and
kvdefrag/metrics/prometheus.py instead. -->

# Metrics of `kvdefrag simulate`

Words. A *slot* is a row index into every layer's KV buffer (1 to the pool size). A *run* is a
longest stretch of a request's tokens whose slots rise by exactly 1. An *aligned page* of P slots
(64 unless `--page` says otherwise) is slots kP to (k+1)P-1; page 0, which holds the sink slot, and
a partial last page do not count. *Page coverage* is the share of a request's tokens that fill
aligned pages in token order. A *whole free page* has all P slots free. *Live* slots are read by
running requests, *cached* slots are held by the prefix cache alone, *reserved* slots are held in a
request's row ahead of need.

Layout is counted on the real allocator. Times and tokens/s are modelled from the cost profile
(`--profile`), which says what in it is measured and what is assumed.
"""

_SCALARS = """
## Scalars per arm

`arms[].metrics` in the JSON output; `null` where a value cannot be given. Shares are from 0 to 1
there and in percent in tables. Columns in bold are in the first table, the others come with
`--wide`.
"""

_SERIES = """
## Series per arm

`arms[].series` in the JSON output: equally long lists over sampled steps.

| name | definition |
|---|---|
"""

_LIVE = """
# Metrics of a live server

Exported at SGLang's `/metrics` when the server runs with `--enable-metrics` and
`observe.prometheus` is on, by the ranks that export SGLang's own and with the same labels. They are
brought up to date every `observe.log_interval` steps; the layout is measured then, over the tokens
that the running requests have committed, and on a GPU told one interval later.

Share of a second that kvdefrag takes from the scheduler: `rate(kvdefrag:step_seconds_total[1m])`.
Mean run: `kvdefrag:tokens / kvdefrag:runs`. Bytes copied per second, read and written each:
`sum(rate(kvdefrag:moved_bytes_total[1m]))`.

| name | type | own label | definition |
|---|---|---|---|
"""


def metrics_markdown() -> str:
    """Write the page that defines every metric and series."""
    rows = "\n".join(_row(metric) for metric in METRICS)
    series = "\n".join(f"| `{name}` | {text} |" for name, text in SERIES.items())
    head = "\n| name | column | unit | better | definition |\n|---|---|---|---|---|\n"
    return f"{_INTRO}{_SCALARS}{head}{rows}\n{_SERIES}{series}\n{_LIVE}{_live_rows()}\n"


def schema_json() -> str:
    """Write the JSON Schema of the `--json` output."""
    return json.dumps(schema(), indent=2) + "\n"


def write_docs(folder: Path) -> None:
    """Write both files into a folder that exists."""
    (folder / "metrics.md").write_text(metrics_markdown(), encoding="utf-8")
    (folder / "simulate.schema.json").write_text(schema_json(), encoding="utf-8")


def _live_rows() -> str:
    counters = [("counter", f"{name}_total", found) for name, found in COUNTERS.items()]
    gauges = [("gauge", name, found) for name, found in GAUGES.items()]
    return "\n".join(
        f"| `kvdefrag:{name}` | {kind} | {found.label} | {found.text} |"
        for kind, name, found in (*counters, *gauges)
    )


def _row(metric: Metric) -> str:
    title = f"**{metric.title}**" if metric.decisive else metric.title
    return (
        f"| `{metric.name}` | {title} | {metric.unit} | {metric.better.value} "
        f"| {metric.definition} |"
    )


if __name__ == "__main__":
    write_docs(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
