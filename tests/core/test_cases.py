"""Cases from public reports of other engines that the core can show, each by its number."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvdefrag.config import Config
from kvdefrag.core.demand import Demand, Kind
from kvdefrag.core.free_stats import free_stats
from kvdefrag.core.layout import layout_stats
from kvdefrag.core.policy import Gather, Lower
from kvdefrag.core.tracker import Tracker
from kvdefrag.errors import SlotError
from tests.machine.engine import Engine, Shape, settings_for

PREFIX = list(range(1000, 1012))
FORMS = pytest.mark.parametrize("device_form", [False, True])


def engine_of(**shape: object) -> Engine:
    defaults: dict[str, object] = {"size": 127, "page": 4, "rows": 6, "width": 64}
    return Engine(Shape(**(defaults | shape)))


def use(engine: Engine, mode: str, /, *, rows: int = 64, **rules: object) -> None:
    config = settings_for(
        mode, bytes_per_step=rows * engine.mover.row_bytes, dry_run=False, max_live=32
    )
    relocation = config.relocation.model_copy(update=rules)
    engine.defragmenter.configure(
        engine.paged(config.model_copy(update={"relocation": relocation}))
    )


def gather(engine: Engine, row: int, *, steps: int = 1, rows: int = 64) -> int:
    """Gather one request over some steps; returns how many rows moved."""
    use(engine, "gather", rows=rows)
    engine.defragmenter.request(Gather(row, int(engine.generation[row])))
    return sum(engine.compact().moved_rows or 0 for _ in range(steps))


def runs(engine: Engine, row: int) -> int:
    return int(stats(engine, row).runs)


def stats(engine: Engine, row: int) -> object:
    length = torch.tensor([engine.requests[row].committed])
    return layout_stats(engine.table, torch.tensor([row]), length, page_sizes=(4,))


def interleaved(engine: Engine, rows: int, turns: int) -> None:
    """Let `rows` requests decode in turns, one slot each."""
    engine.admit([engine.fresh_tokens(1) for _ in range(rows)])
    for _ in range(turns):
        engine.decode(sorted(engine.requests))


# --- A: what the copy must do --------------------------------------------------------------------


@FORMS
def test_case_5_packing_moves_rows_downward_only(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    interleaved(engine, 4, 10)
    engine.finish(1, keep=False)
    use(engine, "lower")
    engine.defragmenter.request(Lower(30))
    engine.compact()
    plan = engine.mover.plans[-1]
    assert int(plan.moved_rows()) > 0
    assert (plan.dst <= plan.src).all()
    engine.check()


# --- B: who else holds a slot number -------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_case_17_shared_slots_move_once_and_every_referrer_follows(
    device_form: bool, order: tuple[int, ...]
) -> None:
    engine = engine_of(device_form=device_form, interval=1000)
    # The prefix is decoded in turns with another request, so that its slots lie scattered.
    engine.admit([PREFIX[:1], engine.fresh_tokens(1)])
    for token in PREFIX[1:]:
        engine.decode([1, 2])
        request = engine.requests[1]
        request.tokens[-1] = token
        engine.write(request, request.committed - 1, request.committed)
    engine.share(engine.requests[1])
    engine.finish(2, keep=False)
    engine.admit([PREFIX + engine.fresh_tokens(5), PREFIX + engine.fresh_tokens(2)])
    assert [engine.requests[r].protected for r in (1, 2, 3)] == [12, 12, 12]
    assert gather(engine, 1) == 12
    plan = engine.mover.plans[-1]
    moved = plan.src[plan.src != plan.dst].tolist()
    assert len(set(moved)) == len(moved) == 12
    heads = engine.table[1:4, :12]
    assert (heads == heads[0]).all()
    assert runs(engine, 1) == 1
    engine.check()
    for row in order:
        engine.finish(row, keep=False)
        engine.check()
    engine.evict(12)
    assert engine.allocator.available_size() == engine.size


def test_case_17_a_shared_prefix_that_the_tree_keeps_back_stays_where_it_is() -> None:
    engine = engine_of()
    engine.admit([PREFIX])
    engine.share(engine.requests[1])
    engine.truncate(1, 0)
    engine.evict(100)
    engine.admit([PREFIX + engine.fresh_tokens(2)])
    use(engine, "gather")
    engine.table[1, :12] = engine.table[1, :12].flip(0)
    engine.tree.root.children[PREFIX[0]].slots[:] = engine.table[1, :12].numpy()
    for request in engine.requests.values():
        engine.table[request.row, :12] = engine.table[1, :12]
        engine.write(request, 0, request.committed)
    engine.check()
    elsewhere = torch.tensor([engine.table[2, 12].item()])
    engine.defragmenter.request(Gather(2, int(engine.generation[2])))
    # Only some other node may move: the prefix must not, for its own node would not follow.
    engine.compact(values=lambda: [elsewhere[:0]])
    engine.check()


@FORMS
def test_case_18_a_row_names_the_trees_slots_before_its_own_go_free(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    engine.admit([PREFIX + engine.fresh_tokens(1), PREFIX + engine.fresh_tokens(1)])
    engine.share(engine.requests[1])
    engine.allocator.free_group_begin()
    engine.share(engine.requests[2])
    assert engine.table[2, :12].tolist() == engine.table[1, :12].tolist()
    live = set(engine.table[1, :13].tolist()) | set(engine.table[2, :13].tolist())
    assert not live & set(engine.allocator.free_slots().tolist())
    engine.allocator.free_group_end()
    gather(engine, 2)
    engine.check()


@FORMS
def test_case_20_a_table_of_int32_and_values_of_int64_keep_their_types(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    engine.admit([PREFIX])
    engine.share(engine.requests[1])
    interleaved(engine, 2, 9)
    # What an engine keeps beside the table, as `prefix_indices` of a chunked request.
    copy = engine.table[1, :12].long()
    use(engine, "lower")
    engine.defragmenter.request(Lower(30))
    engine.compact(values=lambda: [*engine.shared_values(), copy[:0]])
    assert engine.table.dtype == torch.int32
    assert all(node.slots.dtype == np.int64 for node in engine.tree.nodes())
    engine.check()


@FORMS
@pytest.mark.parametrize("reservation", [False, True])
def test_case_21_a_prompt_in_chunks_survives_compaction_between_them(
    device_form: bool, reservation: bool
) -> None:
    engine = engine_of(device_form=device_form, reservation=reservation)
    interleaved(engine, 2, 5)
    (row,) = engine.admit([PREFIX + engine.fresh_tokens(9)], chunk=7)
    for mode in ("gather", "evacuation", "tenure"):
        use(engine, mode)
        engine.defragmenter.request(Gather(row, int(engine.generation[row])))
        engine.compact()
        engine.check()
        engine.extend([engine.requests[row]], chunk=7)
        engine.share(engine.requests[row])
        engine.check()
    assert engine.requests[row].committed == 21
    for row in list(engine.requests):
        engine.finish(row)
    engine.evict(1000)
    assert engine.allocator.available_size() == engine.size


# --- C: speculation ------------------------------------------------------------------------------


@FORMS
def test_case_33_of_48_drafts_seven_are_kept_in_order(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    engine.admit([engine.fresh_tokens(3) for _ in range(3)])
    before = engine.allocator.available_size()
    engine.speculate([1, 2, 3], 16, [4, 1, 2])
    assert before - engine.allocator.available_size() == 48
    assert [engine.requests[r].committed for r in (1, 2, 3)] == [7, 4, 5]
    for row in (1, 2, 3):
        request = engine.requests[row]
        engine.free(engine.table[row, request.committed : request.allocated].clone())
        request.allocated = request.committed
    assert before - engine.allocator.available_size() == 7
    engine.check()


@FORMS
def test_case_35_a_window_of_64_rejected_whole_leaves_size_less_live_slots(
    device_form: bool,
) -> None:
    engine = engine_of(device_form=device_form, width=100)
    engine.admit([engine.fresh_tokens(5)])
    engine.speculate([1], 64, [0])
    # The layout of committed tokens only: drafts are no fragmentation.
    assert engine.defragmenter.tracker.measure(engine.view()).tokens.tolist() == [5]
    engine.truncate(1, 0)
    free = engine.allocator.free_slots().tolist()
    assert len(set(free)) == len(free) == engine.size - 5


# --- D: accounting -------------------------------------------------------------------------------


@FORMS
def test_case_37_free_evictable_and_protected_add_up_after_every_step(device_form: bool) -> None:
    engine = engine_of(device_form=device_form, rows=4)
    draw = np.random.default_rng(37)
    for turn in range(150):
        if engine.free_rows() and draw.random() < 0.5:
            length = int(draw.integers(1, 12))
            rows = engine.admit([PREFIX[:length] + engine.fresh_tokens(3)])
            for row in rows:
                engine.share(engine.requests[row])
        for row in list(engine.requests):
            if engine.requests[row].committed < 60 and not engine.decode([row]):
                engine.finish(row)
        if engine.requests and draw.random() < 0.3:
            engine.finish(int(draw.choice(list(engine.requests))))
        before = engine.snapshot()
        use(engine, ("tenure", "evacuation", "gather", "lower")[turn % 4])
        engine.defragmenter.request(Lower(8))
        engine.compact()
        after = engine.snapshot()
        for name in ("available", "evictable", "protected", "reserved"):
            assert getattr(after, name) == getattr(before, name)
        private = sum(r.allocated - r.protected for r in engine.requests.values())
        total = after.available + after.evictable + after.protected + private
        assert total == engine.size
    engine.check()


@pytest.mark.parametrize("freed", [[5, 5], [0], [128], [-1]])
def test_case_38_a_wrong_free_after_a_compaction_is_named(freed: list[int]) -> None:
    engine = engine_of()
    interleaved(engine, 2, 9)
    gather(engine, 1)
    live = int(engine.table[1, 0])
    wrong = [live if slot == 5 else slot for slot in freed]
    before = engine.snapshot()
    with pytest.raises(SlotError, match=str(wrong[-1])):
        engine.allocator.free(torch.tensor(wrong))
    assert engine.snapshot().free == before.free
    engine.check()


def test_case_38_the_old_slot_of_a_moved_row_is_free_and_the_new_one_is_live() -> None:
    engine = engine_of()
    interleaved(engine, 2, 9)
    old = engine.table[1, :8].clone()
    gather(engine, 1)
    vacated = sorted(set(old.tolist()) - set(engine.table[1, :8].tolist()))
    assert vacated
    with pytest.raises(SlotError):
        engine.allocator.free(torch.tensor(vacated[:1]))
    engine.finish(1, keep=False)
    engine.check()


@FORMS
def test_case_39_a_range_freed_in_two_parts_is_as_freed_in_one(device_form: bool) -> None:
    one, two = engine_of(device_form=device_form), engine_of(device_form=device_form)
    taken = one.allocator.alloc(10)
    assert torch.equal(taken, two.allocator.alloc(10))
    one.allocator.free(taken)
    two.allocator.free(taken[:3])
    two.allocator.free(taken[3:])
    for engine in (one, two):
        engine.allocator.two_ended.reorder()
    assert torch.equal(one.allocator.free_slots(), two.allocator.free_slots())


@FORMS
@pytest.mark.parametrize("reservation", [False, True])
def test_case_41_the_run_after_a_flush_equals_the_first(
    device_form: bool, reservation: bool
) -> None:
    engine = engine_of(device_form=device_form, reservation=reservation, delay=2)

    def serve() -> list[list[int]]:
        engine.admit([[7, 8, 9], [17, 18]])
        for _ in range(12):
            engine.decode([1])
            engine.decode([2])
        use(engine, "tenure")
        for _ in range(3):
            engine.compact()
        engine.check()
        return engine.table[1:3, :14].tolist()

    first = serve()
    engine.flush()
    assert engine.allocator.available_size() == engine.size
    assert engine.allocator.reserved_size() == 0
    assert engine.defragmenter.tracker.groups_ready(engine.view()) == 0
    assert serve() == first


@FORMS
def test_case_42_a_failed_call_changes_nothing(device_form: bool) -> None:
    allocator = engine_of(size=100, device_form=device_form).allocator
    before = allocator.free_slots().tolist()
    assert allocator.alloc(101) is None
    assert allocator.alloc(0).tolist() == []
    with pytest.raises(SlotError, match="-1"):
        allocator.alloc(-1)
    assert allocator.free_slots().tolist() == before


@FORMS
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("rows", [0, 2])
def test_case_42_a_demand_for_nothing_is_an_empty_tensor(
    kind: Kind, rows: int, device_form: bool
) -> None:
    if kind is Kind.DECODE and rows:
        return  # Decoding asks for one token of each request.
    nothing = np.zeros(rows, dtype=np.int64)
    for reservation in (False, True):
        engine = engine_of(device_form=device_form, reservation=reservation)
        demand = Demand(kind, np.arange(1, rows + 1), nothing, nothing)
        assert engine.allocator.alloc_for(demand).tolist() == []
        assert engine.allocator.available_size() == engine.size


@FORMS
def test_case_44_a_compaction_never_counts_as_room(device_form: bool) -> None:
    engine = engine_of(size=64, device_form=device_form, rows=3)
    engine.admit([engine.fresh_tokens(n) for n in (10, 12, 9)])
    retracted = 0
    while engine.requests:
        if not engine.decode(sorted(engine.requests)):
            use(engine, "evacuation")
            before = engine.allocator.available_size()
            engine.compact()
            assert engine.allocator.available_size() == before
            engine.finish(max(engine.requests), keep=False)
            retracted += 1
            engine.check()
    assert retracted == 3
    assert engine.allocator.available_size() == 64


@FORMS
@pytest.mark.parametrize("mode", ["tenure", "evacuation", "gather", "lower", "idle"])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 130])
def test_case_47_nobody_to_serve_and_the_smallest_pools_move_nothing(
    mode: str, size: int, device_form: bool
) -> None:
    engine = engine_of(size=size, device_form=device_form)
    use(engine, mode)
    engine.defragmenter.request(Gather(1, 0) if mode == "gather" else Lower(9))
    for _ in range(3):
        report = engine.compact()
        assert report.moved_rows == 0
        assert report.coverage is None
        assert report.whole_free_pages >= 0
    engine.check()


@FORMS
def test_case_47_a_request_with_no_token_yet_is_no_obstacle(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    interleaved(engine, 2, 9)
    engine.truncate(2, 100)
    assert engine.requests[2].allocated == 0
    for mode in ("tenure", "evacuation", "gather", "lower"):
        use(engine, mode)
        engine.defragmenter.request(Gather(2, int(engine.generation[2])))
        engine.compact()
        engine.check()


def test_case_48_memory_follows_the_rows_and_not_the_context() -> None:
    narrow, wide = engine_of(rows=40, width=64), engine_of(rows=40, width=4000)
    assert narrow.defragmenter.nbytes == wide.defragmenter.nbytes
    assert 0 < Tracker(4096, page=64).nbytes <= 4096 * 200


# --- E: when, how much, whether ------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("tokens", [1, 60])
def test_case_50_contiguous_requests_are_left_alone(tokens: int, device_form: bool) -> None:
    engine = engine_of(size=1024, device_form=device_form)
    engine.admit([engine.fresh_tokens(tokens)])
    for mode in ("tenure", "evacuation", "gather"):
        use(engine, mode, whole_free_low=0.01, whole_free_high=0.02)
        engine.defragmenter.request(Gather(1, int(engine.generation[1])))
        assert engine.compact().moved_rows == 0
    counts = engine.defragmenter.tracker.measure(engine.view())
    assert counts.runs.tolist() == [1]
    assert counts.covered.tolist() == [tokens // 4 * 4]


@FORMS
def test_case_52_a_gather_below_any_threshold_goes_on_over_steps(device_form: bool) -> None:
    engine = engine_of(size=511, width=200, device_form=device_form)
    interleaved(engine, 2, 99)
    assert runs(engine, 1) > 50
    use(engine, "gather", rows=12, mode="on_demand")
    engine.defragmenter.request(Gather(1, int(engine.generation[1])))
    steps = 0
    while engine.defragmenter.demands:
        assert engine.compact().moved_rows <= 12
        engine.check()
        steps += 1
    assert steps == 9
    assert runs(engine, 1) == 1


@FORMS
def test_case_53_the_worst_case_is_done_in_bounded_steps(device_form: bool) -> None:
    # Every other slot live: two requests that decoded in turns, and one of them left.
    engine = engine_of(size=4095, page=64, width=2000, rows=2, device_form=device_form)
    interleaved(engine, 2, 1900)
    engine.finish(2, keep=False)
    use(engine, "lower", rows=100)
    engine.defragmenter.request(Lower(2000))
    moved = []
    while engine.defragmenter.demands:
        moved.append(engine.compact().moved_rows)
    assert len(moved) == 20
    assert max(moved) <= 100
    assert int(engine.table[1, :1901].max()) == 1901
    engine.check()


@FORMS
def test_case_54_interleaved_requests_become_one_run_each(device_form: bool) -> None:
    engine = engine_of(size=8191, page=64, rows=2, width=1100, device_form=device_form)
    interleaved(engine, 2, 999)
    assert runs(engine, 1) > 400
    assert runs(engine, 2) > 400
    for row in (1, 2):
        gather(engine, row, rows=1024)
    assert [runs(engine, 1), runs(engine, 2)] == [1, 1]
    engine.check()


@FORMS
def test_case_56_a_steady_prefix_is_not_moved_to_and_fro(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    engine.admit([PREFIX])
    engine.share(engine.requests[1])
    use(engine, "evacuation", min_gain_rows=4, backoff_max_shift=6)
    busy = 0
    for _ in range(300):
        (row,) = engine.admit([PREFIX + engine.fresh_tokens(2)])
        plans = len(engine.mover.plans)
        engine.compact()
        busy += len(engine.mover.plans) - plans
        engine.finish(row, keep=False)
    moved = sum(int(p.moved_rows()) for p in engine.mover.plans)
    assert busy <= 20
    assert moved <= 20
    engine.check()


class Ops(TorchDispatchMode):
    """Counts operations, and those among them that read a value."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["tenure", "evacuation", "gather", "lower"])
def test_case_57_ten_times_the_rows_take_as_many_operations(mode: str) -> None:
    counted = []
    for scale in (1, 10):
        engine = engine_of(size=1200 * scale, width=400 * scale, rows=3, device_form=True, delay=2)
        engine.admit([engine.fresh_tokens(7)])
        for _ in (2, 3):
            engine.admit([engine.fresh_tokens(150 * scale)])
        engine.truncate(2, 149 * scale)
        use(engine, mode, rows=1 << 12, check_plans="never")
        demand = Gather(3, int(engine.generation[3])) if mode == "gather" else Lower(100)
        engine.defragmenter.request(demand)
        view = engine.view()
        with Ops() as ops:
            engine.defragmenter.step(1, lambda view=view: view)
        assert not ops.seen["aten::_local_scalar_dense"]
        counted.append(ops.seen)
    assert counted[0] == counted[1]


def test_case_58_a_step_says_why_it_ran_and_nothing_runs_where_nothing_is_gained() -> None:
    engine = engine_of(size=300)
    interleaved(engine, 3, 20)
    engine.defragmenter.configure(engine.paged(Config()))
    report = engine.compact()
    assert (report.mechanism, report.reason) == ("none", "no consumer declared")
    assert report.moved_rows == report.planned_rows == report.bytes == 0
    use(engine, "tenure")
    report = engine.compact()
    assert (report.mechanism, report.reason) == ("tenure", "groups outside aligned pages")
    assert report.moved_rows > 0
    assert report.bytes == report.planned_rows * engine.mover.row_bytes


def test_case_59_a_consumer_that_gains_nothing_pays_for_nothing() -> None:
    engine = engine_of(size=300)
    interleaved(engine, 3, 20)
    for gain, reason in ((0.0, "does not pay back"), (1.0, "groups outside aligned pages")):
        consumers = [{"kind": "paged_attention", "gain": gain}]
        config = Config.model_validate({"consumers": consumers, "relocation": {"mode": "auto"}})
        rules = config.relocation.model_copy(
            update={"tenure_interval": 1, "coverage_low": 0.999, "coverage_high": 1.0}
        )
        engine.defragmenter.configure(engine.paged(config.model_copy(update={"relocation": rules})))
        # Somebody must have finished before anything is known of lifetimes.
        for _ in range(2):
            row = next(iter(engine.admit([[5, 6, 7]])))
            for _ in range(4):
                report = engine.compact()
            engine.finish(row, keep=False)
        assert report.reason in (reason, "no trigger", "budget spent"), report
        if gain == 0.0:
            assert not engine.mover.plans


@FORMS
def test_case_61_descriptors_follow_the_runs(device_form: bool) -> None:
    engine = engine_of(size=1000, page=4, rows=2, width=300, device_form=device_form)
    interleaved(engine, 2, 199)
    before = stats(engine, 1).descriptors(4)
    gather(engine, 1, rows=400)
    assert before.tolist()[0] > 300
    assert stats(engine, 1).descriptors(4).tolist() == [4]


@FORMS
def test_case_62_packing_when_idle_touches_as_few_pages_as_there_are_tokens_for(
    device_form: bool,
) -> None:
    engine = engine_of(size=200, rows=6, device_form=device_form)
    for _ in range(5):
        engine.admit([engine.fresh_tokens(1) for _ in range(6)])
        for row in list(engine.requests):
            engine.finish(row)
    free = engine.allocator.free_slots()
    before = free_stats(free, engine.size, page=4)
    use(engine, "idle")
    for _ in range(12):
        engine.compact()
    after = free_stats(engine.allocator.free_slots(), engine.size, page=4)
    assert after.free == before.free
    # 30 tokens fit on 8 pages, of which page 0 has room for 3.
    assert after.whole_pages >= before.whole_pages + 15
    engine.check()


@FORMS
def test_case_65_the_tracker_agrees_with_a_recount_after_a_truncation(device_form: bool) -> None:
    engine = engine_of(size=400, width=128, device_form=device_form)
    interleaved(engine, 2, 60)
    use(engine, "tenure", rows=400)
    for _ in range(20):
        engine.compact()
    assert stats(engine, 1).left_over(4).item() < 5
    engine.truncate(1, 23)
    engine.defragmenter.tracker.check_integrity(engine.view())
    engine.compact()
    for _ in range(30):
        engine.decode([1, 2])
    engine.check()
    for _ in range(20):
        engine.compact()
        engine.check()
    # What grew where it was cut off is looked at again.
    assert stats(engine, 1).left_over(4).item() < 8


@FORMS
def test_case_66_what_lies_in_free_slots_is_never_read(device_form: bool) -> None:
    engine = engine_of(device_form=device_form)
    interleaved(engine, 3, 14)
    engine.finish(2, keep=False)
    for mode in ("tenure", "evacuation", "gather", "lower"):
        engine.scribble(engine.allocator.free_slots())
        use(engine, mode)
        engine.defragmenter.request(Gather(1, int(engine.generation[1])))
        engine.compact()
        # Neither is what a row left behind needed any more.
        engine.scribble(engine.allocator.free_slots())
        engine.check()
        engine.decode(sorted(engine.requests))
