"""Read request traces: Mooncake, Azure, Vidur, and plain CSV or JSONL with declared columns."""

from kvdefrag.sim.readers.formats import FORMATS, Columns
from kvdefrag.sim.readers.request import TraceRequest
from kvdefrag.sim.readers.selection import Selection, parse_window
from kvdefrag.sim.readers.source import TraceSource, open_trace
from kvdefrag.sim.readers.times import UNITS

__all__ = [
    "FORMATS",
    "UNITS",
    "Columns",
    "Selection",
    "TraceRequest",
    "TraceSource",
    "open_trace",
    "parse_window",
]
