"""Those who store slot numbers follow a move: all of them or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdefrag.core.holders import TableRows, ValueTensors, live_rows, range_index, remap_all
from kvdefrag.core.view import EngineView

SIZE = 30


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def swap(src: list[int], dst: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    lut = torch.arange(SIZE + 1)
    inverse = lut.clone()
    lut[src] = torch.tensor(dst)
    inverse[dst] = torch.tensor(src)
    return lut, inverse


def table_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_flat_positions_of_several_ranges_follow_one_another():
    table = torch.zeros((4, 10), dtype=torch.int32)

    index = range_index(table, ints(2, 0, 3), ints(1, 4, 9), ints(4, 4, 10))

    assert index.tolist() == [21, 22, 23, 39]
    assert index.dtype == torch.int64


def test_a_range_that_ends_before_it_starts_is_empty():
    table = torch.zeros((4, 10), dtype=torch.int32)

    assert range_index(table, ints(1, 2), ints(5, 0), ints(3, 2)).tolist() == [20, 21]
    assert range_index(table, ints(), ints(), ints()).tolist() == []


def test_case_16_only_the_live_part_of_a_row_is_rewritten():
    table = table_of([5, 5, 5, 5], [5, 6, 5, 7], [8, 5, 5, 5])
    lut, _ = swap([5, 8], [20, 21])

    TableRows(table, ints(1, 2), ints(2, 1)).remap(lut)

    assert table.tolist() == [[5, 5, 5, 5], [20, 6, 5, 7], [21, 5, 5, 5]]
    assert table.dtype == torch.int32


def test_the_table_is_rewritten_in_place():
    table = table_of([0, 0], [5, 6])
    address = table.data_ptr()
    TableRows(table, ints(1), ints(2)).remap(swap([5], [20])[0])

    assert (table.data_ptr(), table[1].tolist()) == (address, [20, 6])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_case_20_value_tensors_keep_their_dtype_and_their_storage(dtype: torch.dtype):
    values = [torch.tensor([5, 9], dtype=dtype), torch.tensor([], dtype=dtype)]
    addresses = [v.data_ptr() for v in values]

    ValueTensors(values).remap(swap([5], [20])[0])

    assert values[0].tolist() == [20, 9]
    assert [v.dtype for v in values] == [dtype, dtype]
    assert [v.data_ptr() for v in values] == addresses


def test_case_17_every_holder_of_a_shared_slot_follows():
    table = table_of([0, 0, 0], [5, 6, 11], [5, 6, 12], [5, 6, 13])
    node = torch.tensor([5, 6])
    lut, inverse = swap([5, 6], [20, 21])

    remap_all([TableRows(table, ints(1, 2, 3), ints(3, 3, 2)), ValueTensors([node])], lut, inverse)

    assert table.tolist() == [[0, 0, 0], [20, 21, 11], [20, 21, 12], [20, 21, 13]]
    assert node.tolist() == [20, 21]


class Failing:
    """Raises half way through its rewriting."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def remap(self, lut: torch.Tensor) -> None:
        half = self.values.shape[0] // 2
        self.values[:half] = lut[self.values[:half]]
        if lut[5] == 20:
            raise RuntimeError("half way")
        self.values[half:] = lut[self.values[half:]]


def test_a_holder_that_fails_half_way_undoes_those_before_it_and_itself():
    table = table_of([0, 0], [5, 6])
    node, broken, after = torch.tensor([6]), torch.tensor([5, 6, 5, 7]), torch.tensor([5])
    holders = [
        TableRows(table, ints(1), ints(2)),
        ValueTensors([node]),
        Failing(broken),
        ValueTensors([after]),
    ]

    with pytest.raises(RuntimeError, match="half way"):
        remap_all(holders, *swap([5, 6], [20, 21]))

    assert table[1].tolist() == [5, 6]
    assert node.tolist() == [6]
    assert broken.tolist() == [5, 6, 5, 7]
    assert after.tolist() == [5]


def test_live_rows_reach_as_far_as_slots_are_held():
    table = table_of([0] * 4, [5, 5, 5, 5], [5, 5, 5, 5])
    view = EngineView(0, table, ints(1, 2), ints(0, 0), ints(0, 0), ints(1, 1), ints(2, 3))

    live_rows(view, held=ints(0, 4, 0)).remap(swap([5], [20])[0])

    # What is reserved moves with the row; a row without reservations ends at its allocated length.
    assert table[1].tolist() == [20, 20, 20, 20]
    assert table[2].tolist() == [20, 20, 20, 5]

    live_rows(view).remap(swap([20], [6])[0])
    assert table[1].tolist() == [6, 6, 20, 20]
