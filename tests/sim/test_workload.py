"""Token identities follow the trace's blocks and meet nowhere else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.sim.readers import Selection, TraceRequest, open_trace
from kvdefrag.sim.workload import BlockVocabulary, Workload, output_tokens

IDS = st.integers(-(2**63), 2**64 - 1)


def request(
    tokens: int, blocks: tuple[int, ...] | None, *, index: int = 0, outputs: int = 4
) -> TraceRequest:
    return TraceRequest(index, 0.0, tokens, outputs, blocks, index + 1)


def test_tokens_are_the_dense_block_number_and_the_offset() -> None:
    tokens = Workload(block=4).prompt_tokens(request(6, (99, -5)))

    assert tokens.dtype == np.int64
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5]


def test_equal_blocks_give_equal_tokens_and_other_blocks_others() -> None:
    workload = Workload(block=4)
    left = workload.prompt_tokens(request(12, (1, 2, 3)))
    right = workload.prompt_tokens(request(12, (1, 2, 4), index=1))

    assert left[:8].tolist() == right[:8].tolist()
    assert not set(left[8:].tolist()) & set(right[8:].tolist())


def test_a_partial_block_is_a_prefix_of_the_full_one() -> None:
    workload = Workload(block=4)
    short = workload.prompt_tokens(request(6, (1, 2)))
    full = workload.prompt_tokens(request(8, (1, 2), index=1))

    assert short.tolist() == full[:6].tolist()


@given(st.lists(IDS, min_size=1, max_size=8, unique=True))
def test_ids_of_64_bits_do_not_collide(ids: list[int]) -> None:
    tokens = Workload(block=512).prompt_tokens(request(512 * len(ids), tuple(ids)))

    assert len(np.unique(tokens)) == 512 * len(ids)


def test_the_vocabulary_numbers_ids_by_first_appearance() -> None:
    vocabulary = BlockVocabulary()

    assert vocabulary.numbers([2**64 - 1, -1, 2**64 - 1]) == [0, 1, 0]
    assert vocabulary.numbers([5, -1]) == [2, 1]
    assert len(vocabulary) == 3


def test_prompts_without_blocks_share_nothing() -> None:
    workload = Workload(block=4, prefix_jitter=3)
    prompts = [workload.prompt_tokens(request(6, None, index=index)) for index in (0, 1, 2**31 - 1)]

    assert len(np.unique(np.concatenate(prompts))) == 18
    assert all(prompt.min() >= 2**62 for prompt in prompts)
    assert workload.prompt_tokens(request(6, None)).tolist() == prompts[0].tolist()


@pytest.mark.parametrize("blocks", [None, ()])
def test_an_empty_prompt_has_no_tokens(blocks: tuple[int, ...] | None) -> None:
    for jitter in (0, 2):
        workload = Workload(block=4, prefix_jitter=jitter)

        assert workload.prompt_tokens(request(0, blocks)).tolist() == []
        assert workload.prompt_length(request(0, blocks)) == 0


def test_generated_tokens_are_negative_and_unlike_every_other_requests() -> None:
    first = output_tokens(0, 0, 5)
    second = output_tokens(1, 0, 5)
    last = output_tokens(2**31 - 1, 2**31 - 5, 5)

    assert first.tolist() == [-1, -2, -3, -4, -5]
    assert len(np.unique(np.concatenate([first, second, last]))) == 15
    assert last.max() < 0


def test_generated_tokens_do_not_depend_on_how_they_are_asked_for() -> None:
    pieces = np.concatenate(
        [output_tokens(7, 0, 2), output_tokens(7, 2, 0), output_tokens(7, 2, 3)]
    )

    assert pieces.tolist() == output_tokens(7, 0, 5).tolist()


def test_a_number_of_blocks_that_disagrees_with_the_length_is_refused() -> None:
    with pytest.raises(TraceError, match="row 1: expected 2 blocks of 4 for 6 tokens, got 1"):
        Workload(block=4).prompt_tokens(request(6, (1,)))


# Jitter


@given(
    st.lists(IDS, min_size=1, max_size=6),
    st.integers(1, 16),
    st.integers(0, 15),
    st.integers(),
)
def test_a_jittered_prompt_is_its_blocks_cut_to_their_lengths(
    ids: list[int], last: int, jitter: int, seed: int
) -> None:
    workload = Workload(block=16, prefix_jitter=jitter, seed=seed)
    whole = {
        block_id: workload.prompt_length(request(16, (block_id,)))
        for block_id in dict.fromkeys(ids)
    }
    prompt = request(16 * (len(ids) - 1) + last, tuple(ids))
    expected = [whole[block_id] for block_id in ids]
    expected[-1] = min(last, expected[-1])
    tokens = workload.prompt_tokens(prompt)

    assert all(16 - jitter <= length <= 16 for length in whole.values())
    assert workload.prompt_length(prompt) == len(tokens) == sum(expected)
    numbers = workload.vocabulary.numbers(ids)
    assert tokens.tolist() == [
        number * 16 + offset
        for number, length in zip(numbers, expected, strict=True)
        for offset in range(length)
    ]


def test_jittered_lengths_do_not_depend_on_the_order_of_requests() -> None:
    forwards, backwards = (Workload(block=64, prefix_jitter=40, seed=3) for _ in range(2))
    requests = [request(64 * 3, (n, n + 1, n + 2), index=n) for n in range(20)]
    lengths = [forwards.prompt_length(item) for item in requests]

    assert lengths == [backwards.prompt_length(item) for item in reversed(requests)][::-1]


def test_jittered_lengths_depend_on_the_seed_and_are_pinned() -> None:
    def lengths(seed: int) -> list[int]:
        workload = Workload(block=512, prefix_jitter=100, seed=seed)
        return [workload.prompt_length(request(512, (block_id,))) for block_id in (0, 1, 2, -1)]

    assert lengths(0) == lengths(0) == [498, 432, 467, 470]
    assert lengths(0) != lengths(1)


def test_jitter_spreads_over_its_whole_range() -> None:
    workload = Workload(block=64, prefix_jitter=7)
    lengths = [workload.prompt_length(request(64, (block_id,))) for block_id in range(4_000)]

    assert np.bincount(lengths)[57:].min() > 400
    assert min(lengths) == 57


def test_jitter_ends_the_shared_prefixes_of_a_real_trace_off_page_boundaries() -> None:
    chosen = list(Selection(limit=50).apply(open_trace()))

    def share_on_page_boundary(jitter: int) -> float:
        workload = Workload(prefix_jitter=jitter)
        shared = []
        for left, right in pairwise(workload.prompt_tokens(item) for item in chosen):
            common = min(len(left), len(right))
            differ = np.flatnonzero(left[:common] != right[:common])
            shared.append(int(differ[0]) if len(differ) else common)
        return float(np.mean(np.array(shared) % 64 == 0))

    assert share_on_page_boundary(0) == 1.0
    assert share_on_page_boundary(63) < 0.2


def test_a_workload_without_jitter_has_the_lengths_of_the_trace() -> None:
    workload = Workload()

    for item in Selection(limit=100).apply(open_trace()):
        tokens = workload.prompt_tokens(item)
        assert len(tokens) == item.input_tokens == workload.prompt_length(item)


@pytest.mark.parametrize("jitter", [-1, 512, 600])
def test_a_jitter_out_of_range_names_its_option(jitter: int) -> None:
    with pytest.raises(ConfigError, match="--prefix-jitter"):
        Workload(prefix_jitter=jitter)


def test_a_block_below_one_names_its_option() -> None:
    with pytest.raises(ConfigError, match="--block"):
        Workload(block=0)
