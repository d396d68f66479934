"""Wrong frees: refused, or counted and ignored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdefrag.core.slot_checks import HostChecks, NoChecks, make_checks
from kvdefrag.errors import SlotError


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def checks_with(*live: int, strict: bool, size: int = 10) -> HostChecks:
    checks = HostChecks(size, strict=strict)
    checks.taken(ints(*live))
    return checks


def test_a_live_slot_may_be_freed_once_and_again_after_it_was_handed_out():
    checks = checks_with(3, 4, strict=True)

    assert checks.admit(ints(4, 3)).tolist() == [4, 3]
    with pytest.raises(SlotError, match=r"\[4\]"):
        checks.admit(ints(4))
    checks.taken(ints(4))
    assert checks.admit(ints(4)).tolist() == [4]


@pytest.mark.parametrize(
    ("freed", "named"),
    [
        ([6, 7, 2], (2,)),
        ([6, 6], (6,)),
        ([6, 7, 6, 7, 6], (6, 7, 6)),
        ([0], (0,)),
        ([11], (11,)),
        ([-1, 6], (-1,)),
        ([1 << 40, 6], (1 << 40,)),
    ],
)
def test_case_38_a_wrong_free_names_the_slot_and_frees_nothing(
    freed: list[int], named: tuple[int, ...]
):
    checks = checks_with(5, 6, 7, strict=True)

    with pytest.raises(SlotError) as caught:
        checks.admit(ints(*freed))

    assert caught.value.slots == named
    assert str(list(named)) in str(caught.value)
    assert "1..10" in str(caught.value)
    # Nothing was freed: all three are live still.
    assert checks.admit(ints(5, 6, 7)).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("freed", "admitted"),
    [
        ([6, 7, 2], [6, 7]),
        ([6, 6], [6]),
        ([6, 7, 6, 7, 6, 5], [6, 7, 5]),
        ([0], []),
        ([11, 5, -1], [5]),
        ([1 << 40, 6], [6]),
    ],
)
def test_case_38_a_wrong_free_is_ignored_and_counted_when_lenient(
    freed: list[int], admitted: list[int]
):
    checks = checks_with(5, 6, 7, strict=False)

    assert checks.admit(ints(*freed)).tolist() == admitted
    assert checks.violations == len(freed) - len(admitted)
    assert checks.admit(ints(*admitted)).tolist() == []


def test_at_most_eight_slots_are_named():
    checks = HostChecks(100, strict=True)

    with pytest.raises(SlotError) as caught:
        checks.admit(torch.arange(1, 50))

    assert caught.value.slots == (1, 2, 3, 4, 5, 6, 7, 8)


def test_freeing_nothing_is_fine():
    assert checks_with(strict=True).admit(ints()).tolist() == []


def test_a_move_makes_the_old_slot_free_and_the_new_one_live():
    checks = checks_with(5, 6, strict=False)
    checks.moved(ints(5, 0, 6), ints(8, 0, 6))

    assert checks.admit(ints(5, 8, 6, 0)).tolist() == [8, 6]


def test_a_chain_of_moves_keeps_every_slot_on_it_live():
    checks = checks_with(1, 2, strict=False)
    checks.moved(ints(1, 2), ints(2, 3))

    assert checks.admit(ints(1, 2, 3)).tolist() == [2, 3]


def test_clear_takes_every_slot_back_and_the_new_size():
    checks = checks_with(5, strict=False)
    checks.clear(3)
    checks.taken(ints(3))

    assert checks.admit(ints(5, 3)).tolist() == [3]


def test_without_checks_everything_is_admitted():
    checks = NoChecks()
    checks.taken(ints(1))
    checks.moved(ints(1), ints(2))
    checks.clear(5)

    assert checks.admit(ints(0, 7, 7)).tolist() == [0, 7, 7]
    assert checks.violations == 0


def test_the_mode_and_the_device_choose_the_checks():
    assert isinstance(make_checks(4, "off", torch.device("cpu")), NoChecks)
    # Another device could not be looked at without waiting for it.
    assert isinstance(make_checks(4, "strict", torch.device("meta")), NoChecks)
    lenient = make_checks(4, "lenient", torch.device("cpu"))
    assert lenient.admit(ints(1)).tolist() == []
    strict = make_checks(4, "strict", torch.device("cpu"))
    with pytest.raises(SlotError):
        strict.admit(ints(1))


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(-2, 14), max_size=6)), max_size=20))
def test_a_set_of_live_slots_gives_the_same_answers(ops: list[tuple[bool, list[int]]]):
    lenient, strict = HostChecks(10, strict=False), HostChecks(10, strict=True)
    live: set[int] = set()
    wrong = 0
    for take, slots in ops:
        if take:
            taken = [s for s in slots if 1 <= s <= 10]
            live |= set(taken)
            lenient.taken(ints(*taken))
            strict.taken(ints(*taken))
            continue
        expected = []
        for slot in slots:
            if slot in live:
                live.remove(slot)
                expected.append(slot)
        wrong += len(slots) - len(expected)
        assert lenient.admit(ints(*slots)).tolist() == expected
        assert lenient.violations == wrong
        if len(expected) == len(slots):
            assert strict.admit(ints(*slots)).tolist() == slots
        else:
            with pytest.raises(SlotError):
                strict.admit(ints(*slots))
            strict.admit(ints(*expected))
