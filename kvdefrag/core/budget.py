"""How many bytes a step may move: a cap a step, and an average over steps.

After Valkey's active defragmentation (its duty cycle, `defrag.c`), in bytes instead of time so
that ranks agree: what one step spends beyond the average is paid back by later ones.
"""

from __future__ import annotations


class DutyBudget:
    """Bytes that may be moved.

    Args:
        bytes_per_step: Most bytes in one step.
        duty_bytes_per_step: Bytes a step on the average; credit gathers up to `bytes_per_step`.
    """

    def __init__(self, *, bytes_per_step: int, duty_bytes_per_step: int) -> None:
        self._cap = bytes_per_step
        self._duty = duty_bytes_per_step
        self._credit = 0

    @property
    def credit(self) -> int:
        """Bytes that may be moved now; negative while an overage is paid back."""
        return self._credit

    def advance(self) -> None:
        """Count one step."""
        self._credit = min(self._cap, self._credit + self._duty)

    def spend(self, count: int) -> None:
        """Note that `count` bytes were moved."""
        self._credit -= count
