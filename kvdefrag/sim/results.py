"""What one simulation run says: the plain records that every report is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PoolMap:
    """The pool at one moment, `slots_per_cell` neighbouring slots to a cell.

    Attributes:
        time_s: Simulated time in seconds.
        owners: uint16 [cells], cell i for slots `[i * slots_per_cell, (i + 1) * slots_per_cell)`,
            slot 0 being the sink; 0 free, 1 cached in the prefix tree and unused, 2 reserved
            ahead of need, 3 shared by several running requests, 4 + (row - 1) private to the
            request in table row `row`. A mixed cell shows its most frequent owner, ties to the
            lower number.
    """

    time_s: float
    owners: npt.NDArray[np.uint16]
    slots_per_cell: int


@dataclass(frozen=True)
class Slice:
    """One scheduler step for the Chrome trace; times in microseconds of simulated time."""

    name: str
    start_us: float
    duration_us: float
    args: dict[str, float]


@dataclass(frozen=True)
class ArmResult:
    """What one arm (one policy over the same arrivals) did.

    Attributes:
        name: Name of the arm, for example `placement+reservation`.
        description: One sentence: what this arm does that the one before it does not.
        metrics: Scalars by name; names and definitions in `kvdefrag.sim.metrics`.
        series: Equally long float64 arrays over sampled steps; always holds `time_s`, `step`,
            `coverage`, `mean_run`, `whole_free_share`, `utilization`, `live_share`,
            `cached_share`, `reserved_share`, `running`, `moved_rows` (cumulative).
        run_histogram: int64 [24]; entry k counts runs of 2**k .. 2**(k+1)-1 slots over the running
            requests, summed over samples.
        maps: Pool maps over time, in order of time.
        slices: Steps for the Chrome trace; empty unless asked for.
    """

    name: str
    description: str
    metrics: dict[str, float]
    series: dict[str, FloatArray]
    run_histogram: npt.NDArray[np.int64]
    maps: tuple[PoolMap, ...] = ()
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class RunResult:
    """All arms over one trace.

    Attributes:
        trace: `name`, `sha256`, `format`, `requests` and so on of the trace.
        options: The options of the run as given (pool slots, page, seed ...).
        versions: Versions of kvdefrag, Python, torch and numpy.
        verdict: Sentences in plain words: what each mechanism adds, whether relocation is needed.
        warnings: Sentences the user should see, for example that the pool was nearly empty.
    """

    trace: dict[str, str | int]
    options: dict[str, str | int | float | bool | None]
    versions: dict[str, str]
    arms: tuple[ArmResult, ...]
    verdict: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    schema_version: int = SCHEMA_VERSION
