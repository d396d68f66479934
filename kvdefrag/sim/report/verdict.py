"""The result in plain words, computed from the arms' metrics and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdefrag.sim.metrics import get, value
from kvdefrag.sim.report.table import BOUND
from kvdefrag.sim.results import ArmResult

NEEDED_POINTS = 0.5
LOW_PEAK = 0.10
SAME_PERCENT = 1.0


class Step(NamedTuple):
    """A mechanism: the arm that has it, the cheaper arm before it, and what to call it."""

    arm: str
    before: str
    mechanism: str


CHAIN = (
    Step("sorted", "stock", "Sorting the free list"),
    Step("placement", "sorted", "Two-ended placement"),
    Step("placement+reservation", "placement", "Reserving the rest of a request's last page"),
    Step("placement+tenure", "placement", "Tenure"),
    Step("all", "placement+reservation", "Relocation on top of reservation, whoever pays"),
    Step("default", "placement+reservation", "Relocation under the shipped policy"),
)


def verdict_of(arms: Sequence[ArmResult]) -> tuple[str, ...]:
    """Say what each mechanism adds, whether relocation is needed, and what contiguity buys.

    Arms that did not run, and metrics that an arm lacks, are left out of the sentences.
    """
    return (*_chain(arms), *_relocation(arms), *_bound(arms), *_kernels(arms))


def warnings_of(arms: Sequence[ArmResult]) -> tuple[str, ...]:
    """Say what makes the numbers of this run weak: an empty pool, or arms that differ in work."""
    return (*_empty_pool(arms), *_unequal_work(arms))


def copies(arm: ArmResult) -> bool:
    """Tell whether the arm moved any row."""
    moved = ("bytes_moved", "moved_rows_per_decoded_token")
    return any((value(arm.metrics, name) or 0.0) > 0 for name in moved)


def best(arms: Sequence[ArmResult]) -> ArmResult | None:
    """Pick the arm with the highest mean coverage, then p10; the first of equals; no bound."""
    known = [a for a in arms if a.name != BOUND and _coverage(a) is not None]
    key = ("page_coverage_mean", "page_coverage_p10")
    return max(
        known, key=lambda arm: [value(arm.metrics, name) or 0.0 for name in key], default=None
    )


def _chain(arms: Sequence[ArmResult]) -> Iterator[str]:
    by_name = {arm.name: arm for arm in arms}
    for step in CHAIN:
        arm, before = by_name.get(step.arm), by_name.get(step.before)
        if arm is not None and before is not None and _coverage(arm) is not None:
            parts = [part for part in _differences(before, arm) if part]
            yield f"{step.mechanism} ({arm.name} over {before.name}): {'; '.join(parts)}."


def _differences(before: ArmResult, arm: ArmResult) -> Iterator[str]:
    yield _points(before, arm, "page_coverage_mean", "mean coverage")
    yield _points(before, arm, "page_coverage_p10", "p10")
    old, new = _pair(before, arm, "mean_run")
    if old is not None and new is not None:
        show = get("mean_run").text
        yield f"mean run {show(old)} to {show(new)} slots"
    moved = value(arm.metrics, "moved_rows_per_decoded_token")
    if moved is not None:
        yield f"{moved:.3f} moved rows per decoded token" if copies(arm) else "no rows moved"
    stock = _relative(before, arm, "modelled_tokens_per_second")
    paged = _relative(before, arm, "modelled_tokens_per_second_paged")
    if stock and paged:
        yield f"modelled tokens/s {stock} with the stock kernel, {paged} with a paged kernel"


def _relocation(arms: Sequence[ArmResult]) -> Iterator[str]:
    still = best([arm for arm in arms if not copies(arm)])
    moving = [a for a in arms if a.name != BOUND and copies(a) and _coverage(a) is not None]
    if not moving:
        yield "Is relocation needed on this trace? Not shown: no arm moved a row."
        return
    if still is None:
        yield "Is relocation needed on this trace? Not shown: no arm ran without copies."
        return
    top = max(moving, key=lambda arm: max(_gains(still, arm)))
    mean, p10 = _gains(still, top)
    answer = "yes" if max(mean, p10) >= NEEDED_POINTS else "no"
    yield (
        f"Is relocation needed for coverage on this trace? {answer.capitalize()}: the arm with "
        f"copies that gains most, {top.name}, changes {still.name}, the best arm without copies, "
        f"by {_signed(mean, 2)} points of mean coverage and {_signed(p10, 2)} points of p10 "
        f"(needed means at least {NEEDED_POINTS} points in one of them){_cost(still, top)}."
    )


def _cost(before: ArmResult, arm: ArmResult) -> str:
    moved = value(arm.metrics, "moved_rows_per_decoded_token")
    rate = _relative(before, arm, "modelled_tokens_per_second_paged")
    rows = "" if moved is None else f"; it moves {moved:.3f} rows per decoded token"
    return rows + (f"; modelled tokens/s with a paged kernel {rate}" if rate else "")


def _bound(arms: Sequence[ArmResult]) -> Iterator[str]:
    bound = next((arm for arm in arms if arm.name == BOUND), None)
    top = best(arms)
    if bound is None or top is None or _coverage(bound) is None:
        return
    mean, p10 = _gains(top, bound)
    yield (
        f"The best arm, {top.name}, is {_plain(mean)} points of mean coverage and {_plain(p10)} "
        f"points of p10 away from {BOUND}, the perfect layout at no cost."
    )


def _plain(points: float) -> str:
    # Adding zero turns a negative zero into zero.
    return f"{round(points, 2) + 0.0:.2f}"


def _kernels(arms: Sequence[ArmResult]) -> Iterator[str]:
    stock = next((arm for arm in arms if arm.name == "stock"), None)
    top = best(arms)
    if stock is None or top is None or top is stock:
        return
    token = _attention(stock, top, "attention_us_stock", "the stock token-level kernel")
    paged = _attention(stock, top, "attention_us_paged", "a paged kernel")
    if token and paged:
        yield (
            f"What contiguity buys in attention ({top.name} against stock, modelled from the cost "
            f"profile, not measured here): {token}; {paged}."
        )
    old, mixed = (value(stock.metrics, f"attention_us_{k}") for k in ("stock", "paged"))
    new = value(top.metrics, "attention_us_paged")
    if old and mixed is not None and new is not None:
        yield (
            f"Changing the kernel alone, on the stock layout, changes modelled attention time by "
            f"{_signed(100 * (mixed - old) / old, 1)}%; changing kernel and layout by "
            f"{_signed(100 * (new - old) / old, 1)}%."
        )


def _attention(before: ArmResult, arm: ArmResult, name: str, kernel: str) -> str:
    old, new = _pair(before, arm, name)
    if not old or new is None:
        return ""
    change = 100 * (new - old) / old
    words = (
        f"practically nothing, {_signed(change, 1)}%"
        if abs(change) < SAME_PERCENT
        else f"{_signed(change, 1)}%"
    )
    return f"with {kernel} {words} ({old:,.0f} to {new:,.0f} us a decode step)"


def _empty_pool(arms: Sequence[ArmResult]) -> Iterator[str]:
    peaks = [p for arm in arms if (p := value(arm.metrics, "peak_utilization")) is not None]
    if peaks and max(peaks) < LOW_PEAK:
        yield (
            f"At most {100 * max(peaks):.1f}% of the pool was ever used: a pool this empty says "
            "little about fragmentation; try fewer --pool-slots or a higher --rate-scale."
        )


def _unequal_work(arms: Sequence[ArmResult]) -> Iterator[str]:
    finished = {
        arm.name: count
        for arm in arms
        if (count := value(arm.metrics, "requests_finished")) is not None
    }
    if len(set(finished.values())) > 1:
        counts = ", ".join(f"{name} {count:,.0f}" for name, count in finished.items())
        yield f"The arms did not finish equally many requests, so compare with care: {counts}."


def _gains(before: ArmResult, arm: ArmResult) -> tuple[float, float]:
    return _gain(before, arm, "page_coverage_mean"), _gain(before, arm, "page_coverage_p10")


def _gain(before: ArmResult, arm: ArmResult, name: str) -> float:
    old, new = _pair(before, arm, name)
    # Rounded so that a gain of exactly the limit is not lost in the last bit.
    return 0.0 if old is None or new is None else round(100 * (new - old), 6)


def _points(before: ArmResult, arm: ArmResult, name: str, words: str) -> str:
    old, new = _pair(before, arm, name)
    if old is None or new is None:
        return ""
    return f"{words} {_signed(100 * (new - old), 2)} points ({100 * old:.2f} to {100 * new:.2f}%)"


def _relative(before: ArmResult, arm: ArmResult, name: str) -> str:
    old, new = _pair(before, arm, name)
    return f"{_signed(100 * (new - old) / old, 1)}%" if old and new is not None else ""


def _pair(before: ArmResult, arm: ArmResult, name: str) -> tuple[float | None, float | None]:
    return value(before.metrics, name), value(arm.metrics, name)


def _coverage(arm: ArmResult) -> float | None:
    return value(arm.metrics, "page_coverage_mean")


def _signed(number: float, digits: int) -> str:
    # Adding zero turns the -0.0 that rounding leaves into 0.0.
    return f"{round(number, digits) + 0.0:+.{digits}f}"
