"""The engine model on scenarios small enough to follow by hand. Every step takes one second."""

from __future__ import annotations

import pytest

from kvdefrag.errors import ConfigError
from kvdefrag.sim.engine import Engine
from kvdefrag.sim.engine_types import StepKind
from kvdefrag.sim.radix_node import path_slots


def test_one_request_takes_slots_in_order_and_leaves_them_in_the_tree(serve, make_request):
    s = serve([make_request(0, [7, 8, 9, 10], 3)], pool=16)

    s.run()

    # The prompt takes 1..4 and yields the first token; two decode steps take 5 and 6, and the
    # third token is never written.
    assert s.story() == [
        ("prefill", [1], [0], [4]),
        ("decode", [1], [4], [1]),
        ("decode", [1], [5], [1]),
    ]
    assert s.free() == [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert (s.engine.tree.evictable_size, s.engine.tree.protected_size) == (6, 0)
    assert s.engine.totals.output_tokens == 3


def test_a_prefill_batch_is_one_allocation_split_in_request_order(serve, make_request):
    s = serve([make_request(0, [1, 2, 3], 3), make_request(1, [4, 5], 3)], pool=32)

    s.until("decode", 2)

    # Prompts 1..3 and 4..5, then one slot each a step in batch order.
    assert s.story()[0] == ("prefill", [1, 2], [0, 0], [3, 2])
    assert s.free()[:2] == [10, 11]
    rows = s.engine.rows
    assert s.table[1, :5].tolist() == [1, 2, 3, 6, 8]
    assert s.table[2, :4].tolist() == [4, 5, 7, 9]
    assert rows.generation[1:3].tolist() == [1, 1]


def test_case_18_a_row_names_the_trees_slots_once_its_own_duplicates_are_free(serve, make_request):
    s = serve([make_request(0, [1, 2, 3, 4], 5), make_request(1, [1, 2, 3, 4], 5)], pool=32)

    s.until("prefill")

    # Neither found the other when it was matched, so both computed the prompt.
    assert s.steps[0].prompt_tokens == 8
    assert s.slots(1) == s.slots(2) == [1, 2, 3, 4]
    assert s.free()[-4:] == [5, 6, 7, 8]
    assert s.engine.tree.protected_size == 4
    (value,) = s.engine.tree.locked_path_values(s.engine.locked_nodes())
    assert value.tolist() == [1, 2, 3, 4]


def test_a_request_that_finishes_with_what_is_cached_already_frees_its_duplicates(
    serve, make_request
):
    s = serve([make_request(0, [1, 2, 3], 1), make_request(1, [1, 2, 9], 1)], pool=16)

    s.run()

    # The second shares two tokens with what the first has just left in the tree.
    assert s.free()[-2:] == [4, 5]
    assert sorted(node.slots.tolist() for node in s.engine.tree.nodes()) == [[1, 2], [3], [6]]
    assert s.steps[0].finished_rows == (1, 2)


def test_case_72_a_cached_prompt_is_reused_beyond_the_first_chunk_but_for_its_last_token(
    serve, make_request
):
    prompt = list(range(5000))
    again = make_request(1, prompt, 1, arrival=100.0)
    s = serve([make_request(0, prompt, 1), again], pool=16_384, chunked_prefill=2048, context=8192)

    s.run()

    assert [step.counts.tolist() for step in s.steps] == [[2048], [2048], [904], [], [1]]
    assert s.steps[-1].hit_tokens == 4999
    assert s.engine.totals.prefix_hit_rate == 4999 / 10_000


def test_a_long_prompt_is_prefilled_in_chunks_and_decodes_wait_for_it(serve, make_request):
    requests = [
        make_request(0, [100, 101], 9),
        make_request(1, list(range(20)), 2, arrival=0.5),
        make_request(2, [200, 201, 202], 2, arrival=0.5),
    ]
    s = serve(requests, pool=64, chunked_prefill=8)

    for _ in range(6):
        s.step()

    # The last chunk leaves 4 tokens of the step to the next request; no decode runs between.
    assert s.story() == [
        ("prefill", [1], [0], [2]),
        ("prefill", [2], [0], [8]),
        ("prefill", [2], [8], [8]),
        ("prefill", [2, 3], [16, 0], [4, 3]),
        ("decode", [1, 2, 3], [2, 20, 3], [1, 1, 1]),
        ("decode", [1], [3], [1]),
    ]
    assert [step.output_tokens for step in s.steps] == [1, 0, 0, 2, 3, 1]


def test_each_chunk_is_in_the_tree_before_the_next_is_computed(serve, make_request):
    s = serve([make_request(0, list(range(20)), 2)], pool=64, chunked_prefill=8)
    seen: list[tuple[int, int]] = []
    s.engine.before_step = lambda: seen.append(
        (s.engine.tree.protected_size, int(s.engine.rows.protected_len[1]))
    )

    s.run()

    # A chunk joins the tree after `before_step`; at the last step the whole prompt is there.
    assert seen[:4] == [(0, 0), (0, 0), (8, 8), (20, 20)]


def test_case_20_slots_moved_between_chunks_are_those_the_request_goes_on_with(serve, make_request):
    s = serve([make_request(0, list(range(20)), 2)], pool=64, chunked_prefill=8)
    s.step()
    s.step()
    (value,) = s.engine.tree.locked_path_values(s.engine.locked_nodes())
    old = value.clone()
    spare = s.allocator.alloc(8)
    value.copy_(spare)
    s.table[1, :8] = spare
    s.allocator.free(old)
    s.engine.check_integrity()

    s.run()

    kept = path_slots(s.engine.tree.match(s.engine.rows.job(1).request.tokens()).node)
    assert kept[:8].tolist() == spare.tolist()


def test_max_prefill_ends_a_batch_after_the_request_that_reaches_it(serve, make_request):
    requests = [make_request(i, [10 * i + j for j in range(4)], 1) for i in range(3)]
    s = serve(requests, pool=64, max_prefill=5)

    s.run()

    assert [step.counts.tolist() for step in s.steps] == [[4, 4], [4]]


def test_what_finished_keeps_its_place_until_the_next_decode_filters_it(serve, make_request):
    s = serve([make_request(0, [1], 2), make_request(1, [2], 1)], pool=64, max_running=1)

    s.run()

    # With one row the batch is full until a pass finds it empty; that pass runs nothing.
    assert s.story() == [
        ("prefill", [1], [0], [1]),
        ("decode", [1], [1], [1]),
        ("prefill", [1], [0], [1]),
    ]
    assert s.engine.rows.generation[1] == 2


def test_a_newcomer_joins_the_batch_at_its_end_and_takes_the_longest_free_row(serve, make_request):
    requests = [
        make_request(0, [1], 9),
        make_request(1, [2], 2),
        make_request(2, [3], 9),
        make_request(3, [4], 9, arrival=2.5),
    ]
    s = serve(requests, pool=64)

    s.until("decode", 4)

    assert s.engine.running.tolist() == [1, 3, 4]
    assert s.engine.rows.request_index[[1, 3, 4]].tolist() == [0, 2, 3]


def test_the_engine_waits_for_the_next_arrival(serve, make_request):
    s = serve([make_request(0, [1], 1), make_request(1, [2], 1, arrival=50.0)], pool=64)

    s.run()

    assert [step.kind for step in s.steps] == [StepKind.PREFILL, StepKind.IDLE, StepKind.PREFILL]
    assert (s.steps[1].idle_s, s.steps[2].start_s, s.engine.now) == (49.0, 50.0, 51.0)


def test_a_request_for_no_tokens_is_prefilled_and_generates_nothing(serve, make_request):
    s = serve([make_request(0, [1, 2], 0), make_request(1, [3], 2)], pool=64)

    s.run()

    assert s.steps[0].finished_rows == (1,)
    assert [step.output_tokens for step in s.steps] == [1, 1]
    assert s.engine.totals.finished == 2


def test_case_73_a_prompt_longer_than_the_pool_is_rejected_and_the_run_ends(serve, make_request):
    requests = [make_request(0, list(range(9000)), 5), make_request(1, [1, 2, 3], 2)]
    s = serve(requests, pool=8209, context=16_384)

    s.run()

    assert (s.engine.totals.rejected, s.engine.totals.finished) == (1, 1)
    assert s.engine.totals.arrived == 2


@pytest.mark.parametrize(("length", "rejected"), [(57, 0), (58, 1), (0, 1)])
def test_the_longest_admissible_prompt_is_seven_short_of_the_pool(
    serve, make_request, length, rejected
):
    s = serve([make_request(0, list(range(length)), 1)], pool=64)

    s.run()

    assert s.engine.totals.rejected == rejected


def test_an_output_that_does_not_fit_the_pool_is_clipped(serve, make_request):
    s = serve([make_request(0, [1, 2, 3, 4], 100)], pool=32)

    s.run()

    # 32 - 4 - 2 tokens: the same bound as admission's.
    assert s.engine.totals.output_tokens == 26
    assert (s.engine.totals.clipped, s.engine.totals.aborted) == (1, 0)


def test_cached_prefixes_make_room_least_recently_used_first(serve, make_request):
    requests = [
        make_request(0, [1, 2, 3, 4], 1),
        make_request(1, [5, 6, 7, 8], 1, arrival=10.0),
        make_request(2, [1, 2, 3, 4, 0], 1, arrival=20.0),
        make_request(3, [20, 21, 22], 1, arrival=30.0),
        make_request(4, [30, 31], 1, arrival=40.0),
    ]
    s = serve(requests, pool=12)

    s.run()

    # 4 + 4 + 1 + 3 cached tokens fill the pool. The last request evicts the second's prompt: the
    # first's has been used since by the third.
    prefills = [step for step in s.steps if step.kind is StepKind.PREFILL]
    assert [step.evicted_tokens for step in prefills] == [0, 0, 0, 0, 4]
    assert s.slots(1) == [5, 6]
    assert s.free() == [7, 8]


def test_options_that_make_no_sense_are_refused(serve):
    with pytest.raises(ConfigError, match="max_running: 0"):
        serve([], pool=64, max_running=0)


def test_a_table_that_is_too_small_is_refused(serve):
    s = serve([], pool=64)
    narrow = s.table[:, :-1].contiguous()

    with pytest.raises(ConfigError, match="too small"):
        Engine(s.options, s.allocator, narrow, iter([]), lambda _: 1.0)


def test_an_engine_without_requests_ends_at_once(serve):
    s = serve([], pool=64)

    assert s.run() == []
    assert s.engine.totals.prefix_hit_rate == 0.0
