"""Speculation and overlap: rows that hold more slots than their tokens, followed by hand."""

from __future__ import annotations

import pytest

from kvdefrag.errors import ConfigError
from kvdefrag.sim.engine_types import StepKind


def test_a_row_holds_twice_the_window_ahead_and_what_is_rejected_is_used_again(
    serve, make_request, fixed_lengths
):
    s = serve(
        [make_request(0, [1, 2, 3], 9)],
        pool=32,
        spec_window=2,
        accepted=fixed_lengths([[2], [1], [2]], 2),
    )
    s.until("decode", 3)

    # Context 3, 5, 6: the row is filled up to 7, 9 and 10 before each step.
    rows = s.engine.rows
    assert [step.starts.tolist() for step in s.steps[1:]] == [[3], [5], [6]]
    assert [step.counts.tolist() for step in s.steps[1:]] == [[2], [2], [2]]
    assert (rows.committed_len[1], rows.allocated_len[1]) == (8, 10)
    assert s.slots(1) == list(range(1, 11))
    assert [step.output_tokens for step in s.steps] == [1, 2, 1, 2]


def test_at_the_end_the_over_allocated_tail_is_freed_and_the_rest_is_cached(
    serve, make_request, fixed_lengths
):
    s = serve(
        [make_request(0, [1, 2, 3], 4)], pool=16, spec_window=2, accepted=fixed_lengths([], 2)
    )

    s.run()

    # 3 + 2 + 2 tokens; the last verification keeps one more than was asked for, and its row goes
    # into the tree all the same. Slots 8 and 9 were ahead.
    assert s.engine.tree.evictable_size == 7
    assert s.free() == [10, 11, 12, 13, 14, 15, 16, 8, 9]
    assert s.engine.totals.output_tokens == 4


def test_slots_of_one_step_are_given_request_by_request(serve, make_request, fixed_lengths):
    requests = [make_request(0, [1, 2], 20), make_request(1, [5], 20)]
    s = serve(requests, pool=64, spec_window=2, accepted=fixed_lengths([[1, 2], [2, 2]], 2))

    s.until("decode", 2)

    # 3 slots are the prompts'; the first step takes 4 each, the second what was accepted.
    assert s.slots(1) == [1, 2, 4, 5, 6, 7, 12]
    assert s.slots(2) == [3, 8, 9, 10, 11, 13, 14]


def test_case_35_a_window_of_64_with_everything_rejected_leaks_nothing(
    serve, make_request, fixed_lengths
):
    requests = [make_request(i, [10 * i + 1, 10 * i + 2], 5) for i in range(2)]
    s = serve(requests, pool=512, spec_window=64, accepted=fixed_lengths([[1, 1]] * 8, 64))
    s.until("decode", 3)

    free = s.free()
    rows = s.engine.rows
    assert len(free) == len(set(free)) == 512 - int(rows.allocated_len[1:3].sum())
    assert rows.committed_len[1:3].tolist() == [5, 5]
    assert rows.allocated_len[1:3].tolist() == [4 + 128, 4 + 128]

    s.run()

    assert s.allocator.available_size() == 512 - s.engine.tree.evictable_size
    assert s.engine.tree.evictable_size == 2 * 6


def test_accepted_lengths_are_drawn_by_turn_for_those_that_run(serve, make_request, fixed_lengths):
    lengths = fixed_lengths([], 3)
    requests = [make_request(0, [1], 2, turn=7), make_request(1, [2], 6, turn=5)]
    s = serve(requests, pool=64, spec_window=3, accepted=lengths)

    s.run()

    assert lengths.asked == [[7, 5], [5]]


def test_a_window_without_accepted_lengths_is_refused(serve):
    with pytest.raises(ConfigError, match="spec_window 3"):
        serve([], pool=64, spec_window=3)


def test_case_24_under_overlap_the_slot_of_one_step_too_many_is_owned_once(serve, make_request):
    s = serve([make_request(0, [7, 8, 9], 2)], pool=16, overlap=True)

    s.run()

    # The second decode is launched before the first says that the request is finished. Its slot
    # holds the last token's row, so it is cached with the rest.
    assert s.story() == [
        ("prefill", [1], [0], [3]),
        ("decode", [1], [3], [1]),
        ("decode", [1], [4], [1]),
        ("idle", [], [], []),
    ]
    assert [step.finished_rows for step in s.steps] == [(), (), (1,), ()]
    assert s.engine.tree.evictable_size == 5
    assert s.free() == list(range(6, 17))


def test_case_24_a_row_may_serve_again_while_its_last_step_is_in_flight(serve, make_request):
    requests = [make_request(0, [1, 2], 2), make_request(1, [3, 4], 3, arrival=2.5)]
    s = serve(requests, pool=32, overlap=True, max_running=2)

    s.run()

    # Request 1 is admitted while the surplus step of request 0 is still to be taken in.
    assert [step.new_rows for step in s.steps if step.new_rows] == [(1,), (2,)]
    assert s.engine.totals.finished == 2
    assert s.engine.totals.output_tokens == 5
    assert s.allocator.available_size() + s.engine.tree.evictable_size == 32


def test_under_overlap_a_batch_that_wants_no_output_does_not_decode(serve, make_request):
    s = serve([make_request(0, [1, 2], 0), make_request(1, [3], 0)], pool=16, overlap=True)

    s.run()

    assert [step.kind for step in s.steps] == [StepKind.PREFILL, StepKind.IDLE]
    assert s.steps[1].finished_rows == (1, 2)
    assert s.engine.tree.evictable_size == 3


def test_a_batch_built_with_a_chunk_is_not_one_without_output_whatever_remains_of_it(
    serve, make_request
):
    requests = [
        make_request(0, [1], 0),
        make_request(1, [2], 0),
        make_request(2, list(range(10, 30)), 2),
        make_request(3, [3, 4], 2, arrival=0.5),
    ]
    s = serve(requests, pool=64, overlap=True, chunked_prefill=8, max_running=3)

    s.run()

    # The two that want no output stay in the running batch, finished, until a decode filters it.
    # So the last chunk has room for nobody else, although two rows are free.
    assert s.story()[:5] == [
        ("prefill", [1, 2, 3], [0, 0, 0], [1, 1, 6]),
        ("prefill", [3], [6], [8]),
        ("prefill", [3], [14], [6]),
        ("decode", [3], [20], [1]),
        ("prefill", [1], [0], [2]),
    ]


def test_under_overlap_the_reserve_follows_the_lengths_known_at_launch(
    serve, make_request, fixed_lengths
):
    s = serve(
        [make_request(0, [1, 2, 3], 20)],
        pool=64,
        spec_window=2,
        overlap=True,
        accepted=fixed_lengths([], 2),
    )

    s.until("decode", 3)

    # The second step is launched with the first one's result unknown: it has 4 slots for two
    # verifications of 2. Only the third sees 5 tokens.
    assert [step.starts.tolist() for step in s.steps[1:]] == [[3], [3], [5]]
    assert s.slots(1) == list(range(1, 10))
