"""What a step takes, by a declared cost profile."""

from __future__ import annotations

from kvdefrag.core.profile import AttentionCost, DeviceProfile
from kvdefrag.sim.engine_types import StepInfo, StepKind


def attention_us(
    cost: AttentionCost, profile: DeviceProfile, tokens: int, coverage: float
) -> float:
    """Return microseconds that all layers' attention over `tokens` cached tokens takes.

    bytes inside pages / paged rate + bytes outside / scattered rate + the fixed parts a layer; the
    part for mixing both kinds falls away when all tokens are of one kind.
    """
    total = tokens * profile.bytes_per_slot
    reading = coverage * total / cost.paged_gbps + (1 - coverage) * total / cost.scattered_gbps
    fixed = cost.fixed_us + (cost.left_over_us if 0 < coverage < 1 else 0)
    return reading / 1e3 + profile.layers * fixed


class StepTimer:
    """Prices steps and keeps the sums that the metrics need.

    Args:
        profile: The prices.
        verify: Whether decode steps verify drafts.

    Attributes:
        coverage: Page coverage of the running requests, as last sampled.
        step_s, relocation_s: Seconds of all steps (relocation included), and of relocation.
        paged_s: Seconds of the same steps with attention by the paged kernel.
        attention_stock_us, attention_paged_us: Sums over decode steps.
        decode_steps: Decode steps priced.
    """

    def __init__(self, profile: DeviceProfile, *, verify: bool) -> None:
        self._profile = profile
        self._kernels = profile.verify if verify else profile.decode
        self.coverage = 0.0
        self.step_s = self.relocation_s = self.paged_s = 0.0
        self.attention_stock_us = self.attention_paged_us = 0.0
        self.decode_steps = 0
        self._owed_us = 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return self._profile.bytes_per_slot

    def charge(self, rows: int) -> None:
        """Charge the copies of `rows` rows to the next step."""
        self._owed_us += self._profile.relocation_us(rows)

    def price(self, step: StepInfo) -> float:
        """Return the seconds of a step under the stock kernel."""
        owed, self._owed_us = self._owed_us, 0.0
        if step.kind is StepKind.PREFILL:
            tokens = int(step.counts.sum())
            stock = paged = self._profile.prefill_base_us
            stock = paged = stock + tokens * self._profile.prefill_us_per_token
        else:
            tokens = int(step.starts.sum() + step.counts.sum())
            stock = self._attention("stock", tokens)
            paged = self._attention("paged", tokens)
            self.attention_stock_us += stock
            self.attention_paged_us += paged
            self.decode_steps += 1
            stock, paged = stock + self._profile.step_base_us, paged + self._profile.step_base_us
        self.relocation_s += owed / 1e6
        self.step_s += (stock + owed) / 1e6
        self.paged_s += (paged + owed) / 1e6
        return (stock + owed) / 1e6

    def _attention(self, kernel: str, tokens: int) -> float:
        cost = self._kernels["stock" if kernel == "stock" else "paged"]
        return attention_us(cost, self._profile, tokens, self.coverage)
