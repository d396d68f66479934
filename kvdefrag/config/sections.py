"""The groups of settings: defaults, bounds and one line on what each key does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvdefrag.config.byte_count import GIB, MIB, TIB, ByteCount


def _above(value: float, info: ValidationInfo, low: str) -> float:
    if low in info.data and not info.data[low] < value:
        raise PydanticCustomError("rule", f"must be above {low} ({info.data[low]})")
    return value


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _means_what_it_says(cls, value: object, info: ValidationInfo) -> object:
        # Pydantic reads `true` as the number 1 and an empty text as the path `.`.
        field = cls.model_fields[info.field_name or ""]
        if value == "" or (isinstance(value, bool) and field.annotation is not bool):
            raise ValueError("neither empty nor a boolean")
        return value


class Placement(Section):
    """Where new tokens go; costs no copies."""

    free_list: Literal["fifo", "sorted", "two_ended"] = Field(
        default="two_ended",
        description="Order of the free list: as stock, ascending, or whole pages kept apart.",
    )
    reservation: bool = Field(
        default=True,
        description="Let a running request own the rest of its last page, ahead of need.",
    )
    reorder_interval: int = Field(
        default=16, ge=1, le=4096, description="Steps between re-orderings of the free list."
    )
    evict_for_pages: bool = Field(
        default=True,
        description="Let cached prefixes go earlier where free slots make up no whole page.",
    )
    checks: Literal["strict", "lenient", "off"] = Field(
        default="lenient",
        description="Double frees and bad slots: raise, count and ignore, or do not look.",
    )

    @property
    def evicts_for_pages(self) -> bool:
        """Whether cached prefixes go for the sake of pages: SGLang's own orders know none."""
        return self.evict_for_pages and self.free_list == "two_ended"


class Mechanisms(Section):
    """What relocation may do, each of use alone."""

    tenure: bool = Field(
        default=True, description="Copy decoded tokens, a page at a time, into whole free pages."
    )
    evacuation: bool = Field(
        default=True, description="Empty the sparsest pages when whole free pages run short."
    )
    on_demand: bool = Field(
        default=True, description="Gather one request, lower the high-water mark, pack when idle."
    )


class Relocation(Section):
    """When live tokens are copied, and how much that may cost."""

    mode: Literal["off", "on_demand", "auto", "threshold"] = Field(
        default="auto",
        description="Never; when asked; when asked or a consumer pays; whenever a mark is passed.",
    )
    dry_run: bool = Field(default=False, description="Plan and report, but move nothing.")
    mechanisms: Mechanisms = Field(
        default=Mechanisms(), description="What relocation may do, each switch of use alone."
    )
    tenure_interval: int = Field(
        default=16, ge=1, le=4096, description="Steps between looks for pages to tenure."
    )
    bytes_per_step: ByteCount = Field(
        default=64 * MIB, ge=0, le=64 * GIB, description="Most bytes copied in one step."
    )
    duty_bytes_per_step: ByteCount = Field(
        default=8 * MIB,
        ge=0,
        le=64 * GIB,
        description="Bytes a step may cost on average; a step that took more is paid back.",
    )
    coverage_low: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="Start when page coverage falls below this share of what it could be.",
    )
    coverage_high: float = Field(
        default=0.98,
        ge=0,
        le=1,
        description="Stop when page coverage is above this share of what it could be.",
    )
    whole_free_low: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Evacuate when whole free pages are less than this share of the pool.",
    )
    whole_free_high: float = Field(
        default=0.02, ge=0, le=1, description="Stop evacuating above this share of the pool."
    )
    unusable_free_min: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Evacuate only if so much of the free slots lies outside whole free pages.",
    )
    max_live_per_page: int = Field(
        default=32, ge=1, le=127, description="Evacuate only pages with at most so many live rows."
    )
    min_gain_rows: int = Field(
        default=64,
        ge=0,
        le=1 << 20,
        description="A step that gains fewer rows than this backs off.",
    )
    backoff_max_shift: int = Field(
        default=6, ge=0, le=16, description="Back off for at most 2 to the power of this, in steps."
    )
    readback_steps: int = Field(
        default=2,
        ge=1,
        le=8,
        description="Steps after which device figures are read; all ranks alike.",
    )
    check_plans: Literal["always", "sampled", "never"] = Field(
        default="sampled", description="How often a plan is checked on the device before it runs."
    )
    idle_rows_per_slice: int = Field(
        default=4096, ge=1, le=1 << 20, description="Rows moved in one slice of idle packing."
    )

    @field_validator("coverage_high")
    @classmethod
    def _coverage_marks_in_order(cls, value: float, info: ValidationInfo) -> float:
        return _above(value, info, "coverage_low")

    @field_validator("whole_free_high")
    @classmethod
    def _whole_free_marks_in_order(cls, value: float, info: ValidationInfo) -> float:
        return _above(value, info, "whole_free_low")


class Consumer(Section):
    """Somebody who is paid by contiguity."""

    kind: Literal["paged_attention", "transfer", "tail"] = Field(
        description="Who gains: attention over pages, bulk transfers, or a user of the pool's tail."
    )
    gain: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of its time saved at full coverage, in place of the profile's figure.",
    )


class Attention(Section):
    """Our own attention kernel."""

    enabled: bool = Field(
        default=False,
        description="Serve decode and verify layers of SGLang's Triton backend by our kernel.",
    )
    crossover: Path | None = Field(
        default=None, description="Table (JSON) of who was fastest where, in place of the shipped."
    )


class Observe(Section):
    """What is told to whom."""

    log_interval: int = Field(
        default=100,
        ge=1,
        le=1 << 20,
        description="Steps between summary lines in the log, and between updates of metrics.",
    )
    prometheus: bool = Field(default=True, description="Export counters and gauges.")
    events_path: Path | None = Field(
        default=None, description="Record allocator events here, one JSON object a line."
    )
    events_max_bytes: ByteCount = Field(
        default=256 * MIB, ge=MIB, le=TIB, description="Stop recording at this size."
    )


class Control(Section):
    """Steering a live server from outside."""

    enabled: bool = Field(
        default=False,
        description="Answer `kvdefrag compact`, `pause`, `resume`, `reload` and `advise --url`.",
    )
    events_dir: Path | None = Field(
        default=None,
        description="Folder for events that `advise --url` records; the temporary one by default.",
    )
