"""Late results, counted in steps."""

from __future__ import annotations

import torch

from kvdefrag.core.readback import Readback


def test_without_delay_a_result_comes_at_once():
    got: list[int] = []
    readback = Readback(0)

    readback.submit(torch.tensor(7), got.append)

    assert got == [7]
    assert readback.pending == 0


def test_a_result_comes_exactly_so_many_steps_late():
    got: list[int] = []
    readback = Readback(2)
    readback.submit(torch.tensor(7), got.append)

    readback.advance()
    assert (got, readback.pending) == ([], 1)
    readback.advance()
    assert (got, readback.pending) == ([7], 0)
    readback.advance()
    assert got == [7]


def test_results_come_oldest_first_and_each_at_its_own_step():
    got: list[tuple[str, int]] = []
    readback = Readback(2)
    readback.submit(torch.tensor(1), lambda v: got.append(("a", v)))
    readback.submit(torch.tensor(2), lambda v: got.append(("b", v)))
    readback.advance()
    readback.submit(torch.tensor(3), lambda v: got.append(("c", v)))
    readback.advance()

    assert got == [("a", 1), ("b", 2)]
    readback.advance()
    assert got == [("a", 1), ("b", 2), ("c", 3)]


def test_a_tensor_comes_as_it_was_when_submitted():
    got: list[list[int]] = []
    readback = Readback(1)
    value = torch.tensor([1, 2, 3])
    readback.submit_tensor(value, lambda t: got.append(t.tolist()))
    value.zero_()
    readback.advance()

    assert got == [[1, 2, 3]]


def test_truth_values_come_as_zero_and_one():
    got: list[int] = []
    readback = Readback(1)
    readback.submit(torch.tensor(True), got.append)
    readback.submit(torch.tensor(False), got.append)
    readback.advance()

    assert got == [1, 0]


def test_what_is_under_way_can_be_forgotten():
    got: list[int] = []
    readback = Readback(1)
    readback.submit(torch.tensor(7), got.append)
    readback.clear()
    readback.advance()

    assert (got, readback.pending) == ([], 0)


def test_a_delivery_may_submit_again_without_being_delivered_twice():
    got: list[int] = []
    readback = Readback(1)

    def again(value: int) -> None:
        got.append(value)
        if value < 3:
            readback.submit(torch.tensor(value + 1), again)

    readback.submit(torch.tensor(1), again)
    for _ in range(4):
        readback.advance()

    assert got == [1, 2, 3]
