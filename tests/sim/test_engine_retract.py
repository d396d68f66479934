"""What happens when decode cannot allocate, followed by hand.

A conservativeness of 0.01 admits more than fits: running requests are expected to need almost
nothing more.
"""

from __future__ import annotations

import pytest


def test_case_44_the_request_with_the_longest_prompt_goes_first_and_comes_back(serve, make_request):
    requests = [make_request(0, [1, 2], 30), make_request(1, [3, 4, 5, 6], 30)]
    s = serve(requests, pool=40, conservativeness=0.01)

    while not s.steps or not s.steps[-1].retracted_rows:
        s.step()

    # Two prefills, then 2 + 4 prompt tokens and 17 decode steps of both fill 40 slots. The next
    # retracts the second, whose 17 slots come free; 20 should, so its prompt leaves the tree too.
    step = s.steps[-1]
    assert (step.start_s, step.rows.tolist(), step.retracted_rows) == (19.0, [1], (2,))
    assert step.evicted_tokens == 4
    assert s.engine.waiting == 1
    assert s.allocator.available_size() == 17 + 4 - 1
    assert s.engine.new_token_ratio == 1.0

    s.run()

    # It prefills its prompt and the 18 tokens it had, which count as work done twice.
    totals = s.engine.totals
    assert (totals.finished, totals.retractions, totals.redone_tokens) == (2, 1, 4 + 18)
    assert totals.output_tokens == 60
    assert totals.hit_tokens == 0


def test_among_equal_prompts_the_one_with_fewer_output_tokens_goes_first(serve, make_request):
    requests = [make_request(0, [1, 2], 30, arrival=5.0), make_request(1, [3, 4], 30)]
    s = serve(requests[::-1], pool=40, conservativeness=0.01)

    while not s.steps or not s.steps[-1].retracted_rows:
        s.step()

    (row,) = s.steps[-1].retracted_rows
    assert s.engine.rows.request_index[row] == 0


def test_what_is_retracted_waits_behind_those_that_wait_already(serve, make_request):
    requests = [
        make_request(0, [1, 2], 30),
        make_request(1, [3, 4, 5, 6], 30),
        make_request(2, [7], 1, arrival=17.5),
    ]
    s = serve(requests, pool=40, conservativeness=0.01, max_running=2)
    order: list[int] = []
    while s.engine.totals.finished < 3:
        step = s.step()
        order += s.engine.rows.request_index[list(step.new_rows)].tolist()

    assert order == [0, 1, 2, 1]
    assert s.engine.totals.retractions == 1


def test_the_batch_comes_out_of_a_retraction_in_order_of_output_and_prompt(serve, make_request):
    requests = [
        make_request(0, [1, 2], 30),
        make_request(1, [3], 30),
        make_request(2, [4, 5, 6], 20, arrival=5.0),
    ]
    s = serve(requests, pool=42, conservativeness=0.01)

    while not s.steps or not s.steps[-1].retracted_rows:
        s.step()

    # The last to come has the fewest outputs. Of the two others, which have as many each, the
    # shorter prompt now stands first.
    assert s.steps[-1].retracted_rows == (3,)
    assert s.steps[-1].rows.tolist() == [2, 1]
    assert s.engine.running.tolist() == [2, 1]


@pytest.mark.parametrize("reservation", [False, True])
def test_case_44_three_requests_retracted_to_one_all_finish_without_a_leak(
    serve, make_request, reservation
):
    requests = [
        make_request(i, [10 * i + j for j in range(4)], 40, arrival=2.5 * (i == 2))
        for i in range(3)
    ]
    s = serve(
        requests,
        pool=64,
        conservativeness=0.01,
        discipline="two_ended",
        reservation=reservation,
    )

    s.run()

    totals = s.engine.totals
    assert (totals.finished, totals.aborted) == (3, 0)
    assert totals.retractions >= 2
    assert s.allocator.available_size() + s.engine.tree.evictable_size == 64
    assert s.engine.tree.protected_size == 0


def test_case_44_the_last_request_is_aborted_when_even_alone_it_does_not_fit(
    serve, make_request, fixed_lengths
):
    # A window of 4 needs 8 slots beyond the context: with 17 tokens, 8 of them generated, the
    # pool's 24 slots are too few.
    s = serve(
        [make_request(0, list(range(10)), 12), make_request(1, [1], 1, arrival=99.0)],
        pool=24,
        spec_window=4,
        accepted=fixed_lengths([[1]] * 20, 4),
    )

    s.run()

    totals = s.engine.totals
    assert (totals.aborted, totals.finished) == (1, 1)
    assert [step.aborted_rows for step in s.steps if step.aborted_rows] == [(1,)]
    assert s.engine.totals.output_tokens == 8 + 1
    assert s.engine.new_token_ratio == pytest.approx(0.7)
