"""Budgets of one prefill step, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvdefrag.core.allocator import SlotAllocator
from kvdefrag.sim.admission import Admission, TokenRatio, Verdict
from kvdefrag.sim.engine_types import EngineOptions
from kvdefrag.sim.radix import RadixTree
from kvdefrag.sim.request import Job


class Desk:
    """A pool with a cached prompt, and jobs to try on it."""

    def __init__(self, pool: int, *, cached: int = 0, **options: int) -> None:
        self.tree = RadixTree()
        self.allocator = SlotAllocator(pool, discipline="fifo")
        self.options = EngineOptions(pool_slots=pool, **options)
        tokens = np.arange(cached, dtype=np.int64)
        slots = self.allocator.alloc(cached)
        assert slots is not None
        self.cached = self.tree.insert(tokens, slots.numpy()).node

    def admission(self, remaining: list[int] | None = None, ratio: float = 0.5) -> Admission:
        left = np.array(remaining or [], dtype=np.int64)
        return Admission(self.tree, self.allocator, left, ratio, self.options)

    def job(self, make_request, prompt: int, output: int, *, hit: bool = False) -> Job:
        request = make_request(0, list(range(prompt)), output)
        job = Job(request, output, self.tree.root)
        if hit:
            job.node, job.matched = self.cached, self.cached.key.shape[0]
        return job


@pytest.mark.parametrize(("prompt", "verdict"), [(58, Verdict.CONTINUE), (59, Verdict.NO_SLOTS)])
def test_prompt_output_and_one_more_must_stay_below_what_is_free(make_request, prompt, verdict):
    desk = Desk(70)

    # 59 + 10 + 1 = 70, as many as are free: too much by one.
    assert desk.admission().add(desk.job(make_request, prompt, 10)) is verdict


def test_what_running_requests_still_need_is_set_aside(make_request):
    desk = Desk(70)

    # (20 + 10) * 0.5 = 15 are set aside: 55 are left.
    assert desk.admission([20, 10]).add(desk.job(make_request, 43, 11)) is Verdict.NO_SLOTS
    assert desk.admission([20, 10]).add(desk.job(make_request, 42, 11)) is Verdict.CONTINUE


def test_a_very_long_output_is_expected_to_need_4096_at_most(make_request):
    desk = Desk(10_000)

    assert desk.admission([100_000], ratio=1.0).add(desk.job(make_request, 5800, 90)) is (
        Verdict.CONTINUE
    )
    assert desk.admission([100_000], ratio=1.0).add(desk.job(make_request, 5813, 90)) is (
        Verdict.NO_SLOTS
    )


def test_evictable_slots_count_until_the_request_itself_locks_them(make_request):
    desk = Desk(70, cached=30)
    job = desk.job(make_request, 50, 30, hit=True)

    # 40 free + 30 evictable. It needs 20 + 30 + 1 = 51, but with its prefix locked only 40 are
    # left, so it is turned away and the lock undone.
    assert desk.admission().add(job) is Verdict.NO_SLOTS
    assert (desk.tree.evictable_size, desk.tree.protected_size) == (30, 0)

    small = desk.job(make_request, 50, 10, hit=True)
    admission = desk.admission()

    assert admission.add(small) is Verdict.CONTINUE
    assert (admission.hit_tokens, admission.prompt_tokens) == (30, 20)
    assert desk.tree.protected_size == 30


def test_a_prompt_longer_than_the_chunk_is_cut_and_reserves_no_output_yet(make_request):
    desk = Desk(1000, chunked_prefill=64)
    admission = desk.admission()
    job = desk.job(make_request, 100, 10)

    assert admission.add(job) is Verdict.STEP_FULL
    assert admission.chunked is job
    assert [(e.start, e.end) for e in admission.extends] == [(0, 64)]


def test_what_does_not_get_a_token_of_the_chunk_is_turned_away_unlocked(make_request):
    desk = Desk(1000, cached=30, chunked_prefill=64)
    admission = desk.admission()
    admission.add(desk.job(make_request, 64, 10))

    assert admission.add(desk.job(make_request, 60, 10, hit=True)) is Verdict.STEP_FULL
    assert len(admission.extends) == 1
    assert desk.tree.protected_size == 0


def test_the_request_that_reaches_max_prefill_is_the_last(make_request):
    desk = Desk(1000, max_prefill=50)
    admission = desk.admission()

    assert admission.add(desk.job(make_request, 49, 1)) is Verdict.CONTINUE
    assert admission.add(desk.job(make_request, 49, 1)) is Verdict.STEP_FULL
    assert len(admission.extends) == 2


def test_a_chunked_request_goes_on_even_if_nothing_seems_left(make_request):
    desk = Desk(100, chunked_prefill=16)
    job = desk.job(make_request, 60, 1)
    admission = desk.admission([300], ratio=1.0)

    admission.continue_chunked(job, 32)

    assert [(e.start, e.end) for e in admission.extends] == [(32, 48)]
    assert admission.chunked is job


def test_the_last_chunk_reserves_the_output(make_request):
    desk = Desk(100, chunked_prefill=32)
    job = desk.job(make_request, 60, 30)
    admission = desk.admission()

    admission.continue_chunked(job, 40)

    # 100 - 20 - 30 - 1 = 49 are left for others.
    assert admission.chunked is None
    assert admission.add(desk.job(make_request, 8, 39)) is Verdict.CONTINUE


def test_a_retracted_requests_tokens_count_as_done_again(make_request):
    desk = Desk(100, cached=10)
    job = desk.job(make_request, 30, 5, hit=True)
    job.retracted = True
    admission = desk.admission()
    admission.add(job)

    assert (admission.hit_tokens, admission.prompt_tokens, admission.redone_tokens) == (0, 0, 20)


def test_the_expected_share_falls_to_its_floor_in_600_steps():
    ratio = TokenRatio()
    assert ratio.current == 0.7

    for _ in range(300):
        ratio.decay()
    halfway = ratio.current
    for _ in range(400):
        ratio.decay()

    assert halfway == pytest.approx((0.7 + 0.098) / 2)
    assert ratio.current == pytest.approx(0.098)

    ratio.reset()

    assert ratio.current == 0.7


def test_a_high_conservativeness_expects_at_most_everything():
    assert TokenRatio(10.0).current == 1.0


def test_after_a_retraction_the_share_is_what_was_generated_and_20_steps_more():
    ratio = TokenRatio()

    ratio.estimate(np.array([10, 20]), np.array([100, 99]), 20)

    assert ratio.current == (30 + 40) / 200

    ratio.estimate(np.array([90]), np.array([100]), 20)

    assert ratio.current == 1.0
