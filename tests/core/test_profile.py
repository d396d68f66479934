"""What contiguity is worth, from a file."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvdefrag.core.profile import DeviceProfile, load_profile
from kvdefrag.errors import ConfigError


def kernel(scattered: float = 1.0, paged: float = 2.0) -> dict[str, Any]:
    return {
        "name": "a kernel",
        "scattered_gbps": scattered,
        "paged_gbps": paged,
        "fixed_us": 0,
        "left_over_us": 0,
    }


def fields(**other: Any) -> dict[str, Any]:
    # One token is 10 layers x 100 bytes; a copy runs at half of 4 GB/s, read and write counted.
    return {
        "version": 1,
        "name": "round numbers",
        "layers": 10,
        "row_bytes": 100,
        "copy_gbps": 4,
        "relocation_efficiency": 0.5,
        "relocation_fixed_us": 3,
        "step_base_us": 0,
        "prefill_base_us": 0,
        "prefill_us_per_token": 0,
        "decode": {"stock": kernel(), "paged": kernel()},
        "verify": {"stock": kernel(), "paged": kernel(1.0, 4.0)},
        "transfer_us_per_descriptor": 16,
        "provenance": {},
        **other,
    }


def profile(**other: Any) -> DeviceProfile:
    return DeviceProfile.model_validate(fields(**other))


def test_a_slot_is_all_layers():
    assert profile().bytes_per_slot == 1000


def test_a_relocation_reads_and_writes_every_byte():
    # 2 x 1,000 bytes a row at 2,000 bytes a microsecond, and 3 us besides.
    assert profile().relocation_us(1) == 4
    assert profile().relocation_us(100) == 103
    assert profile().relocation_us(0) == 0


def test_the_gain_of_a_paged_token_is_the_difference_of_two_reads():
    assert profile().paged_gain_us() == 0.5
    assert profile().paged_gain_us(verify=True) == 0.75


def test_pages_that_read_slower_gain_nothing():
    slower = profile(decode={"stock": kernel(), "paged": kernel(2.0, 1.0)})

    assert slower.paged_gain_us() == 0.0


def test_a_copy_breaks_even_after_its_cost_over_its_gain():
    assert profile().break_even_steps(0.5) == 2.0
    assert profile().break_even_steps(0.25) == 4.0
    assert profile().break_even_steps(0.0) == float("inf")


def test_the_shipped_profile_breaks_even_as_computed_by_hand():
    shipped = load_profile(Path(str(files("kvdefrag.data") / "h200_mla61.json")))
    row = 61 * 1152

    assert shipped.bytes_per_slot == row
    cost = 2 * row / (4297 * 0.95 * 1e3)
    decode = row / 3660e3 - row / 3810e3
    verify = row / 1376e3 - row / 1792e3
    assert shipped.break_even_steps(shipped.paged_gain_us()) == pytest.approx(cost / decode)
    assert cost / decode == pytest.approx(45.5, abs=0.1)
    assert shipped.break_even_steps(shipped.paged_gain_us(verify=True)) == pytest.approx(
        cost / verify
    )
    assert cost / verify == pytest.approx(2.9, abs=0.1)


def test_a_profile_comes_back_from_its_file(tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fields()), encoding="utf-8")

    assert load_profile(path) == profile()


def test_a_missing_file_is_named(tmp_path: Path):
    path = tmp_path / "nowhere.json"

    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        load_profile(path)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"layers": 0}, "layers"),
        ({"copy_gbps": -1}, "copy_gbps"),
        ({"relocation_efficiency": 1.5}, "relocation_efficiency"),
        ({"version": 2}, "version"),
        ({"laiers": 3}, "laiers"),
        ({"decode": {"stock": kernel(), "paged": kernel(paged=0)}}, "decode.paged.paged_gbps"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, wrong: dict[str, Any], key: str):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fields(**wrong)), encoding="utf-8")

    with pytest.raises(ConfigError, match=key):
        load_profile(path)


@pytest.mark.parametrize("kernels", [{}, {"stock": kernel()}])
def test_a_profile_without_its_kernels_is_refused(tmp_path: Path, kernels: dict[str, Any]):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fields(verify=kernels)), encoding="utf-8")

    with pytest.raises(ConfigError, match="verify"):
        load_profile(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str):
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="file: "):
        load_profile(path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigError, match=r"profile\.json"):
        load_profile(path)
