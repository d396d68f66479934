"""Choose a part of a trace and change its pace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvdefrag.errors import ConfigError
from kvdefrag.sim.readers.request import NANOSECONDS, TraceRequest


@dataclass(frozen=True)
class Selection:
    """What part of a trace to run, and how fast.

    The window is cut first, then `start` requests of what is left are skipped and at most `limit`
    are taken. Arrivals count from the first request taken and are divided by `rate_scale`.

    Attributes:
        start: Requests to skip.
        limit: Requests to take at most; None for all.
        window: Half-open interval of seconds since the trace's first arrival; the end may be inf.
        rate_scale: Factor on the arrival rate: 2 makes requests come twice as fast.
    """

    start: int = 0
    limit: int | None = None
    window: tuple[float, float] | None = None
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ConfigError(f"--start {self.start} must be at least 0")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit} must be at least 1")
        if not (math.isfinite(self.rate_scale) and self.rate_scale > 0):
            raise ConfigError(f"--rate-scale {self.rate_scale} must be finite and above 0")
        if self.window is not None and not 0 <= self.window[0] < self.window[1]:
            begin, end = self.window
            raise ConfigError(f"--window {begin}:{end} must have 0 <= begin < end")

    def apply(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Yield the chosen requests, renumbered from 0; reads no further than it must.

        Args:
            requests: In order of arrival, as a TraceSource gives them.
        """
        stop = None if self.limit is None else self.start + self.limit
        origin_ns = 0
        for index, request in enumerate(islice(self._in_window(requests), self.start, stop)):
            # Whole nanoseconds, since a difference of two floats would not repeat the trace's gap.
            arrival_ns = round(request.arrival_s * NANOSECONDS)
            if index == 0:
                origin_ns = arrival_ns
            yield TraceRequest(
                index=index,
                arrival_s=(arrival_ns - origin_ns) / NANOSECONDS / self.rate_scale,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                blocks=request.blocks,
                row=request.row,
            )

    def _in_window(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        begin, end = self.window or (0.0, math.inf)
        for request in requests:
            if request.arrival_s >= end:
                return
            if request.arrival_s >= begin:
                yield request


def parse_window(text: str) -> tuple[float, float]:
    """Read `A:B` in seconds; an end left out is open (`600:`, `:600`).

    Raises:
        ConfigError: Not two numbers with a colon between.
    """
    begin, colon, end = text.partition(":")
    try:
        window = float(begin or 0), float(end or math.inf)
    except ValueError:
        colon = ""
    if not colon:
        raise ConfigError(f"--window {text!r} must be A:B in seconds, for example 600:1200")
    return window
