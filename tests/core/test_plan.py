"""Move plans and what is wrong with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdefrag.core.plan import MovePlan, check_plan, violation
from kvdefrag.errors import PlanError

SIZE = 12


def plan(*pairs: tuple[int, int]) -> MovePlan:
    src, dst = [p[0] for p in pairs], [p[1] for p in pairs]
    return MovePlan(torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))


def free_mask(*free: int) -> torch.Tensor:
    mask = torch.zeros(SIZE + 1, dtype=torch.bool)
    mask[list(free)] = True
    return mask


FREE = free_mask(1, 2, 3, 4)


def test_only_pairs_that_differ_are_moves():
    moves = plan((9, 1), (0, 0), (5, 5), (8, 2))

    assert moves.capacity == 4
    assert moves.moved_rows().tolist() == 2
    assert plan().moved_rows().tolist() == 0


@pytest.mark.parametrize(
    "moves",
    [plan(), plan((0, 0)), plan((0, 0), (0, 0), (7, 7), (7, 7)), plan((9, 1), (8, 2), (0, 0))],
)
def test_a_sound_plan_passes(moves: MovePlan):
    assert not bool(violation(moves, FREE, SIZE))
    check_plan(moves, FREE, SIZE)


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        (plan((9, 1), (9, 2)), "source 9 is named twice"),
        (plan((9, 1), (0, 0), (8, 1)), "destination 1 is named twice"),
        (plan((3, 1)), "source 3 is a free slot"),
        (plan((9, 8)), "destination 8 is not a free slot"),
        (plan((0, 1)), "source 0 is outside 1..12"),
        (plan((9, 0)), "destination 0 is outside 1..12"),
        (plan((13, 1)), "source 13 is outside 1..12"),
        (plan((9, 1 << 40)), "destination 1099511627776 is outside 1..12"),
        (plan((9, -1)), "destination -1 is outside 1..12"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_named(moves: MovePlan, words: str):
    assert bool(violation(moves, FREE, SIZE))
    with pytest.raises(PlanError, match=words):
        check_plan(moves, FREE, SIZE)


def test_a_refused_plan_keeps_its_shape_and_moves_nothing():
    moves = plan((9, 1), (0, 0), (8, 2))

    voided = moves.voided_if(torch.tensor(True))
    assert voided.src.tolist() == voided.dst.tolist() == [0, 0, 0]
    passed = moves.voided_if(torch.tensor(False))
    assert torch.equal(passed.src, moves.src)
    assert torch.equal(passed.dst, moves.dst)
    assert moves.voided_if(None) is moves


@given(st.lists(st.tuples(st.integers(-1, 14), st.integers(-1, 14)), max_size=6))
def test_sets_say_the_same(pairs: list[tuple[int, int]]):
    real = [p for p in pairs if p[0] != p[1]]
    sources, targets = [p[0] for p in real], [p[1] for p in real]
    live = set(range(5, SIZE + 1))
    sound = (
        len(set(sources)) == len(sources)
        and len(set(targets)) == len(targets)
        and set(sources) <= live
        and set(targets) <= {1, 2, 3, 4}
    )

    assert bool(violation(plan(*pairs), FREE, SIZE)) is not sound
    if sound:
        check_plan(plan(*pairs), FREE, SIZE)
    else:
        with pytest.raises(PlanError):
            check_plan(plan(*pairs), FREE, SIZE)
