"""What a run is asked to do, in plain picklable values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.readers import Columns, Selection, TraceSource, open_trace


@dataclass(frozen=True)
class TraceOptions:
    """Which trace, and which part of it; see `open_trace` and `Selection`."""

    path: Path | None = None
    format: str = "mooncake"
    block: int = 512
    columns: Columns | None = None
    unit: str | None = None
    selection: Selection = field(default=Selection())

    def open(self) -> TraceSource:
        """Check the trace and return it."""
        return open_trace(
            self.path, self.format, block=self.block, columns=self.columns, unit=self.unit
        )


@dataclass(frozen=True)
class RunOptions:
    """Everything that shapes the numbers of a run, but its arms.

    Attributes:
        trace: The requests.
        engine: Sizes and limits of the engine model.
        prefix_jitter: Tokens by which shared prefixes end off block boundaries, at most.
        profile: Device profile; None for the shipped one.
        seed: Seed of the accepted lengths and of the jitter.
        sample_every: Decode steps between samples.
        slices: Record every step for a Chrome trace.
        record: Write the arm's allocator events here; of one arm only.
    """

    trace: TraceOptions
    engine: EngineOptions
    prefix_jitter: int = 0
    profile: Path | None = None
    seed: int = 0
    sample_every: int = 16
    slices: bool = False
    record: Path | None = None

    def as_dict(self) -> dict[str, str | int | float | bool | None]:
        """Return the options as the report shows them."""
        selection = self.trace.selection
        window = selection.window
        return {
            **asdict(self.engine),
            "start": selection.start,
            "limit": selection.limit,
            "window": None if window is None else f"{window[0]:g}:{window[1]:g}",
            "rate_scale": selection.rate_scale,
            "block": self.trace.block,
            "prefix_jitter": self.prefix_jitter,
            "profile": None if self.profile is None else str(self.profile),
            "seed": self.seed,
            "sample_every": self.sample_every,
        }
