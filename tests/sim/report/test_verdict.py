from __future__ import annotations

import math

import pytest

from kvdefrag.sim.report.verdict import best, copies, verdict_of, warnings_of


def sentence(arms, start):
    found = [text for text in verdict_of(arms) if text.startswith(start)]
    assert len(found) <= 1
    return found[0] if found else None


def coverage(mean, p10=None, moved=0.0, **more):
    p10 = mean if p10 is None else p10
    return {
        "page_coverage_mean": mean,
        "page_coverage_p10": p10,
        "moved_rows_per_decoded_token": moved,
        **more,
    }


def test_each_mechanism_is_compared_with_the_cheaper_one_before_it(make_arm):
    rate = "modelled_tokens_per_second"
    arms = [
        make_arm(
            "stock", **coverage(0.408, 0.141, mean_run=1.9, **{rate: 100, f"{rate}_paged": 200})
        ),
        make_arm(
            "sorted", **coverage(0.640, 0.488, mean_run=5.6, **{rate: 100, f"{rate}_paged": 203})
        ),
        make_arm("placement", **coverage(0.956, 0.941)),
        make_arm("placement+reservation", **coverage(0.990, 0.986)),
        make_arm("placement+tenure", **coverage(0.991, 0.986, 0.88)),
        make_arm("default", **coverage(0.991, 0.987, 0.02)),
    ]
    assert sentence(arms, "Sorting the free list") == (
        "Sorting the free list (sorted over stock): mean coverage +23.20 points (40.80 to 64.00%); "
        "p10 +34.70 points (14.10 to 48.80%); mean run 1.9 to 5.6 slots; no rows moved; "
        "modelled tokens/s +0.0% with the stock kernel, +1.5% with a paged kernel."
    )
    assert "(placement over sorted): mean coverage +31.60 points" in "".join(verdict_of(arms))
    assert "(placement+reservation over placement): mean coverage +3.40" in "".join(
        verdict_of(arms)
    )
    tenure = sentence(arms, "Tenure (placement+tenure over placement)")
    assert "0.880 moved rows per decoded token" in tenure
    assert "(default over placement+reservation)" in sentence(arms, "Relocation under")


def test_arms_that_did_not_run_are_not_mentioned(make_arm):
    arms = [make_arm("stock", **coverage(0.4)), make_arm("placement", **coverage(0.9))]
    text = " ".join(verdict_of(arms))
    assert "sorted" not in text
    assert "Tenure" not in text
    assert "packed" not in text


@pytest.mark.parametrize(
    ("mean", "p10", "answer"),
    [(0.9949, 0.9849, "No"), (0.995, 0.980, "Yes"), (0.990, 0.985, "Yes"), (0.5, 0.5, "No")],
)
def test_relocation_is_needed_from_half_a_point_of_mean_or_p10(make_arm, mean, p10, answer):
    arms = [
        make_arm("stock", **coverage(0.4, 0.1)),
        make_arm("placement+reservation", **coverage(0.990, 0.980)),
        make_arm("default", **coverage(mean, p10, 0.02)),
        make_arm("packed", **coverage(1.0)),
    ]
    text = sentence(arms, "Is relocation needed")
    assert f"on this trace? {answer}: " in text
    assert "default, changes placement+reservation, the best arm without copies" in text
    assert "it moves 0.020 rows per decoded token" in text


def test_relocation_is_not_judged_where_no_arm_copied(make_arm):
    arms = [make_arm("stock", **coverage(0.4)), make_arm("default", **coverage(0.9))]
    assert "Not shown: no arm moved a row" in sentence(arms, "Is relocation needed")


def test_relocation_is_not_judged_where_every_arm_copied(make_arm):
    arms = [make_arm("default", **coverage(0.9, moved=1.0))]
    assert "Not shown: no arm ran without copies" in sentence(arms, "Is relocation needed")


def test_distance_to_the_bound_is_stated(make_arm):
    arms = [make_arm("placement", **coverage(0.95, 0.90)), make_arm("packed", **coverage(0.996))]
    text = sentence(arms, "The best arm")
    assert "placement, is 4.60 points of mean coverage and 9.60 points of p10 away" in text


def test_the_stock_kernel_is_said_to_gain_nothing_and_the_paged_kernel_what_it_gains(make_arm):
    arms = [
        make_arm("stock", **coverage(0.4, attention_us_stock=2484.0, attention_us_paged=430.0)),
        make_arm("default", **coverage(0.99, attention_us_stock=2480.0, attention_us_paged=330.0)),
    ]
    text = sentence(arms, "What contiguity buys")
    assert "modelled from the cost profile, not measured here" in text
    assert "stock token-level kernel practically nothing, -0.2% (2,484 to 2,480 us" in text
    assert "a paged kernel -23.3% (430 to 330 us" in text
    alone = sentence(arms, "Changing the kernel alone")
    assert "by -82.7%; changing kernel and layout by -86.7%." in alone


def test_a_gain_that_rounds_to_nothing_has_no_minus_sign(make_arm):
    arms = [make_arm("stock", **coverage(0.5)), make_arm("sorted", **coverage(0.49999999))]
    assert "mean coverage +0.00 points" in sentence(arms, "Sorting")


def test_missing_and_nan_metrics_only_shorten_the_sentences(make_arm):
    arms = [make_arm("stock", page_coverage_mean=math.nan), make_arm("sorted"), make_arm("packed")]
    assert verdict_of(arms) == (
        "Is relocation needed on this trace? Not shown: no arm moved a row.",
    )
    assert verdict_of([])
    assert warnings_of([]) == ()


def test_best_goes_by_mean_then_p10_then_order_and_never_picks_the_bound(make_arm):
    a, b, c = (make_arm(n, **coverage(0.9, p)) for n, p in [("a", 0.7), ("b", 0.8), ("c", 0.8)])
    assert best([a, b, c, make_arm("packed", **coverage(1.0))]) is b
    assert best([]) is None


def test_bytes_alone_show_that_an_arm_copies(make_arm):
    assert copies(make_arm("a", bytes_moved=1.0))
    assert not copies(make_arm("a", bytes_moved=0.0))


@pytest.mark.parametrize(("peak", "warned"), [(0.099, True), (0.10, False), (0.9, False)])
def test_a_pool_used_under_a_tenth_is_warned_about(make_arm, peak, warned):
    found = warnings_of(
        [make_arm("stock", peak_utilization=peak), make_arm("x", peak_utilization=0.01)]
    )
    assert bool(found) is warned
    if warned:
        assert found[0].startswith("At most 9.9% of the pool was ever used")


def test_arms_that_finished_unequal_work_are_warned_about(make_arm):
    arms = [make_arm("stock", requests_finished=10), make_arm("sorted", requests_finished=9)]
    assert warnings_of(arms) == (
        "The arms did not finish equally many requests, so compare with care: stock 10, sorted 9.",
    )
