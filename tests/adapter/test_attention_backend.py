"""Our attention in the place of SGLang's Triton backend: same answers, same names, or stock."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import attention_stage as stage
from harness.environment import environment

stage.load_triton()

LENGTHS = [37, 1, 20]
LATENT = pytest.mark.parametrize("latent", [False, True], ids=["gqa", "mla"])


class Bench:
    """A pool, our backend and a stock one over it; counts what reaches SGLang's kernels."""

    def __init__(
        self, monkeypatch: Any, latent: bool, make: Any = stage.kernel, **how: Any
    ) -> None:
        from kvdefrag.attention import default_crossover
        from kvdefrag.sglang.attention_backend import backend_class
        from kvdefrag.sglang.attention_compat import check_seams

        self.pool = stage.Pool(latent=latent)
        self.module = stage.set_up(monkeypatch, self.pool)
        self.stock: list[str] = []
        self.dry = False  # SGLang's kernels are counted, not run
        from sglang.kernels.ops.attention import decode_attention, extend_attention

        for module, name in (
            (decode_attention, "decode_attention_fwd"),
            (extend_attention, "extend_attention_fwd"),
        ):
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))
        found = backend_class(default_crossover(), check_seams(stage.VERSION), make=make)
        self.cls = found
        self.backend = found(stage.runner(self.pool), **how)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.stock.append(name)
            runs = stage.REAL and not self.dry
            return original(*args, **kwargs) if runs else args[3].zero_()

        counted.__wrapped__ = original  # type: ignore[attr-defined]
        return counted

    def check(self, found: torch.Tensor, right: torch.Tensor, *, stock: int = 0) -> None:
        """Assert that a layer is right, and how often SGLang's kernels ran."""
        error = (found.double().view_as(right) - right).norm() / right.norm()
        assert self.backend.kvdefrag_error is None
        assert float(error.nan_to_num(nan=1.0)) < 0.01
        assert len(self.stock) == stock


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """Make a bench."""
    return lambda latent=False, **how: Bench(monkeypatch, latent, **how)


def everything(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.ones(1, length, dtype=torch.bool) for length in lengths]


def decoding(b: Bench, lengths: list[int]) -> tuple[Any, tuple[Any, ...], Any]:
    """Return a decode batch, the new rows, and a call for the right answer."""
    last = [b.pool.slots(i + 1, n - 1, n) for i, n in enumerate(lengths)]
    batch = stage.batch("DECODE", b.pool, lengths, out_cache_loc=torch.cat(last))
    new = b.pool.new(len(lengths))
    slots = [b.pool.slots(i + 1, 0, n) for i, n in enumerate(lengths)]
    return batch, new, lambda cap=0.0: b.pool.right(new[0], slots, everything(lengths), cap)


def verifying(
    b: Bench, lengths: list[int], *, tree: bool, mode: str = "TARGET_VERIFY"
) -> tuple[Any, tuple[Any, ...], Any]:
    """The same for a verify batch of `QUERIES` tokens a request, or for a draft's extension."""
    n = stage.QUERIES
    masks, seen = [], []
    for length in lengths:
        own = torch.rand(n, n, generator=b.pool.random) < 0.5
        own = (own | torch.eye(n, dtype=torch.bool)).tril() if tree else torch.ones(n, n).tril() > 0
        # SGLang's kernel takes the bytes over the prefix for true.
        junk = torch.rand(n, length, generator=b.pool.random) < 0.5
        masks.append(torch.cat([junk, own], 1).flatten())
        seen.append(torch.cat([torch.ones(n, length, dtype=torch.bool), own], 1))
    spec = SimpleNamespace(
        custom_mask=torch.cat(masks) if tree else None,
        draft_token_num=n,
        num_tokens_per_req=n,
        kv_indptr=None,
        extend_seq_lens_tensor=torch.full((len(lengths),), n),
    )
    fresh = torch.cat([b.pool.slots(i + 1, a, a + n) for i, a in enumerate(lengths)])
    extend = mode == "DRAFT_EXTEND_V2"
    batch = stage.batch(
        mode, b.pool, [a + n for a in lengths] if extend else lengths,
        spec_info=spec, out_cache_loc=fresh,
        extend_prefix_lens=torch.tensor(lengths) if extend else None,
        extend_prefix_lens_cpu=lengths if extend else None,
        extend_seq_lens=torch.full((len(lengths),), n) if extend else None,
        extend_seq_lens_cpu=[n] * len(lengths) if extend else None,
    )  # fmt: skip
    new = b.pool.new(n * len(lengths))
    slots = [b.pool.slots(i + 1, 0, a + n) for i, a in enumerate(lengths)]
    return batch, new, lambda cap=0.0: b.pool.right(new[0], slots, seen, cap)


KINDS: dict[str, Callable[..., tuple[Any, tuple[Any, ...], Any]]] = {
    "decode": decoding,
    "tree": lambda b, lengths: verifying(b, lengths, tree=True),
    "chain": lambda b, lengths: verifying(b, lengths, tree=False),
    "draft extend": lambda b, lengths: verifying(b, lengths, tree=False, mode="DRAFT_EXTEND_V2"),
}


def forward(b: Bench, batch: Any, new: tuple[Any, ...], **how: Any) -> torch.Tensor:
    decode = batch.forward_mode.is_decode()
    run = b.backend.forward_decode if decode else b.backend.forward_extend
    return run(*new, b.pool.layer, batch, **how)


@LATENT
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_every_kind_of_step_is_served_and_equals_float64(bench, latent, kind, cap):
    b = bench(latent)
    b.pool.fill(LENGTHS, stage.QUERIES)
    b.pool.layer.logit_cap = cap
    batch, new, right = KINDS[kind](b, LENGTHS)

    b.backend.init_forward_metadata(batch)
    found = forward(b, batch, new)

    b.check(found, right(cap))
    assert sum(b.backend.kvdefrag_layers.values()) == 1


@LATENT
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_serves_other_requests_when_it_is_replayed(bench, latent, kind):
    b = bench(latent)
    b.backend.init_cuda_graph_state(4, 4 * stage.QUERIES)
    b.pool.fill([9, 12, 3], stage.QUERIES)
    captured, new, right = KINDS[kind](b, [9, 12, 3])
    b.backend.init_forward_metadata_out_graph(captured, in_capture=True)
    for _ in range(2):
        b.backend.init_forward_metadata_in_graph(captured)
        b.check(forward(b, captured, new), right())

    # What a graph replays: the plan and the layer, on what lies in the same tensors by then.
    b.pool.fill(LENGTHS, stage.QUERIES)
    replayed, new, right = KINDS[kind](b, LENGTHS)
    captured.out_cache_loc.copy_(replayed.out_cache_loc)
    b.backend.init_forward_metadata_out_graph(replayed)
    b.backend._captured[0].plan()

    b.check(forward(b, captured, new), right())
    assert len(b.backend._captured) == 1


def test_each_branch_of_a_draft_reads_its_own_list(bench):
    b = bench(skip_prefill=True)
    b.pool.fill([10, 17], 8)
    # Two branches a request, each behind the prefix with three tokens of its own.
    slots = [
        torch.cat([b.pool.slots(row, 0, n), b.pool.slots(row, n + 3 * at, n + 3 * at + 3)])
        for row, n in ((1, 10), (2, 17))
        for at in (0, 1)
    ]
    for held in slots:
        for buffer in b.pool.buffers:
            buffer[held[-3:]] = b.pool.normal(3, *buffer.shape[1:])
    starts = torch.tensor([0, *map(len, slots)]).cumsum(0).int()
    spec = SimpleNamespace(
        kv_indptr=starts, kv_indices=torch.cat(slots), window_kv_indptr=None,
        window_kv_indices=None,
    )  # fmt: skip
    batch = stage.batch(
        "DECODE", b.pool, [10, 17], spec_info=spec,
        out_cache_loc=torch.stack([held[-1] for held in slots]),
    )  # fmt: skip
    new = b.pool.new(4)

    b.backend.init_forward_metadata(batch)

    b.check(forward(b, batch, new), b.pool.right(new[0], slots, everything([13, 13, 20, 20])))


@LATENT
def test_sglangs_own_steps_of_a_draft_are_served_one_by_one(bench, monkeypatch, latent):
    if not stage.REAL:
        pytest.skip("KVDEFRAG_TRITON names no Triton: SGLang lists a draft's slots with a kernel")
    b, topk, steps, prefixes = bench(latent), 2, 3, [10, 17]
    b.pool.fill(prefixes, topk * steps)
    monkeypatch.setattr(b.module, "TritonAttnBackend", b.cls)
    draft = b.module.TritonMultiStepDraftBackend(stage.runner(b.pool), topk, steps)
    own = torch.stack(
        [b.pool.slots(i + 1, n, n + topk * steps) for i, n in enumerate(prefixes)]
    ).view(-1, steps)
    spec = SimpleNamespace(
        kv_indptr=None, kv_indices=None, window_kv_indptr=None, window_kv_indices=None
    )
    batch = stage.batch(
        "DECODE", b.pool, prefixes, spec_info=spec,
        positions=torch.tensor(prefixes).repeat_interleave(topk), out_cache_loc=own.flatten(),
    )  # fmt: skip
    draft.init_forward_metadata(batch)

    for step, backend in enumerate(draft.attn_backends):
        batch.out_cache_loc = own[:, step].contiguous()
        q, k, v = b.pool.new(len(own))
        found = backend.forward_decode(q, k, v, b.pool.layer, batch)
        slots = [
            torch.cat([b.pool.slots(row // topk + 1, 0, prefixes[row // topk]), held[: step + 1]])
            for row, held in enumerate(own)
        ]
        b.check(found, b.pool.right(q, slots, everything([len(held) for held in slots])))
        assert backend.kvdefrag_layers == {"decode by kernel": 1}


def test_rows_that_somebody_else_wrote_are_read_from_the_pool(bench):
    b = bench()
    b.pool.fill(LENGTHS, stage.QUERIES)
    batch, (q, k, v), right = KINDS["tree"](b, LENGTHS)
    b.pool.pool.set_kv_buffer(b.pool.layer, batch.out_cache_loc, k, v)

    b.backend.init_forward_metadata(batch)

    b.check(forward(b, batch, (q, None, None), save_kv_cache=False), right())


def prompt(b: Bench) -> Any:
    batch, new, _ = KINDS["draft extend"](b, LENGTHS)
    batch.forward_mode = stage.batch("EXTEND", b.pool, [1]).forward_mode
    batch.spec_info = None
    return batch, new, {}


def left(kind: str, **changes: Any) -> Callable[[Bench], Any]:
    def make(b: Bench) -> Any:
        batch, new, _ = KINDS[kind](b, LENGTHS)
        how = {k: v for k, v in changes.items() if k in ("sinks", "save_kv_cache")}
        for name, value in changes.items():
            if name not in how:
                setattr(b.pool.layer, name, value)
        return batch, new, how

    return make


def not_causal(b: Bench) -> Any:
    from sglang.srt.layers.radix_attention import AttentionType

    return left("chain", attn_type=AttentionType.ENCODER_ONLY)(b)


STOCK: dict[str, Callable[[Bench], Any]] = {
    "a prompt": prompt,
    "sinks": left("decode", sinks=torch.zeros(stage.HEADS)),
    "a temperature by length": left("decode", xai_temperature_len=8),
    "a chain that is not causal": not_causal,
    "cross attention": left("chain", is_cross_attention=True),
    "a tree that is not in the pool": left("tree", save_kv_cache=False),
    "scales of 16-bit rows": left(
        "decode", k_scale=torch.tensor(1.0), v_scale=torch.tensor(1.0), k_scale_float=2.0,
        v_scale_float=1.0,
    ),
    "a layer of other widths": left("decode", scaling=-1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", STOCK)
def test_what_we_do_not_compute_goes_on_to_stock(bench, case):
    b = bench()
    b.dry = True
    b.pool.fill(LENGTHS, stage.QUERIES)
    batch, new, how = STOCK[case](b)

    b.backend.init_forward_metadata(batch)
    forward(b, batch, new, **how)

    assert len(b.stock) == 1
    assert b.backend.kvdefrag_error is None
    assert not any(" by kernel" in name for name in b.backend.kvdefrag_layers)


def test_a_windowed_layer_is_stocks_and_its_neighbour_is_ours(bench):
    b = bench()
    b.pool.fill(LENGTHS, stage.QUERIES)
    batch, new, right = KINDS["decode"](b, LENGTHS)
    b.backend.init_forward_metadata(batch)
    # What a model with windows adds to the metadata of a step.
    metadata = b.backend.forward_metadata
    metadata.window_kv_indptr, metadata.window_kv_indices = (
        metadata.kv_indptr.clone(), metadata.kv_indices,
    )  # fmt: skip

    b.pool.layer.sliding_window_size = 64
    forward(b, batch, new)
    b.pool.layer.sliding_window_size = -1

    b.check(forward(b, batch, new), right(), stock=1)
    assert b.backend.kvdefrag_layers["a window of the prefix"] == 1


def test_metadata_that_nobody_planned_within_a_graph_are_stocks(bench, monkeypatch):
    b = bench()
    b.pool.fill(LENGTHS, stage.QUERIES)
    batch, new, _ = KINDS["decode"](b, LENGTHS)
    b.backend.init_forward_metadata(batch)
    monkeypatch.setattr(b.backend, "_capturing", lambda: True)

    forward(b, batch, new)

    assert b.backend.kvdefrag_layers == {"no plan within this graph": 1}
    assert len(b.stock) == 1


@pytest.mark.parametrize("where", ["plan", "run", "__init__"])
def test_a_fault_of_ours_makes_it_stock_for_good(bench, where):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    broken = type("Broken", (stage.Reference,), {where: fail})
    b = bench(make=broken)
    b.pool.fill(LENGTHS, stage.QUERIES)
    batch, new, _ = KINDS["decode"](b, LENGTHS)

    for _ in range(2):
        b.backend.init_forward_metadata(batch)
        forward(b, batch, new)

    assert b.backend.kvdefrag_state()["error"] == "RuntimeError: broken"
    assert not b.backend.kvdefrag_state()["active"]
    assert len(b.stock) == 2


def test_a_table_may_give_a_task_back_to_stock(bench, monkeypatch):
    b = bench()
    table = b.cls.kvdefrag_table
    slow = table.entries[0].model_copy(
        update={"kind": "decode", "latent": False, "us": {"kernel": 9.0, "stock": 1.0}}
    )
    monkeypatch.setattr(
        b.backend.kvdefrag_providers, "_table", table.model_copy(update={"entries": (slow,)})
    )
    b.pool.fill(LENGTHS, stage.QUERIES)
    batch, new, _ = KINDS["decode"](b, LENGTHS)

    b.backend.init_forward_metadata(batch)
    forward(b, batch, new)

    assert b.backend.kvdefrag_state()["providers"] == {"decode, 4 x 1": "stock"}
    assert len(b.stock) == 1


def test_stock_and_ours_make_the_same_metadata(bench):
    b = bench()
    b.pool.fill(LENGTHS, stage.QUERIES)
    base = b.cls.__mro__[2]
    stock = base(stage.runner(b.pool))
    assert base.__module__.startswith("sglang.")
    for kind in KINDS:
        batch, _, _ = KINDS[kind](b, LENGTHS)
        b.backend.init_forward_metadata(batch)
        stock.init_forward_metadata(batch)
        for name in ("kv_indptr", "qo_indptr", "custom_mask", "mask_indptr", "max_extend_len"):
            ours, theirs = (getattr(x.forward_metadata, name) for x in (b.backend, stock))
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_stock_in_the_interpreter_gives_the_same_within_rounding(bench):
    if not stage.REAL:
        pytest.skip("KVDEFRAG_TRITON names no Triton")
    for latent in (False, True):
        b = bench(latent)
        b.pool.fill(LENGTHS, stage.QUERIES)
        stock = b.cls.__mro__[2](stage.runner(b.pool))
        for kind in KINDS:
            batch, new, right = KINDS[kind](b, LENGTHS)
            b.backend.init_forward_metadata(batch)
            ours = forward(b, batch, new)
            stock.init_forward_metadata(batch)
            run = stock.forward_decode if kind == "decode" else stock.forward_extend
            theirs = run(*new, b.pool.layer, batch)
            errors = [
                float((x.double().view_as(right()) - right()).norm() / right().norm())
                for x in (ours, theirs)
            ]
            assert errors[0] < max(0.004, 1.05 * errors[1])


def test_the_state_of_every_backend_is_shown_through_its_wrappers(bench):
    from kvdefrag.sglang.attention_hooks import _showing

    b = bench()
    hybrid = SimpleNamespace(prefill_backend=object(), decode_backend=b.backend)
    for backend, wanted in (
        (b.backend, [b.backend.kvdefrag_state()]),
        (hybrid, [b.backend.kvdefrag_state()]),
        (object(), [{"active": False, "refused": "the server does not use the Triton backend"}]),
    ):
        runner = SimpleNamespace(attn_backend=backend)
        scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
        result = SimpleNamespace(internal_state={})
        _showing(None)(result, scheduler)
        assert result.internal_state == {"kvdefrag_attention": wanted}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "enable_deterministic": ({"enable_deterministic": True}, "--enable-deterministic-inference"),
    "dcp_size": ({"dcp_size": 2}, "--dcp-size 2"),
    "page_size": ({"page_size": 64}, "--page-size 64"),
    "dllm_block_size": ({"dllm_block_size": 8}, "--dllm-algorithm"),
    "translated": (
        {"_translate_kv_loc": len, "kv_index_translator": SimpleNamespace(is_translating=True)},
        "--enable-unified-memory",
    ),
    "pool": ({"token_to_kv_pool": SimpleNamespace()}, "pool SimpleNamespace"),
    "heads": ({"num_head": 3}, "heads must be a multiple"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_backend_that_is_not_served_says_why(bench, case):
    from kvdefrag.sglang.attention_compat import SEAMS
    from kvdefrag.sglang.attention_support import rows_of
    from kvdefrag.sglang.refusal import Refusal

    b = bench()
    changes, why = REFUSED[case]
    for name, value in changes.items():
        setattr(b.backend, name, value)

    with pytest.raises(Refusal, match=why):
        rows_of(b.backend, SEAMS[stage.VERSION])


def test_a_refused_backend_serves_as_stock(bench, monkeypatch):
    b = bench()
    stage.set_up(monkeypatch, b.pool, deterministic=True)
    arguments = stage.runner(b.pool).server_args
    arguments.enable_deterministic_inference = True

    made = b.cls(stage.runner(b.pool, server_args=arguments))

    assert made.kvdefrag_state()["refused"].startswith("--enable-deterministic-inference")
    assert made.decode_attention_fwd.__wrapped__.__qualname__.startswith("Bench._counted")
    b.pool.fill(LENGTHS, stage.QUERIES)
    batch, *_ = KINDS["decode"](b, LENGTHS)
    made.init_forward_metadata(batch)
    assert made._described is None


@pytest.mark.parametrize("what", ["decode_attention_fwd", "forward_extend", "version"])
def test_another_build_is_refused_by_the_name_of_what_differs(monkeypatch, what):
    from sglang.kernels.ops.attention import decode_attention
    from sglang.srt.layers.attention import triton_backend

    from kvdefrag.sglang.attention_compat import check_seams
    from kvdefrag.sglang.refusal import Refusal

    def other(q: Any, k: Any) -> None:
        """Takes something else."""

    owner = decode_attention if what == "decode_attention_fwd" else triton_backend.TritonAttnBackend
    if what == "version":
        with pytest.raises(Refusal, match=r"sglang 0\.5\.99"):
            check_seams("0.5.99")
        return
    monkeypatch.setattr(owner, what, other)

    with pytest.raises(Refusal, match=r"other\(q, k\): this build of SGLang differs"):
        check_seams(stage.VERSION)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What a process with the hooks applied says of every name that SGLang compares."""
    variables = {"KVDEFRAG_ENABLED": "true", "KVDEFRAG_ATTENTION__ENABLED": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "harness.attention_names"],
        env=environment(plugin=True, extra=variables),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_class_is_replaced_wherever_sglang_has_it(names):
    assert names["class"] == ["TritonAttnBackend", "kvdefrag.sglang.attention_backend"]
    assert names["imported before"] == names["class"]
    assert names["registry"] == names["class"]
    assert names["steps of a draft"] == [names["class"]] * 2
    assert names["draft extend"] == names["class"]


def test_every_name_that_sglang_compares_is_still_its_own(names):
    assert names["served"] == [True] * 3
    assert names["choices"]
    assert names["mla handler"] == "handle_attention_triton"
    assert names["dflash skips the mask"]
    assert names["deterministic"]


def test_without_the_switch_nothing_is_replaced():
    done = subprocess.run(
        [sys.executable, "-m", "harness.attention_names", "class"],
        env=environment(plugin=True, extra={"KVDEFRAG_ENABLED": "true"}),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["class"] == [
        "TritonAttnBackend",
        "sglang.srt.layers.attention.triton_backend",
    ]
