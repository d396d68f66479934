"""What a server shows of the plugin at `/server_info`."""

from __future__ import annotations

from typing import Any

from kvdefrag import __version__
from kvdefrag.metrics import Figures


def state_of(attachment: Any, figures: Figures) -> dict[str, Any]:
    """Return it in plain values.

    Args:
        attachment: The plugin of one scheduler.
        figures: How things stand.
    """
    tally, last = attachment.telemetry.tally, attachment.last
    tally.settle()
    recording, control = attachment.recording, attachment.control
    return {
        "version": __version__,
        "description": attachment.describe(),
        "active": attachment.error is None,
        "error": attachment.error,
        "mode": attachment.config.relocation.mode,
        "size": attachment.allocator.size,
        "page": attachment.config.page,
        "row_bytes": tally.row_bytes,
        "steps": attachment.steps,
        "seconds": round(tally.seconds, 6),
        "reason": last.reason if last else None,
        "backoff_steps": figures.backoff_steps,
        "moved_rows": tally.moved_rows.total(),
        "moved_bytes": sum(tally.moved_bytes.values()),
        "moved_by": dict(tally.moved_rows),
        "skips": dict(tally.skips),
        "gates_closed": dict(tally.gates_closed),
        "tokens": figures.tokens,
        "runs": figures.runs,
        "coverage": figures.coverage,
        "whole_free_pages": figures.whole_free_pages,
        "reserved_slots": figures.reserved_slots,
        "available": figures.available_slots,
        "recording": recording.state() if recording else None,
        "control": control.state() if control else None,
    }
