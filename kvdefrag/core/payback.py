"""Whether anybody pays for contiguity, and how soon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdefrag.config import Consumer
from kvdefrag.core.profile import DeviceProfile


@dataclass(frozen=True)
class Verdict:
    """Whether relocation pays; `reason` is a fixed text, `detail` may hold numbers."""

    pays: bool
    reason: str
    detail: str = ""


class PayBack:
    """Compares what a copied row costs with what it saves in the steps it has left.

    Break-even, in steps: cost of copying one token over its gain per step. A consumer of kind
    `paged_attention` gains at every step; `transfer` and `tail` gain on demand only.

    Args:
        consumers: Who gains from contiguity, as declared.
        profile: Prices of this GPU.
    """

    def __init__(self, consumers: Sequence[Consumer], profile: DeviceProfile) -> None:
        self._paged = [c for c in consumers if c.kind == "paged_attention"]
        self._profile = profile
        self.unpaid = "consumers pay on demand only" if consumers else "no consumer declared"

    @property
    def may_pay(self) -> bool:
        """Whether any consumer gains at every step; `unpaid` says why not."""
        return bool(self._paged)

    def judge(self, remaining_steps: float | None, *, verify: bool = False) -> Verdict:
        """Return whether copying a decode token now pays.

        Args:
            remaining_steps: Steps a running request has left on the average; None if unknown.
            verify: Whether steps verify drafts instead of decoding one token.
        """
        if not self._paged:
            return Verdict(False, self.unpaid)
        gain = sum(self._gain_us(c, verify=verify) for c in self._paged)
        needed = self._profile.break_even_steps(gain)
        if remaining_steps is None:
            return Verdict(False, "remaining steps unknown", "no request has finished yet")
        words = f"a copied row pays after {needed:.0f} steps, {remaining_steps:.0f} remain"
        pays = needed <= remaining_steps
        return Verdict(pays, "pays back" if pays else "does not pay back", words)

    def _gain_us(self, consumer: Consumer, *, verify: bool) -> float:
        if consumer.gain is None:
            return self._profile.paged_gain_us(verify=verify)
        kernels = self._profile.verify if verify else self._profile.decode
        rate = kernels["paged"].scattered_gbps * 1e3
        return consumer.gain * self._profile.bytes_per_slot / rate
