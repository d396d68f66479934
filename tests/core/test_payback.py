"""Whether anybody pays for contiguity, and how soon."""

from __future__ import annotations

import pytest

from kvdefrag.config import Consumer
from kvdefrag.core.payback import PayBack, Verdict
from kvdefrag.core.profile import DeviceProfile

PAGED = Consumer(kind="paged_attention")


def kernel(scattered: float, paged: float) -> dict[str, object]:
    return {
        "name": "a kernel",
        "scattered_gbps": scattered,
        "paged_gbps": paged,
        "fixed_us": 0,
        "left_over_us": 0,
    }


@pytest.fixture
def profile() -> DeviceProfile:
    # A token of 1,000 bytes costs 1 us to move. In pages it saves 0.05 us a decode step and
    # 0.25 us a verify step: it pays after 20 steps and after 4.
    return DeviceProfile.model_validate(
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
            "decode": {"stock": kernel(1, 1), "paged": kernel(10, 20)},
            "verify": {"stock": kernel(1, 1), "paged": kernel(2, 4)},
            "transfer_us_per_descriptor": 16,
            "provenance": {},
        }
    )


def test_nobody_pays_unless_declared(profile: DeviceProfile):
    payback = PayBack([], profile)

    assert not payback.may_pay
    assert payback.judge(1e9) == Verdict(False, "no consumer declared")


@pytest.mark.parametrize("kind", ["transfer", "tail"])
def test_transfers_and_the_tail_pay_on_demand_only(profile: DeviceProfile, kind: str):
    payback = PayBack([Consumer.model_validate({"kind": kind})], profile)

    assert not payback.may_pay
    assert payback.judge(1e9) == Verdict(False, "consumers pay on demand only")


def test_a_copy_pays_from_break_even_on(profile: DeviceProfile):
    payback = PayBack([PAGED], profile)

    assert payback.may_pay
    assert payback.judge(20) == Verdict(
        True, "pays back", "a copied row pays after 20 steps, 20 remain"
    )
    assert payback.judge(19) == Verdict(
        False, "does not pay back", "a copied row pays after 20 steps, 19 remain"
    )


def test_verify_steps_have_their_own_gain(profile: DeviceProfile):
    payback = PayBack([PAGED], profile)

    assert payback.judge(4, verify=True).pays
    assert not payback.judge(3, verify=True).pays


def test_nothing_is_copied_before_a_request_has_finished(profile: DeviceProfile):
    assert PayBack([PAGED], profile).judge(None) == Verdict(
        False, "remaining steps unknown", "no request has finished yet"
    )


def test_a_declared_gain_takes_the_place_of_the_profiles(profile: DeviceProfile):
    # A tenth of the 0.1 us that reading 1,000 scattered bytes takes: 100 steps.
    payback = PayBack([Consumer(kind="paged_attention", gain=0.1)], profile)

    assert payback.judge(100).pays
    assert not payback.judge(99).pays


def test_a_gain_of_nothing_never_pays(profile: DeviceProfile):
    payback = PayBack([Consumer(kind="paged_attention", gain=0)], profile)

    assert payback.judge(1e12).reason == "does not pay back"


def test_several_consumers_gain_together(profile: DeviceProfile):
    payback = PayBack([PAGED, Consumer(kind="tail"), PAGED], profile)

    assert payback.judge(10).pays
    assert not payback.judge(9).pays
