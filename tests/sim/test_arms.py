"""Arms: which there are, what sets them apart, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdefrag.config import Config
from kvdefrag.errors import ConfigError
from kvdefrag.sim.arms import NAMES, built_in, choose, from_file
from kvdefrag.sim.report.verdict import CHAIN


def test_all_arms_run_by_default_cheapest_first_and_the_bound_last() -> None:
    assert [arm.name for arm in choose(None, [], page=64)] == [
        "stock",
        "sorted",
        "placement",
        "placement+reservation",
        "placement+tenure",
        "all",
        "default",
        "packed",
    ]


def test_arms_come_in_the_order_in_which_they_are_named() -> None:
    assert [arm.name for arm in choose(["packed", "stock"], [], page=64)] == ["packed", "stock"]


def test_every_arm_of_the_verdict_exists() -> None:
    assert {name for step in CHAIN for name in (step.arm, step.before)} <= set(NAMES)


@pytest.mark.parametrize(
    ("name", "free_list", "reservation", "mode", "tenure", "evacuation"),
    [
        ("stock", "fifo", False, "off", None, None),
        ("sorted", "sorted", False, "off", None, None),
        ("placement", "two_ended", False, "off", None, None),
        ("placement+reservation", "two_ended", True, "off", None, None),
        ("placement+tenure", "two_ended", False, "threshold", True, False),
        ("all", "two_ended", True, "threshold", True, True),
    ],
)
def test_an_arm_has_the_mechanisms_of_its_name(
    name: str,
    free_list: str,
    reservation: bool,
    mode: str,
    tenure: bool | None,
    evacuation: bool | None,
) -> None:
    config = built_in(name, page=64).config

    assert (config.placement.free_list, config.placement.reservation) == (free_list, reservation)
    assert config.relocation.mode == mode
    if tenure is not None:
        mechanisms = config.relocation.mechanisms
        assert (mechanisms.tenure, mechanisms.evacuation) == (tenure, evacuation)


def test_the_default_arm_is_the_policy_as_shipped() -> None:
    assert built_in("default", page=64).config == Config()


def test_only_the_bound_is_packed_and_every_arm_says_what_it_does() -> None:
    arms = choose(None, [], page=64)

    assert [arm.name for arm in arms if arm.packed] == ["packed"]
    assert len({arm.description for arm in arms}) == len(arms)


def test_every_arm_works_with_the_page_of_the_run() -> None:
    assert {arm.config.page for arm in choose(None, [], page=32)} == {32}


def test_a_page_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ConfigError, match="page: 48"):
        built_in("stock", page=48)


def test_an_unknown_arm_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--arms: 'stok' is not one of stock, sorted") as caught:
        choose(["stok"], [], page=64)
    assert "packed" in str(caught.value)


def test_a_policy_file_is_one_more_arm_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "eager.yaml"
    path.write_text("placement:\n  reservation: false\n", encoding="utf-8")

    arms = choose(["stock"], [path], page=64)

    assert [arm.name for arm in arms] == ["stock", "eager"]
    assert arms[1].config.placement.reservation is False
    assert "eager.yaml" in arms[1].description


def test_a_policy_file_for_another_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text("page: 128\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"page: 128 in .*wide\.yaml differs from --page 64"):
        from_file(path, page=64)
    assert from_file(path, page=128).config.page == 128


def test_a_wrong_policy_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("placment: {}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="placment"):
        from_file(path, page=64)


@pytest.mark.parametrize("names", [["stock", "stock"], ["stock", "sorted", "stock"]])
def test_an_arm_cannot_be_given_twice(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="'stock' is given twice"):
        choose(names, [], page=64)


def test_a_file_cannot_take_the_name_of_an_arm(tmp_path: Path) -> None:
    path = tmp_path / "stock.yaml"
    path.write_text("enabled: true\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="'stock' is given twice"):
        choose(["stock"], [path], page=64)
