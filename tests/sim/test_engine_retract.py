"""What happens when decode cannot allocate, followed by hand."""

from __future__ import annotations

import pytest


def crowded(serve, make_request, pool, prompts, output, **options):
    """Admit more than fits: running requests are expected to need almost nothing more."""
    requests = [make_request(i, prompt, output) for i, prompt in enumerate(prompts)]
    return serve(requests, pool=pool, conservativeness=0.01, **options)


def test_case_44_the_request_with_the_longest_prompt_goes_first_and_comes_back(
    serve, make_request
):
    s = crowded(serve, make_request, 40, [[1, 2], [3, 4, 5, 6]], 30)

    while not s.steps or not s.steps[-1].retracted_rows:
        s.step()

    # 2 + 4 prompt tokens and 17 decode steps of both fill 40 slots. The 18th step takes the
    # second, whose 17 slots come free; 20 should, so its prompt leaves the tree as well.
    step = s.steps[-1]
    assert (step.start_s, step.rows.tolist(), step.retracted_rows) == (18.0, [1], (2,))
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

    s.run()

    order = [step.new_rows for step in s.steps if step.new_rows]
    assert s.engine.totals.retractions == 1
    assert len(order) == 3
    # Request 2 takes the place of request 1, which is prefilled last.
    assert s.engine.rows.request_index[1:3].tolist() == [1, 2] or order[1] == (2,)
    assert s.steps[-1].finished_rows != ()
    last = [step for step in s.steps if step.redone_tokens]
    assert len(last) == 1
    assert last[0].start_s > next(st.start_s for st in s.steps if 1 in st.counts.tolist())


def test_the_batch_comes_out_of_a_retraction_in_order_of_output(serve, make_request):
    requests = [
        make_request(0, [1, 2], 30),
        make_request(1, [3], 30),
        make_request(2, [4, 5, 6], 30),
    ]
    s = serve(requests, pool=42, conservativeness=0.01)

    while not s.steps or not s.steps[-1].retracted_rows:
        s.step()

    # Equal outputs: the shorter prompt stands first, the longest was retracted.
    assert s.steps[-1].retracted_rows == (3,)
    assert s.engine.running.tolist() == [2, 1]
    assert s.steps[-1].rows.tolist() == [2, 1]


@pytest.mark.parametrize("reservation", [False, True])
def test_case_44_three_requests_that_fit_one_at_a_time_all_finish(
    serve, make_request, reservation
):
    prompts = [[10 * i + j for j in range(4)] for i in range(3)]
    s = crowded(
        serve, make_request, 64, prompts, 56, discipline="two_ended", reservation=reservation
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
    # A window of 4 needs 8 slots beyond the context; at 17 tokens 24 slots are too few.
    s = serve(
        [make_request(0, list(range(10)), 12), make_request(1, [1], 1, arrival=99.0)],
        pool=24,
        spec_window=4,
        accepted=fixed_lengths([[1]] * 20, 4),
    )

    s.run()

    totals = s.engine.totals
    assert (totals.aborted, totals.finished) == (1, 1)
    assert s.engine.rows.generated[1] == 1
    assert [step.aborted_rows for step in s.steps if step.aborted_rows] == [(1,)]
    assert s.engine.new_token_ratio == pytest.approx(0.7)
