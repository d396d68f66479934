from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdefrag_kernels import (
    BufferTable,
    Reason,
    compiled_variants,
    overlap,
    prewarm,
    relocate,
    relocate_rows,
    relocate_rows_torch,
    verdict,
)

EXAMPLES = 100 if torch.cuda.is_available() else 8
COUNTS = [0, 1, 2, 255, 256, 257, 511, 512, 513, 8192]


@pytest.fixture(params=["held", "staged"])
def through(request, device, monkeypatch):
    """Both ways of an overlapping move; the interpreter and small devices have only the second."""
    if request.param == "held" and device.type == "cpu":
        pytest.skip("registers hold rows on a GPU only")
    if request.param == "staged":
        monkeypatch.setattr(overlap, "meets", lambda _: False)


def slots(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype, device=device)


def agree(pool: Any, src: torch.Tensor, dst: torch.Tensor, *, disjoint: bool, **table: Any) -> None:
    relocate_rows(BufferTable(pool.buffers, **table), src, dst, disjoint=disjoint)
    relocate_rows_torch(pool.twin, src, dst, disjoint=disjoint)
    assert pool.same()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([1, 2, 3], [2, 3, 4]),
        ([2, 3, 4], [1, 2, 3]),
        ([5, 9], [9, 5]),
        ([1, 2, 3], [2, 3, 1]),
        ([4, 4, 4], [5, 6, 7]),
    ],
)
def test_case_1_an_overlapping_move_gives_every_destination_the_old_row(
    src, dst, device, make_pool, through
):
    pool = make_pool([48, 5], 12, device)
    before = [m.clone() for m in pool.buffers]
    relocate_rows(BufferTable(pool.buffers), slots(src, device), slots(dst, device))
    for rows, old in zip(pool.buffers, before, strict=True):
        expected = {d: old[s] for s, d in zip(src, dst, strict=True)}
        for slot in range(12):
            assert torch.equal(rows[slot], expected.get(slot, old[slot]))


@pytest.mark.parametrize("count", COUNTS)
def test_case_2_any_count_of_disjoint_moves_equals_the_reference(count, device, make_pool):
    pool = make_pool([32, 4], 2 * count + 2, device)
    src = torch.arange(1, count + 1, device=device)
    agree(pool, src, src + count, disjoint=True)


@pytest.mark.parametrize("count", COUNTS)
def test_case_2_any_count_of_shifted_rows_equals_the_clone_reference(
    count, device, make_pool, through
):
    pool = make_pool([32, 4], count + 2, device)
    src = torch.arange(1, count + 1, device=device)
    agree(pool, src, src + 1, disjoint=False)


def test_case_3_a_full_pool_is_compacted_within_one_mebibyte_of_scratch(device, make_pool, through):
    pool = make_pool([1152, 1152, 132], 1025, device)
    odd = torch.arange(1, 1025, 2, device=device)
    src = torch.cat([odd, odd + 1])
    dst = torch.arange(1, 1025, device=device)
    table = BufferTable(pool.buffers, scratch_bytes=1 << 20)
    assert table.overhead_bytes <= (1 << 20) + 8 * 1025 + 512
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    relocate_rows(table, src, dst)
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() == held
    relocate_rows_torch(pool.twin, src, dst)
    assert pool.same()


def test_case_3_too_little_scratch_is_declined_before_anything_moves(device, make_pool):
    pool = make_pool([12], 40, device)
    table = BufferTable(pool.buffers, scratch_bytes=32)
    src = torch.arange(1, 31, device=device)
    with pytest.raises(ValueError, match="30 overlapping moves need 92 bytes"):
        relocate_rows(table, src, src + 1)
    assert pool.same()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_case_4_a_stride_that_carries_past_two_to_the_31_reaches_its_row(dtype, device):
    # Three slots a gibibyte apart: the pages between are never touched.
    stride = (1 << 30) + 16
    memory = torch.empty(2 * stride + 64, dtype=torch.uint8, device=device)
    rows = memory.as_strided((3, 64), (stride, 1))
    rows.copy_(torch.arange(192, device=device).view(3, 64))
    old = rows.clone()
    table = BufferTable([rows])
    relocate_rows(table, slots([2], device, dtype), slots([1], device, dtype), disjoint=True)
    assert torch.equal(rows[1], old[2])
    assert torch.equal(rows[2], old[2])
    relocate_rows(table, slots([1, 2], device, dtype), slots([2, 1], device, dtype))
    assert torch.equal(rows[2], old[2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "slot"), [(1152, 3_728_271), (2048, 2_097_152), (2048, 1_048_576), (656, 3_273_604)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_case_4_rows_beyond_two_to_the_31_bytes_are_right(width, slot, dtype, gpu):
    memory = torch.empty(slot + 2, width, dtype=torch.uint8, device=gpu)
    near = slots([1, 2, slot - 1, slot], gpu)
    memory[near] = torch.randint(0, 256, (4, width), dtype=torch.uint8, device=gpu)
    old = memory[near].clone()
    table = BufferTable([memory])
    relocate_rows(table, slots([1, slot], gpu, dtype), slots([slot - 1, 2], gpu, dtype),
                  disjoint=True)  # fmt: skip
    assert torch.equal(memory[near], old[[0, 3, 0, 3]])
    relocate_rows(table, slots([1, slot], gpu, dtype), slots([slot, 1], gpu, dtype))
    assert torch.equal(memory[near], old[[3, 3, 0, 0]])


def test_case_6_scales_move_with_their_payload(device):
    payload = torch.randint(0, 256, (12, 64), dtype=torch.uint8, device=device)
    rows = payload.view(torch.float8_e4m3fn)
    scales = torch.rand(12, device=device)
    old = payload.clone(), scales.clone()
    relocate_rows(BufferTable([rows, scales]), slots([7], device), slots([3], device))
    assert torch.equal(payload[3], old[0][7])
    assert scales[3] == old[1][7]


def test_case_7_the_indexer_buffer_moves_with_the_latent_rows(device, make_pool):
    agree(make_pool([656, 132], 20, device), slots([9, 10, 18], device), slots([1, 2, 3], device),
          disjoint=True)  # fmt: skip


def test_case_8_a_pool_without_values_is_a_normal_case(device):
    keys = torch.randint(-9, 9, (5, 6), dtype=torch.int16, device=device)
    old = keys.clone()
    relocate_rows(BufferTable([keys]), slots([4], device), slots([2], device), disjoint=True)
    assert torch.equal(keys, old[[0, 1, 4, 3, 4]])


def test_case_9_state_tensors_outside_the_table_stay_as_they_are(device, make_pool):
    pool = make_pool([64] * 4, 30, device)
    states = [torch.rand(8, 33, device=device) for _ in range(3)]
    old = [s.clone() for s in states]
    agree(pool, slots([20, 21], device), slots([3, 4], device), disjoint=True)
    assert all(map(torch.equal, states, old))


@pytest.mark.parametrize("guard", [1, 4, 16])
@pytest.mark.parametrize("width", [132, 656, 1152, 160, 192, 1, 3, 7, 255, 16_384])
@pytest.mark.parametrize("disjoint", [True, False])
def test_case_10_every_row_width_is_moved_whole_and_alone(
    width, guard, disjoint, device, make_pool
):
    pool = make_pool([width], 9, device, guard=guard)
    dst = [1, 2, 6] if disjoint else [4, 5, 8]
    agree(pool, slots([4, 5, 8], device), slots(dst[::-1], device), disjoint=disjoint)


@pytest.mark.parametrize("width", [512, 528, 576, 640])
def test_case_11_no_row_width_is_taken_for_a_multiple_of_the_tile(width, device, make_pool):
    pool = make_pool([2 * width], 50, device, dtype=torch.bfloat16)
    agree(pool, torch.arange(26, 50, device=device), torch.arange(1, 25, device=device),
          disjoint=True)  # fmt: skip


def test_case_12_each_buffer_has_its_own_width_and_stride(device, make_pool):
    pool = make_pool([384, 256, 2048, 1024], 33, device)
    agree(pool, slots([30, 2, 17], device), slots([1, 31, 5], device), disjoint=True)
    agree(pool, slots([30, 2, 17], device), slots([2, 17, 30], device), disjoint=False)


@pytest.mark.gpu
def test_case_13_two_hundred_different_calls_use_at_most_four_variants(gpu, make_pool):
    pool = make_pool([1152, 132, 3], 5000, gpu)
    table = BufferTable(pool.buffers)
    plain, other = (relocate.programs(f"_{m}") for m in ("relocate", "overlap"))
    for kernel in (plain.check_moves, plain.copy_rows, other.hold_rows, other.stage_rows):
        kernel.device_caches.clear()  # other pools of this process have variants of their own
    prewarm(table)
    built = compiled_variants()
    assert 0 < built <= 4
    index = torch.randperm(4999, device=gpu) + 1
    for n in range(1, 201):
        dtype = (torch.int32, torch.int64)[n % 2]
        src, dst = index[n : 2 * n].to(dtype), index[2 * n : 3 * n].to(dtype)
        begin = time.perf_counter()
        # Odd offsets: the index pointers' alignment differs from call to call.
        relocate_rows(table, src[n % 5 :], dst[n % 5 :], disjoint=n % 3 > 0)
        assert time.perf_counter() - begin < 0.05
    assert compiled_variants() == built


def test_case_14_prewarm_changes_no_live_byte(device, make_pool):
    pool = make_pool([1152, 132, 3], 40, device, guard=4)
    prewarm(BufferTable(pool.buffers))
    assert pool.same()


@pytest.mark.parametrize(
    ("src", "dst", "reason"),
    [
        ([1, 2], [0, 3], Reason.SLOT_ZERO),
        ([0, 2], [1, 3], Reason.SLOT_ZERO),
        ([1, 2], [5, 5], Reason.DUPLICATE_DST),
        ([1, 2], [10, 4], Reason.OUT_OF_RANGE),
        ([-1, 2], [3, 4], Reason.OUT_OF_RANGE),
        ([1, (1 << 32) + 2], [3, 4], Reason.OUT_OF_RANGE),
        ([1 << 30, 2], [3, 4], Reason.OUT_OF_RANGE),
        ([1, 2], [3, 1 << 30], Reason.OUT_OF_RANGE),
        ([1, 2], [2, 3], Reason.OVERLAP),
        ([1, 1], [2, 3], Reason.DUPLICATE_SRC),
    ],
)
def test_case_16_a_broken_plan_voids_the_whole_launch(src, dst, reason, device, make_pool):
    pool = make_pool([64, 12], 10, device)
    table = BufferTable(pool.buffers)
    src, dst = slots(src, device), slots(dst, device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"slot|duplicate|destinations"):
            relocate_rows(table, src, dst, disjoint=True, distinct_src=True)
        relocate.launch(table, src, dst, disjoint=True, distinct_src=True)
    else:
        relocate_rows(table, src, dst, disjoint=True, distinct_src=True)
    assert verdict(table) == reason
    assert pool.same()
    agree(pool, slots([4], device), slots([5], device), disjoint=True)
    relocate_rows(table, slots([4], device), slots([6], device), disjoint=True)
    relocate_rows_torch(pool.twin, slots([4], device), slots([6], device))
    assert verdict(table) == Reason(0)
    assert pool.same()
    assert table.state[relocate.HISTORY] == reason
    assert table.state[relocate.VOIDED] == 1


@pytest.mark.parametrize("disjoint", [True, False])
def test_one_bad_entry_among_thousands_voids_them_all(disjoint, device, make_pool):
    pool = make_pool([16], 9000, device)
    src = torch.arange(1, 4001, device=device)
    dst = src + 4500
    dst[3999] = dst[17]
    table = BufferTable(pool.buffers)
    relocate.launch(table, src, dst, disjoint=disjoint)
    assert verdict(table) == Reason.DUPLICATE_DST
    assert pool.same()
    relocate.launch(table, src, src + 4500, disjoint=disjoint)
    relocate_rows_torch(pool.twin, src, src + 4500)
    assert verdict(table) == Reason(0)
    assert pool.same()


def test_entries_that_stay_are_neither_checked_nor_moved(device, make_pool):
    pool = make_pool([48], 10, device)
    src, dst = slots([0, 3, 4, 0, 7], device), slots([0, 3, 2, 0, 7], device)
    agree(pool, src, dst, disjoint=True)


def test_an_empty_plan_and_the_whole_pool(device, make_pool):
    pool = make_pool([20, 32], 301, device)
    empty = slots([], device)
    agree(pool, empty, empty, disjoint=True)
    agree(pool, empty, empty, disjoint=False)
    every = torch.arange(1, 301, device=device)
    agree(pool, every, every.flip(0), disjoint=False)


def test_slices_of_an_index_tensor_may_start_anywhere(device, make_pool):
    pool = make_pool([32], 60, device)
    index = torch.randperm(59, dtype=torch.int32).to(device) + 1
    agree(pool, index[1:12], index[13:24], disjoint=True)


def test_a_resized_pool_is_read_again_into_the_same_table(device, make_pool):
    old, new = make_pool([64, 8], 20, device), make_pool([64, 8], 90, device, guard=4)
    table = BufferTable(old.buffers)
    address = table.lines.data_ptr()
    table.refresh(new.buffers)
    assert table.lines.data_ptr() == address
    assert table.slots == 90
    relocate_rows(table, slots([88], device), slots([3], device), disjoint=True)
    relocate_rows_torch(new.twin, slots([88], device), slots([3], device))
    assert new.same()
    assert old.same()


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_any_plan_over_any_buffers_equals_the_reference(data, device, make_pool):
    count = data.draw(st.integers(1, 60))
    size = data.draw(st.integers(2 * count, 150))
    widths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    disjoint = data.draw(st.booleans())
    pool = make_pool(widths, size + 1, device, guard=data.draw(st.sampled_from([1, 4, 16])))
    order = data.draw(st.permutations(range(1, size + 1)))
    src = order[:count]
    free = order[count : 2 * count]
    dst = free if disjoint else data.draw(st.permutations(src + free))[:count]
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    scratch = data.draw(st.sampled_from([4096, 1 << 16]))
    agree(pool, slots(src, device, dtype), slots(dst, device, dtype), disjoint=disjoint,
          scratch_bytes=scratch)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_payloads_survive_bit_for_bit(dtype, device, make_pool):
    pool = make_pool([64], 12, device, dtype=dtype)
    for memory in (*pool.memory, *pool.twin_memory):
        memory[5] = 0xFF
        memory[5, 17] = 0xA3
    agree(pool, slots([5, 6], device), slots([1, 2], device), disjoint=True)


@pytest.mark.gpu
@pytest.mark.parametrize("disjoint", [True, False])
def test_a_captured_graph_moves_new_plans_of_the_same_size(disjoint, gpu, make_pool):
    pool = make_pool([1152, 132], 600, gpu)
    table = BufferTable(pool.buffers)
    prewarm(table)
    src, dst = slots(range(1, 101), gpu), slots(range(101, 201), gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        relocate_rows(table, src, dst, disjoint=disjoint)
    for seed in range(3):
        plan = torch.randperm(599, generator=torch.Generator().manual_seed(seed)).to(gpu) + 1
        src.copy_(plan[:100])
        dst.copy_(plan[100:200] if disjoint else src.roll(1))
        graph.replay()
        relocate_rows_torch(pool.twin, src, dst)
        assert pool.same()
    dst[5] = dst[8]
    graph.replay()
    assert verdict(table) == Reason.DUPLICATE_DST
    assert pool.same()


@pytest.mark.gpu
def test_nothing_synchronises_with_the_host(gpu, make_pool, no_sync):
    pool = make_pool([1152, 132], 600, gpu)
    table = BufferTable(pool.buffers)
    prewarm(table)
    src, dst = slots(range(1, 101), gpu), slots(range(201, 301), gpu)
    with no_sync():
        relocate_rows(table, src, dst, disjoint=True)
        relocate_rows(table, src, dst + 1)


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.sampled_from(COUNTS[1:]), disjoint=st.booleans())
def test_large_plans_on_many_layers_equal_the_reference(seed, count, disjoint, gpu, make_pool):
    pool = make_pool([1152, 656, 132, 256, 4, 1152, 4096], 20_000, gpu, seed=seed)
    order = torch.randperm(19_999, generator=torch.Generator().manual_seed(seed)).to(gpu) + 1
    src = order[:count]
    dst = order[count : 2 * count] if disjoint else order[count // 2 : count // 2 + count]
    agree(pool, src, dst, disjoint=disjoint)


def test_wrong_arguments_are_refused_by_name(device, make_pool):
    pool = make_pool([16], 10, device)
    table = BufferTable(pool.buffers)
    one = slots([1], device)
    with pytest.raises(ValueError, match="src must be int32 or int64"):
        relocate_rows(table, one.float(), one)
    with pytest.raises(ValueError, match="dst must be 1-D"):
        relocate_rows(table, one, one.view(1, 1))
    with pytest.raises(ValueError, match="src has 1 entries, dst has 2"):
        relocate_rows(table, one, slots([1, 2], device))
    with pytest.raises(ValueError, match=r"src is torch\.int64, dst is torch\.int32"):
        relocate_rows(table, one, one.int())
    with pytest.raises(ValueError, match="needs disjoint"):
        relocate_rows(table, one, one, distinct_src=True)
    with pytest.raises(ValueError, match="rows must be contiguous"):
        BufferTable([torch.zeros(4, 6, device=device)[:, ::2]])
    with pytest.raises(ValueError, match="up to 16384 bytes"):
        BufferTable([torch.zeros(4, 16385, dtype=torch.uint8, device=device)])
    with pytest.raises(ValueError, match="at least one buffer"):
        BufferTable([])
    with pytest.raises(ValueError, match="was built for 1"):
        table.refresh([pool.buffers[0], pool.buffers[0]])
