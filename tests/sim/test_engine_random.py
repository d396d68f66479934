"""The engine model under random workloads: nothing leaks, everything ends, runs repeat."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=0, max_size=30),
        st.integers(0, 25),
        st.integers(0, 8),
    ),
    max_size=14,
)
SETTINGS = st.fixed_dictionaries(
    {
        "pool": st.integers(24, 120),
        "max_running": st.integers(1, 5),
        "chunked_prefill": st.integers(3, 30),
        "max_prefill": st.integers(1, 40),
        "conservativeness": st.sampled_from([0.01, 0.3, 1.0]),
        "overlap": st.booleans(),
    }
)
PLACEMENT = st.sampled_from(
    [("fifo", False), ("sorted", False), ("two_ended", False), ("two_ended", True)]
)


class Drawn:
    def __init__(self, window: int) -> None:
        self.window = window
        self.rng = np.random.default_rng(0)

    def draw(self, request_turns):
        return self.rng.integers(1, self.window + 1, request_turns.shape[0])


def build(serve, make_request, requests, options, placement, window):
    arrival, made = 0.0, []
    for index, (prompt, output, gap) in enumerate(requests):
        arrival += gap
        made.append(make_request(index, prompt, output, arrival=arrival))
    return serve(
        made,
        discipline=placement[0],
        reservation=placement[1],
        spec_window=window,
        accepted=Drawn(window) if window else None,
        **options,
    )


@settings(max_examples=150)
@given(data=st.data())
def test_every_slot_has_one_owner_after_each_step_and_every_request_ends(data, serve, make_request):
    requests = data.draw(REQUESTS)
    options = data.draw(SETTINGS)
    placement = data.draw(PLACEMENT)
    window = data.draw(st.sampled_from([0, 0, 1, 3]))
    s = build(serve, make_request, requests, options, placement, window)

    s.run()

    totals = s.engine.totals
    assert totals.arrived == len(requests)
    assert totals.finished + totals.rejected + totals.aborted == totals.arrived
    assert s.engine.rows.live_rows().tolist() == []
    assert s.engine.tree.protected_size == 0
    assert s.allocator.available_size() + s.engine.tree.evictable_size == options["pool"]
    assert s.allocator.reserved_size() == 0
    if not window:
        assert totals.aborted == 0


@settings(max_examples=30)
@given(data=st.data())
def test_two_runs_of_the_same_workload_are_the_same_run(data, serve, make_request):
    requests = data.draw(REQUESTS)
    options = data.draw(SETTINGS)
    placement = data.draw(PLACEMENT)
    window = data.draw(st.sampled_from([0, 2]))
    first, second = (
        build(serve, make_request, requests, options, placement, window) for _ in range(2)
    )
    first.run()
    second.run()

    assert first.story() == second.story()
    assert first.engine.totals == second.engine.totals
    assert first.free() == second.free()
    assert (first.table == second.table).all()


@settings(max_examples=60)
@given(data=st.data())
def test_what_is_generated_does_not_depend_on_placement(data, serve, make_request):
    requests = data.draw(REQUESTS)
    options = data.draw(SETTINGS)
    runs = [
        build(serve, make_request, requests, options, placement, 0)
        for placement in (("fifo", False), ("sorted", False))
    ]
    for run in runs:
        run.run()

    # Both orders free and take the same numbers of slots: only where they lie differs.
    assert runs[0].story() == runs[1].story()
