"""How long requests last, in steps."""

from __future__ import annotations

import numpy as np
import torch

from kvdefrag.core.lifetimes import Lifetimes
from kvdefrag.core.view import EngineView

TABLE = torch.zeros((4, 8), dtype=torch.int32)


def at(step: int, **generations: int) -> EngineView:
    rows = np.array([int(name[1:]) for name in generations], dtype=np.int64)
    zeros = np.zeros_like(rows)
    named = np.array(list(generations.values()), dtype=np.int64)
    return EngineView(step, TABLE, rows, named, zeros, zeros, zeros)


def test_nothing_is_known_before_a_row_was_given_out_again():
    lifetimes = Lifetimes(4)
    assert lifetimes.remaining() is None

    lifetimes.observe(at(1, r1=0, r2=0))
    lifetimes.observe(at(50, r1=0))

    assert lifetimes.remaining() is None


def test_half_the_mean_lifetime_remains():
    lifetimes = Lifetimes(4)
    for step in range(10, 20):
        lifetimes.observe(at(step, r1=0))
    lifetimes.observe(at(20, r1=1))

    assert lifetimes.remaining() == 5.0

    for step in range(21, 50):
        lifetimes.observe(at(step, r1=1))
    lifetimes.observe(at(60, r1=2))

    # Ten and thirty steps: the pause before the row was given out again does not count.
    assert lifetimes.remaining() == 10.0


def test_a_request_of_one_step_lasted_one_step():
    lifetimes = Lifetimes(4)
    lifetimes.observe(at(7, r3=4))
    lifetimes.observe(at(8, r3=5))

    assert lifetimes.remaining() == 0.5


def test_a_step_without_requests_changes_nothing():
    lifetimes = Lifetimes(4)
    lifetimes.observe(at(1, r1=0))
    lifetimes.observe(at(2))
    lifetimes.observe(at(3, r1=1))

    assert lifetimes.remaining() == 0.5


def test_memory_follows_the_rows():
    assert Lifetimes(4096).nbytes == 3 * 8 * 4096


def test_after_a_clear_the_same_generation_is_another_request():
    # SGLang 0.5.17 counts generations from 0 again when its cache is flushed.
    lifetimes = Lifetimes(4)
    lifetimes.observe(at(1, r1=0))
    lifetimes.observe(at(10, r1=1))
    assert lifetimes.remaining() == 0.5
    lifetimes.clear()

    lifetimes.observe(at(10_000, r1=1))
    lifetimes.observe(at(10_010, r1=2))

    assert lifetimes.remaining() == 0.5
