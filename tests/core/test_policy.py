"""When a step relocates, how, and how much."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvdefrag.config import Config
from kvdefrag.core.payback import PayBack
from kvdefrag.core.policy import (
    Decision,
    Gather,
    Lower,
    Mark,
    Mechanism,
    Policy,
    Situation,
)
from kvdefrag.core.profile import DeviceProfile

KERNEL = {
    "name": "a kernel",
    "scattered_gbps": 10,
    "paged_gbps": 20,
    "fixed_us": 0,
    "left_over_us": 0,
}
# A moved token pays after 20 decode steps.
PROFILE = DeviceProfile.model_validate(
    {
        "version": 1,
        "name": "round numbers",
        "layers": 10,
        "row_bytes": 100,
        "copy_gbps": 4,
        "relocation_efficiency": 0.5,
        "relocation_fixed_us": 0,
        "step_base_us": 0,
        "prefill_base_us": 0,
        "prefill_us_per_token": 0,
        "decode": {"stock": KERNEL, "paged": KERNEL},
        "verify": {"stock": KERNEL, "paged": KERNEL},
        "transfer_us_per_descriptor": 16,
        "provenance": {},
    }
)
ROW_BYTES = 1000
SCATTERED = Situation(
    running=4,
    groups_ready=10,
    packed=0.5,
    whole_free_share=0.5,
    unusable_free_share=0.5,
    remaining_steps=100.0,
)
PACKED = dataclasses.replace(SCATTERED, packed=1.0)
CROWDED = dataclasses.replace(SCATTERED, whole_free_share=0.005, unusable_free_share=0.9)


def policy_of(
    *,
    kill_switch: bool = False,
    consumers: tuple[str, ...] = (),
    mechanisms: dict[str, bool] | None = None,
    **relocation: Any,
) -> Policy:
    """A threshold policy that looks at every step and may move 100 groups, unless said."""
    rules = {
        "mode": "threshold",
        "tenure_interval": 1,
        "bytes_per_step": 6400 * ROW_BYTES,
        "duty_bytes_per_step": 6400 * ROW_BYTES,
        "mechanisms": mechanisms or {},
        **relocation,
    }
    config = Config.model_validate(
        {
            "kill_switch": kill_switch,
            "relocation": rules,
            "consumers": [{"kind": kind} for kind in consumers],
        }
    )
    payback = PayBack(config.consumers, PROFILE)
    return Policy(config, row_bytes=ROW_BYTES, payback=payback)


def step(policy: Policy, now: Situation, number: int = 0, gates: tuple[str, ...] = ()) -> Decision:
    return policy.blocked(number, gates) or policy.decide(now)


def nothing(reason: str, detail: str = "") -> Decision:
    return Decision(Mechanism.NONE, 0, reason, detail)


def test_groups_outside_pages_are_tenured_within_the_budget():
    decision = step(policy_of(), SCATTERED)

    assert decision == Decision(Mechanism.TENURE, 6400, "groups outside aligned pages")


def test_case_50_a_packed_cache_is_left_alone():
    assert step(policy_of(), PACKED) == nothing("no trigger")
    no_groups = dataclasses.replace(SCATTERED, groups_ready=0)
    assert step(policy_of(), no_groups) == nothing("no trigger")


def test_coverage_that_was_never_measured_counts_as_low():
    unknown = dataclasses.replace(SCATTERED, packed=None)

    assert step(policy_of(), unknown).mechanism is Mechanism.TENURE


def test_a_mark_is_on_below_low_and_off_from_high_on():
    mark = Mark(0.9, 0.95)

    values = [0.92, 0.9, 0.89, 0.92, 0.9499, 0.95, 0.92, 0.9, 0.8999]
    assert [mark.update(v) for v in values] == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
        False,
        True,
    ]


def test_tenure_goes_on_until_the_high_mark():
    policy = policy_of(coverage_low=0.9, coverage_high=0.95)
    seen = []
    for coverage in (0.93, 0.89, 0.93, 0.95, 0.93):
        now = dataclasses.replace(SCATTERED, packed=coverage)
        seen.append(step(policy, now).mechanism is Mechanism.TENURE)

    assert seen == [False, True, True, False, False]


def test_evacuation_comes_first_when_whole_pages_run_short_though_slots_are_free():
    decision = step(policy_of(), CROWDED)

    assert decision == Decision(Mechanism.EVACUATION, 6400, "whole free pages run short")


def test_a_pool_that_is_simply_full_is_not_evacuated():
    full = dataclasses.replace(CROWDED, unusable_free_share=0.49)

    assert step(policy_of(), full).mechanism is Mechanism.TENURE


def test_evacuation_goes_on_until_the_high_mark():
    policy = policy_of(whole_free_low=0.1, whole_free_high=0.2, mechanisms={"tenure": False})
    seen = []
    for share in (0.15, 0.09, 0.15, 0.2, 0.15):
        now = dataclasses.replace(CROWDED, whole_free_share=share)
        seen.append(step(policy, now).mechanism is Mechanism.EVACUATION)

    assert seen == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("off", "now", "left"),
    [
        ("evacuation", CROWDED, Mechanism.TENURE),
        ("tenure", SCATTERED, Mechanism.NONE),
        ("tenure", CROWDED, Mechanism.EVACUATION),
    ],
)
def test_each_mechanism_has_its_own_switch(off: str, now: Situation, left: Mechanism):
    assert step(policy_of(mechanisms={off: False}), now).mechanism is left


def test_nothing_runs_and_so_the_pool_may_be_packed_in_slices():
    idle = dataclasses.replace(PACKED, running=0)

    assert step(policy_of(idle_rows_per_slice=50), idle) == Decision(Mechanism.IDLE, 50, "idle")
    assert step(policy_of(), idle).rows == 4096
    assert step(policy_of(mechanisms={"on_demand": False}), idle) == nothing("idle")


@pytest.mark.parametrize("mode", ["off", "on_demand", "auto", "threshold"])
def test_the_kill_switch_stops_everything(mode: str):
    policy = policy_of(mode=mode, kill_switch=True, consumers=("paged_attention",))
    policy.demands.append(Lower(10))

    assert step(policy, CROWDED) == nothing("kill switch")


def test_off_moves_nothing_even_on_demand():
    policy = policy_of(mode="off")
    policy.demands.append(Lower(10))

    assert step(policy, CROWDED) == nothing("relocation is off")


def test_case_26_a_closed_gate_moves_nothing_and_says_which():
    policy = policy_of()
    policy.demands.append(Lower(10))

    decision = step(policy, CROWDED, gates=("transfer under way", "free group open"))

    assert decision == nothing("gate closed", "transfer under way")
    assert policy.demands


def test_on_demand_moves_only_when_asked():
    policy = policy_of(mode="on_demand")
    assert step(policy, CROWDED) == nothing("nothing was asked for")

    policy.demands.append(Lower(10))
    assert step(policy, CROWDED).mechanism is Mechanism.LOWER


def test_demands_are_served_in_order_and_before_any_trigger():
    policy = policy_of()
    policy.demands.extend([Gather(row=3, generation=0), Lower(10)])

    assert step(policy, CROWDED) == Decision(Mechanism.GATHER, 6400, "asked to gather a request")
    policy.demands.popleft()
    assert step(policy, CROWDED) == Decision(
        Mechanism.LOWER, 6400, "asked to lower the high-water mark"
    )
    policy.demands.popleft()
    assert step(policy, CROWDED).mechanism is Mechanism.EVACUATION


def test_case_52_a_demand_is_served_whatever_the_marks_the_budget_and_the_interval_say():
    policy = policy_of(
        mode="auto", tenure_interval=16, bytes_per_step=100 * ROW_BYTES, duty_bytes_per_step=0
    )
    policy.demands.append(Lower(500))

    assert step(policy, PACKED, 7) == Decision(
        Mechanism.LOWER, 100, "asked to lower the high-water mark"
    )


def test_a_demand_moves_a_page_at_least():
    policy = policy_of(bytes_per_step=0, duty_bytes_per_step=0)
    policy.demands.append(Gather(1, 0))

    assert step(policy, PACKED).rows == 64


def test_without_on_demand_a_demand_waits():
    policy = policy_of(mode="on_demand", mechanisms={"on_demand": False})
    policy.demands.append(Lower(10))
    assert step(policy, CROWDED) == nothing("nothing was asked for")

    policy = policy_of(mechanisms={"on_demand": False})
    policy.demands.append(Lower(10))
    assert step(policy, CROWDED).mechanism is Mechanism.EVACUATION


@pytest.mark.parametrize(
    ("consumers", "reason"),
    [((), "no consumer declared"), (("transfer", "tail"), "consumers pay on demand only")],
)
def test_case_58_auto_without_a_consumer_never_moves_and_says_why(
    consumers: tuple[str, ...], reason: str
):
    policy = policy_of(mode="auto", consumers=consumers)

    decisions = {step(policy, now, n) for n in range(100) for now in (SCATTERED, CROWDED)}

    assert decisions == {nothing(reason)}


def test_auto_moves_once_a_copy_pays():
    policy = policy_of(mode="auto", consumers=("paged_attention",))

    assert step(policy, dataclasses.replace(SCATTERED, remaining_steps=None)) == nothing(
        "remaining steps unknown", "no request has finished yet"
    )
    assert step(policy, dataclasses.replace(SCATTERED, remaining_steps=19.0)) == nothing(
        "does not pay back", "a copied row pays after 20 steps, 19 remain"
    )
    assert step(policy, SCATTERED).mechanism is Mechanism.TENURE


def test_threshold_asks_nobody():
    unknown = dataclasses.replace(SCATTERED, remaining_steps=None)

    assert step(policy_of(), unknown).mechanism is Mechanism.TENURE


@pytest.mark.parametrize(
    ("other", "may"),
    [
        ({}, True),
        ({"mode": "auto"}, False),
        ({"mode": "auto", "consumers": ("transfer",)}, False),
        ({"mode": "auto", "consumers": ("paged_attention",)}, True),
        ({"mode": "on_demand"}, False),
        ({"mode": "off"}, False),
        ({"kill_switch": True}, False),
        ({"dry_run": True}, False),
        ({"mechanisms": {"tenure": False}}, False),
        ({"mechanisms": {"evacuation": False}}, True),
    ],
)
def test_placement_learns_whether_tenure_may_come(other: dict[str, Any], may: bool):
    assert policy_of(**other).may_tenure is may


def test_a_dry_run_decides_as_a_real_one():
    assert step(policy_of(dry_run=True), CROWDED) == step(policy_of(), CROWDED)


def test_only_every_so_many_steps_are_looked_at():
    policy = policy_of(tenure_interval=4)

    seen = [step(policy, SCATTERED, n).reason for n in range(5)]

    assert seen == [
        "groups outside aligned pages",
        "not due",
        "not due",
        "not due",
        "groups outside aligned pages",
    ]


def test_a_step_waits_until_the_budget_holds_a_page():
    policy = policy_of(bytes_per_step=200 * ROW_BYTES, duty_bytes_per_step=30 * ROW_BYTES)

    seen = [step(policy, SCATTERED, n) for n in range(3)]

    assert [d.reason for d in seen[:2]] == ["budget spent"] * 2
    assert (seen[2].mechanism, seen[2].rows) == (Mechanism.TENURE, 90)


def test_what_was_spent_beyond_the_duty_is_paid_back_in_later_steps():
    policy = policy_of(bytes_per_step=128 * ROW_BYTES, duty_bytes_per_step=64 * ROW_BYTES)
    assert step(policy, SCATTERED, 0).rows == 64
    assert step(policy, SCATTERED, 1).rows == 128
    policy.spend(256)

    seen = [step(policy, SCATTERED, n).rows for n in range(2, 6)]

    assert seen == [0, 0, 64, 128]


def test_rows_that_did_not_move_are_given_back_to_the_budget():
    policy = policy_of(bytes_per_step=128 * ROW_BYTES, duty_bytes_per_step=0)
    policy.spend(-100)

    assert step(policy, SCATTERED).rows == 100


def test_blocked_steps_gather_budget_too():
    policy = policy_of(bytes_per_step=200 * ROW_BYTES, duty_bytes_per_step=50 * ROW_BYTES)
    for n in range(3):
        assert step(policy, SCATTERED, n, gates=("busy",)).reason == "gate closed"

    assert step(policy, SCATTERED, 3).rows == 200


def test_case_56_steps_that_gain_little_back_off_twice_as_long_each_time():
    policy = policy_of(min_gain_rows=64, backoff_max_shift=3)
    until = []
    for n in (10, 20, 30, 40, 50):
        policy.moved(n, 63)
        until.append(policy.backoff_until - n)

    assert until == [1, 2, 4, 8, 8]
    assert step(policy, SCATTERED, 57) == nothing("backing off")
    assert step(policy, SCATTERED, 58).mechanism is Mechanism.TENURE


def test_a_gain_resets_the_back_off():
    policy = policy_of(min_gain_rows=64)
    for n in (10, 20, 30):
        policy.moved(n, 0)
    policy.moved(40, 64)
    policy.moved(50, 0)

    assert policy.backoff_until == 51


def test_a_demand_is_served_while_backing_off():
    policy = policy_of()
    policy.moved(10, 0)
    policy.moved(10, 0)
    policy.demands.append(Lower(5))

    assert step(policy, SCATTERED, 11).mechanism is Mechanism.LOWER


def test_case_56_a_policy_that_never_gains_acts_in_a_small_share_of_the_steps():
    policy = policy_of(backoff_max_shift=6)
    acted = 0
    for n in range(1000):
        if step(policy, SCATTERED, n).mechanism is not Mechanism.NONE:
            acted += 1
            policy.moved(n, 0)

    # 1 + 2 + ... + 32 steps, then one in 64.
    assert acted == 6 + 15


def test_case_63_two_policies_decide_alike():
    situations = [SCATTERED, PACKED, CROWDED] * 20
    runs = []
    for _ in range(2):
        policy = policy_of(mode="auto", consumers=("paged_attention",), tenure_interval=2)
        seen = []
        for n, now in enumerate(situations):
            decision = step(policy, now, n)
            policy.spend(decision.rows)
            if decision.rows:
                policy.moved(n, n % 100)
            seen.append(decision)
        runs.append(seen)

    assert runs[0] == runs[1]
