"""Copying rows."""

from __future__ import annotations

import pytest
import torch

from kvdefrag.core.mover import CountingMover, TorchMover
from kvdefrag.core.plan import MovePlan


def plan(src: list[int], dst: list[int]) -> MovePlan:
    return MovePlan(torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))


def rows(count: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    numbers = torch.arange(count).view(-1, *(1 for _ in shape)).expand(count, *shape)
    return numbers.to(dtype).clone()


def test_rows_of_every_buffer_are_copied():
    keys, scales = rows(8, 2, 3), rows(8, dtype=torch.float32)

    TorchMover([keys, scales]).copy(plan([7, 0, 5], [1, 0, 2]))

    assert keys[:, 0, 0].tolist() == [0, 7, 5, 3, 4, 5, 6, 7]
    assert (keys == keys[:, :1, :1]).all()
    assert scales.tolist() == [0, 7, 5, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("src", "dst"), [([1, 2, 3], [2, 3, 4]), ([2, 3, 4], [1, 2, 3]), ([5, 9], [9, 5])]
)
def test_case_1_overlapping_moves_read_the_old_rows(src: list[int], dst: list[int]):
    buffer = rows(12, 2)
    expected = buffer.clone()
    expected[dst] = buffer[src].clone()

    TorchMover([buffer]).copy(plan(src, dst))

    assert torch.equal(buffer, expected)


def test_case_47_an_empty_plan_touches_nothing():
    buffer = rows(4, 2)
    TorchMover([buffer]).copy(plan([], []))

    assert torch.equal(buffer, rows(4, 2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("width", [1, 3, 132])
def test_any_dtype_and_row_width_will_do(dtype: torch.dtype, width: int):
    buffer = torch.arange(4 * width).view(4, width).remainder(2).to(dtype)
    expected = buffer.clone()
    expected.view(torch.uint8)[2] = buffer.view(torch.uint8)[1]

    TorchMover([buffer]).copy(plan([1], [2]))

    assert torch.equal(buffer.view(torch.uint8), expected.view(torch.uint8))


def test_case_12_the_bytes_of_a_row_are_summed_over_unlike_buffers():
    keys = torch.zeros((4, 8, 192), dtype=torch.bfloat16)
    values = torch.zeros((4, 8, 128), dtype=torch.bfloat16)
    scales = torch.zeros(4, dtype=torch.float32)

    assert TorchMover([keys, values, scales]).row_bytes == 8 * 192 * 2 + 8 * 128 * 2 + 4
    assert TorchMover([]).row_bytes == 0


def test_a_counting_mover_knows_the_bytes_and_moves_nothing():
    mover = CountingMover(1152)
    mover.copy(plan([1], [2]))

    assert mover.row_bytes == 1152
