"""Accepted lengths follow the measurement, within the window, and repeat under a seed."""

from __future__ import annotations

import numpy as np
import pytest

from kvdefrag.errors import ConfigError
from kvdefrag.sim.speculation import (
    AcceptanceData,
    AcceptedLengths,
    acceptance_rates,
    load_eagle_mtbench,
)


def lengths(window: int, seed: int = 0) -> AcceptedLengths:
    return AcceptedLengths(window, load_eagle_mtbench(), np.random.default_rng(seed))


def test_the_shipped_measurement_has_160_turns_of_3_62_tokens_a_step() -> None:
    data = load_eagle_mtbench()

    assert (len(data.tokens), len(data.steps), data.longest) == (160, 160, 6)
    assert data.tokens.sum() / data.steps.sum() == pytest.approx(3.62, abs=0.001)
    assert data.means[0] == 1026 / 335


def test_rates_reproduce_the_means_they_come_from() -> None:
    means = np.array([1.0, 1.5, 3.0, 5.9, 6.0])
    rates = acceptance_rates(means, 6)

    assert (rates[:, None] ** np.arange(6)).sum(axis=1) == pytest.approx(means)
    assert rates[0] == pytest.approx(0)
    assert rates[-1] == pytest.approx(1)


def test_a_rate_found_by_hand() -> None:
    assert acceptance_rates(np.array([1.75]), 3) == pytest.approx([0.5])


@pytest.mark.parametrize("mean", [0.9, 6.1])
def test_a_mean_that_no_rate_gives_is_refused(mean: float) -> None:
    with pytest.raises(ValueError, match=r"1\.\.6"):
        acceptance_rates(np.array([mean]), 6)


def test_each_turn_has_its_measured_mean_at_the_measured_window() -> None:
    data = load_eagle_mtbench()
    model = lengths(6)

    assert [model.mean(turn) for turn in range(model.turns)] == pytest.approx(data.means)


def test_draws_of_a_turn_approach_its_measured_mean() -> None:
    model = lengths(6)
    drawn = model.draw(np.full(40_000, 17))

    assert drawn.mean() == pytest.approx(load_eagle_mtbench().means[17], abs=0.03)


@pytest.mark.parametrize("window", [1, 2, 4, 6, 8])
def test_draws_fill_the_window_and_stay_in_it(window: int) -> None:
    model = lengths(window)
    drawn = model.draw(model.assign(5_000))

    assert drawn.dtype == np.int64
    assert np.unique(drawn).tolist() == list(range(1, window + 1))


def test_a_smaller_window_cuts_the_same_law_off() -> None:
    turns = np.arange(160)
    wide = lengths(6, seed=5).draw(turns)
    narrow = lengths(4, seed=5).draw(turns)

    assert narrow.tolist() == np.minimum(wide, 4).tolist()


def test_rates_of_zero_and_one_commit_one_token_and_the_whole_window() -> None:
    data = AcceptanceData(np.array([10, 60]), np.array([10, 10]), longest=6)
    model = AcceptedLengths(5, data, np.random.default_rng(0))

    assert set(model.draw(np.zeros(1_000, dtype=np.int64)).tolist()) == {1}
    assert set(model.draw(np.ones(1_000, dtype=np.int64)).tolist()) == {5}


def test_the_same_seed_gives_the_same_draws() -> None:
    def run(seed: int) -> list[list[int]]:
        model = lengths(4, seed)
        turns = model.assign(64)
        return [turns.tolist()] + [model.draw(turns).tolist() for _ in range(20)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_no_running_request_draws_nothing() -> None:
    drawn = lengths(4).draw(np.array([], dtype=np.int64))

    assert drawn.tolist() == []
    assert drawn.dtype == np.int64


@pytest.mark.parametrize("turn", [-1, 160])
def test_a_turn_that_was_not_measured_is_refused(turn: int) -> None:
    with pytest.raises(IndexError, match=r"0\.\.159"):
        lengths(4).draw(np.array([turn]))


def test_a_window_below_one_names_its_option() -> None:
    with pytest.raises(ConfigError, match="--spec-window"):
        lengths(0)
