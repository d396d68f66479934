"""The duty cycle in bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdefrag.core.budget import DutyBudget


def test_credit_gathers_up_to_the_cap():
    budget = DutyBudget(bytes_per_step=100, duty_bytes_per_step=30)

    credits = []
    for _ in range(5):
        budget.advance()
        credits.append(budget.credit)

    assert credits == [30, 60, 90, 100, 100]


def test_nothing_may_be_moved_before_the_first_step():
    assert DutyBudget(bytes_per_step=100, duty_bytes_per_step=30).credit == 0


def test_an_overage_is_paid_back_before_anything_moves_again():
    budget = DutyBudget(bytes_per_step=100, duty_bytes_per_step=30)
    budget.advance()
    budget.spend(100)

    credits = [budget.credit]
    for _ in range(4):
        budget.advance()
        credits.append(budget.credit)

    assert credits == [-70, -40, -10, 20, 50]


def test_bytes_that_were_not_moved_come_back():
    budget = DutyBudget(bytes_per_step=100, duty_bytes_per_step=100)
    budget.advance()
    budget.spend(80)
    budget.spend(-50)

    assert budget.credit == 70


def test_a_duty_above_the_cap_is_cut_to_it():
    budget = DutyBudget(bytes_per_step=10, duty_bytes_per_step=1000)
    budget.advance()

    assert budget.credit == 10


@given(
    st.integers(1, 100),
    st.integers(1, 100),
    st.lists(st.integers(1, 300), min_size=1, max_size=200),
)
def test_spending_stays_under_the_duty_over_any_time(cap: int, duty: int, wishes: list[int]):
    budget = DutyBudget(bytes_per_step=cap, duty_bytes_per_step=duty)
    spent = 0
    for wish in wishes:
        budget.advance()
        if budget.credit > 0:
            # One step may overshoot; it is paid back.
            budget.spend(wish)
            spent += wish

    assert spent <= len(wishes) * duty + max(wishes)
