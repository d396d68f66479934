"""Demands for slots."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvdefrag.core.demand import Demand, Kind, ragged


def test_the_total_is_a_host_integer_over_all_requests():
    demand = Demand(Kind.EXTEND, np.array([3, 1]), np.array([0, 9]), np.array([70, 1]))

    assert demand.total == 71
    assert type(demand.total) is int


def test_nobody_wants_nothing():
    none = np.zeros(0, dtype=np.int64)

    assert Demand(Kind.DECODE, none, none, none).total == 0


def test_a_demand_cannot_be_changed():
    one = np.ones(1, dtype=np.int64)
    demand = Demand(Kind.PLAIN, one, one, one)

    with pytest.raises(dataclasses.FrozenInstanceError):
        demand.kind = Kind.DECODE  # type: ignore[misc]


def test_ranges_follow_one_another():
    starts, counts = np.array([7, 40, 3, 0]), np.array([2, 0, 3, 1])

    assert ragged(starts, counts).tolist() == [7, 8, 3, 4, 5, 0]
    assert ragged(starts, counts * 0).tolist() == []
    assert ragged(starts[:0], counts[:0]).tolist() == []
    assert ragged(starts[:0], counts[:0]).dtype == np.int64
