"""Prices of steps, computed by hand from a profile of round numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdefrag.core.profile import DeviceProfile
from kvdefrag.errors import ConfigError
from kvdefrag.profiles import default_profile, profile_or_default
from kvdefrag.sim.cost import StepTimer, attention_us
from kvdefrag.sim.engine_types import StepInfo, StepKind

NONE = np.empty(0, dtype=np.int64)


def profile(**changes: Any) -> DeviceProfile:
    """1,000 bytes a slot in 10 layers; a kernel reads a scattered token in 1 us, others faster."""
    stock = {"name": "s", "scattered_gbps": 1, "paged_gbps": 1, "fixed_us": 2, "left_over_us": 0}
    paged = {"name": "p", "scattered_gbps": 2, "paged_gbps": 4, "fixed_us": 1, "left_over_us": 3}
    slow = {**stock, "scattered_gbps": 0.5, "paged_gbps": 0.5}
    values: dict[str, Any] = {
        "version": 1,
        "name": "round numbers",
        "layers": 10,
        "row_bytes": 100,
        "copy_gbps": 8,
        "relocation_efficiency": 0.5,
        "relocation_fixed_us": 7,
        "step_base_us": 100,
        "prefill_base_us": 50,
        "prefill_us_per_token": 3,
        "decode": {"stock": stock, "paged": paged},
        "verify": {"stock": slow, "paged": paged},
        "transfer_us_per_descriptor": 1,
        "provenance": {},
    }
    return DeviceProfile.model_validate({**values, **changes})


def decode(*contexts: int) -> StepInfo:
    starts = np.array(contexts, dtype=np.int64)
    return StepInfo(0, StepKind.DECODE, 0.0, starts, starts, np.ones_like(starts))


def prefill(*counts: int) -> StepInfo:
    ones = np.array(counts, dtype=np.int64)
    return StepInfo(0, StepKind.PREFILL, 0.0, ones, ones * 0, ones)


@pytest.mark.parametrize(
    ("coverage", "microseconds"),
    [
        # 400 tokens are 400,000 bytes: 200 us at 2 GB/s and 100 us at 4 GB/s; 10 layers of 1 us,
        # and of 3 us more where both kinds occur.
        (0.0, 200 + 10),
        (1.0, 100 + 10),
        (0.5, 100 + 50 + 10 + 30),
        (0.25, 150 + 25 + 10 + 30),
    ],
)
def test_attention_reads_pages_and_left_overs_at_their_own_rates(
    coverage: float, microseconds: float
) -> None:
    prices = profile()

    assert attention_us(prices.decode["paged"], prices, 400, coverage) == pytest.approx(
        microseconds
    )


def test_a_kernel_that_does_not_look_at_pages_takes_the_same_for_every_layout() -> None:
    prices = profile()
    took = {attention_us(prices.decode["stock"], prices, 400, c) for c in (0.0, 0.25, 1.0)}

    assert took == {400 + 20}


def test_a_decode_step_costs_its_base_and_its_attention() -> None:
    timer = StepTimer(profile(), verify=False)
    timer.coverage = 0.5

    seconds = timer.price(decode(299, 99))

    # 400 tokens are read, the new ones included.
    assert seconds == pytest.approx((100 + 420) / 1e6)
    assert timer.step_s == pytest.approx(seconds)
    assert timer.paged_s == pytest.approx((100 + 190) / 1e6)
    assert timer.attention_stock_us == pytest.approx(420)
    assert timer.attention_paged_us == pytest.approx(190)
    assert timer.decode_steps == 1


def test_verification_has_prices_of_its_own() -> None:
    timer = StepTimer(profile(), verify=True)

    assert timer.price(decode(399)) == pytest.approx((100 + 800 + 20) / 1e6)


def test_a_prefill_step_costs_its_base_and_its_tokens_under_either_kernel() -> None:
    timer = StepTimer(profile(), verify=False)

    assert timer.price(prefill(10, 5)) == pytest.approx((50 + 45) / 1e6)
    assert timer.paged_s == timer.step_s
    assert (timer.decode_steps, timer.attention_stock_us) == (0, 0.0)


def test_copies_are_charged_once_to_the_next_step() -> None:
    timer = StepTimer(profile(), verify=False)
    free = timer.price(prefill(10))

    # 8 rows are read and written: 16,000 bytes at 4 GB/s are 4 us, and 7 us are fixed.
    timer.charge(8)
    charged = timer.price(prefill(10))

    assert charged - free == pytest.approx(11 / 1e6)
    assert timer.price(prefill(10)) == pytest.approx(free)
    assert timer.relocation_s == pytest.approx(11 / 1e6)
    assert timer.step_s == timer.paged_s == pytest.approx(3 * free + 11 / 1e6)


def test_no_rows_cost_nothing() -> None:
    timer = StepTimer(profile(), verify=False)
    timer.charge(0)
    timer.price(prefill(1))

    assert timer.relocation_s == 0.0


def test_a_slot_weighs_its_rows_of_all_layers() -> None:
    assert StepTimer(profile(), verify=False).row_bytes == 1000


def test_the_shipped_profile_says_where_every_price_comes_from() -> None:
    prices = default_profile()

    assert prices == profile_or_default(None)
    told = set(prices.provenance)
    figures = set(type(prices).model_fields) - {
        "version",
        "name",
        "layers",
        "row_bytes",
        "provenance",
        "decode",
        "verify",
    }
    assert figures | {"decode.stock", "decode.paged", "verify.stock", "verify.paged"} <= told
    assert all(
        text.startswith(("measured", "assumed", "derived")) for text in prices.provenance.values()
    )


def test_a_profile_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(profile().model_dump_json(), encoding="utf-8")

    assert profile_or_default(path) == profile()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers: Input should be greater than or equal to 1"),
        ({"copy_gbps": -1}, "copy_gbps: Input should be greater than 0"),
        ({"relocation_efficiency": 1.5}, "relocation_efficiency: Input should be less than"),
        ({"version": 2}, "version: Input should be 1"),
        ({"laiers": 3}, "laiers: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_profile_is_refused_by_file_and_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "mine.json"
    values = {**json.loads(profile().model_dump_json()), **change}
    path.write_text(json.dumps(values), encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        profile_or_default(path)

    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="profile"):
        profile_or_default(path)


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        profile_or_default(tmp_path / "missing.json")
