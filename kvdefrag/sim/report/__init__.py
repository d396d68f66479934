"""What a user sees of a simulation: tables, verdict, JSON, HTML and Chrome trace."""

from kvdefrag.sim.report.chrome_trace import write_chrome_trace
from kvdefrag.sim.report.html import write_html
from kvdefrag.sim.report.json_out import write_json
from kvdefrag.sim.report.table import print_result
from kvdefrag.sim.report.verdict import verdict_of, warnings_of

__all__ = [
    "print_result",
    "verdict_of",
    "warnings_of",
    "write_chrome_trace",
    "write_html",
    "write_json",
]
