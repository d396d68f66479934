"""Time averages: each sample stands for the time until the next one."""

from __future__ import annotations

import numpy as np
import pytest

from kvdefrag.sim.sampling import Series


def series(*samples: tuple[float, float], end: float):
    found = Series()
    for time_s, value in samples:
        found.add(time_s, {"x": value})
    return found.finish(end)


def test_a_sample_weighs_the_time_until_the_next_one() -> None:
    found = series((0, 10), (1, 20), (4, 40), end=6)

    assert found.weights.tolist() == [1, 3, 2]
    assert found.mean("x") == pytest.approx((10 + 3 * 20 + 2 * 40) / 6)
    assert found.max("x") == 40


@pytest.mark.parametrize(
    ("share", "value"),
    # In order of value, 20 holds for 3 of 6 seconds, 30 for 1 and 40 for 2.
    [(0.0, 20), (0.1, 20), (0.5, 20), (0.51, 30), (0.67, 40), (1.0, 40)],
)
def test_a_quantile_counts_time_not_samples(share: float, value: float) -> None:
    found = series((0, 40), (2, 30), (3, 20), end=6)

    assert found.quantile("x", share) == value


def test_a_single_sample_is_its_own_average_however_long_the_run() -> None:
    for end in (0.0, 5.0):
        found = series((0, 7), end=end)
        assert (found.mean("x"), found.quantile("x", 0.1), found.max("x")) == (7, 7, 7)


def test_samples_at_one_moment_weigh_the_same() -> None:
    found = series((3, 1), (3, 2), end=3)

    assert found.mean("x") == 1.5


def test_an_end_before_the_last_sample_gives_that_sample_no_weight() -> None:
    found = series((0, 10), (5, 20), end=4)

    assert found.weights.tolist() == [5, 0]
    assert found.mean("x") == 10


def test_without_samples_every_figure_is_zero() -> None:
    found = Series().finish(9.0)

    assert (found.mean("x"), found.quantile("x", 0.5), found.max("x")) == (0, 0, 0)
    assert found.thinned(10)["time_s"].tolist() == []


@pytest.mark.parametrize(("count", "most"), [(5, 3), (5, 5), (5, 50), (1000, 600), (1, 600)])
def test_a_thinned_series_keeps_first_and_last_and_no_more_than_asked(
    count: int, most: int
) -> None:
    found = series(*((float(n), n * 10.0) for n in range(count)), end=float(count))

    thin = found.thinned(most)

    assert len(thin["x"]) == len(thin["time_s"]) == min(count, most)
    assert (thin["time_s"][0], thin["time_s"][-1]) == (0, count - 1)
    assert np.array_equal(thin["x"], thin["time_s"] * 10)


def test_its_length_is_the_number_of_samples() -> None:
    found = Series()
    found.add(0.0, {"x": 1})

    assert len(found) == 1
