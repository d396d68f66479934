"""What is not supported is refused by name, and the scheduler is left as it was."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from harness.jobs import VERSION


class ReqToTokenPool(SimpleNamespace):
    """Has the name of SGLang's."""


class MHATokenToKVPool(SimpleNamespace):
    """Has the name of SGLang's."""


class MLATokenToKVPool(SimpleNamespace):
    """Has the name of SGLang's."""


def scheduler(**args: Any) -> Any:
    """Return what a supported scheduler looks like, with other server arguments."""
    from kvdefrag.sglang.allocator import KvdefragAllocator

    table = torch.zeros((3, 8), dtype=torch.int32)
    return SimpleNamespace(
        server_args=SimpleNamespace(**args),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        req_to_token_pool=ReqToTokenPool(
            req_to_token=table, free_slots=[1, 2], req_generation=torch.zeros(3)
        ),
        token_to_kv_pool_allocator=KvdefragAllocator(16, torch.float32, "cpu", MagicMock(), False),
        tree_cache=object(),
        running_batch=None,
        last_batch=None,
        chunked_req=None,
        waiting_queue=[],
        spec_algorithm=None,
        enable_overlap=True,
        tp_worker=None,
        metrics_collector_context=None,
    )


def refused(made: Any) -> str:
    """Return what a check says."""
    from kvdefrag.sglang.refusal import Refusal
    from kvdefrag.sglang.support import check_server

    with pytest.raises(Refusal) as found:
        check_server(made)
    return str(found.value)


FLAGS = [
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_memory",
    "enable_unified_cache_external_linker",
    "enable_hisparse",
    "enable_hierarchical_cache",
    "enable_pdmux",
    "enable_return_routed_experts",
    "enable_return_indexer_topk",
    "enable_session_radix_cache",
    "enable_page_major_kv_layout",
    "enable_kv_cache_sharding",
    "enable_dsa_cache_layer_split",
    "enable_pd_role_switch",
]
# Settings that one of the versions has not got.
ONLY_NEW = {
    "enable_unified_cache_external_linker",
    "enable_kv_cache_sharding",
    "enable_pd_role_switch",
}


def test_a_plain_server_is_supported() -> None:
    from kvdefrag.sglang.support import check_server

    check_server(scheduler(page_size=1, pp_size=1, disaggregation_mode="null"))


@pytest.mark.parametrize("flag", FLAGS)
def test_a_feature_that_keeps_slots_by_itself_is_refused(flag: str) -> None:
    assert refused(scheduler(**{flag: True})).startswith(f"--{flag.replace('_', '-')}: ")


def test_every_refused_flag_is_tested_above() -> None:
    from kvdefrag.sglang import rules

    assert {name for name, _ in rules._OFF} == set(FLAGS)


def test_every_refused_flag_is_a_setting_of_this_version() -> None:
    from sglang.srt.server_args import ServerArgs

    from kvdefrag.sglang import rules

    asked = [name for name, _ in (*rules._OFF, *rules._ONE)]
    asked += ["disaggregation_mode", "dllm_algorithm"]
    known = set(inspect.signature(ServerArgs).parameters)
    assert set(asked) - known == (ONLY_NEW if VERSION == "0.5.17" else set())


def test_case_34_pages_of_more_than_one_slot_are_refused() -> None:
    assert refused(scheduler(page_size=64)).startswith("--page-size 64: ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"pp_size": 2}, "--pp-size 2: "),
        ({"dcp_size": 2}, "--dcp-size 2: "),
        ({"attn_cp_size": 2}, "--attn-cp-size 2: "),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill: "),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode: "),
        ({"dllm_algorithm": "low_confidence"}, "--dllm-algorithm: "),
    ],
)
def test_a_mode_that_is_not_supported_is_named(args: dict[str, Any], said: str) -> None:
    assert refused(scheduler(**args)).startswith(said)


def test_an_encoder_decoder_is_refused() -> None:
    made = scheduler()
    made.model_config.is_encoder_decoder = True

    assert "encoder-decoder" in refused(made)


@pytest.mark.parametrize(
    ("name", "said"),
    [("is_hybrid_swa", "sliding-window model: "), ("is_hybrid_ssm", "state-space model: ")],
)
def test_case_09_case_29_a_model_with_two_kinds_of_slots_is_refused(name: str, said: str) -> None:
    made = scheduler()
    setattr(made, name, True)

    assert refused(made).startswith(said)


def test_another_device_is_refused() -> None:
    made = scheduler()
    made.req_to_token_pool.req_to_token = torch.zeros((3, 8), dtype=torch.int32, device="meta")

    assert refused(made).startswith("device meta: ")


def test_case_40_another_allocator_is_refused_by_its_class() -> None:
    made = scheduler()
    made.token_to_kv_pool_allocator = MagicMock(name="SWATokenToKVPoolAllocator")

    assert refused(made).startswith("allocator MagicMock: ")


def test_a_subclass_of_our_allocator_is_refused_too() -> None:
    from kvdefrag.sglang.allocator import KvdefragAllocator

    class Other(KvdefragAllocator):
        pass

    made = scheduler()
    made.token_to_kv_pool_allocator = Other(16, torch.float32, "cpu", MagicMock(), False)

    assert refused(made).startswith("allocator Other: ")


def test_another_request_table_is_refused_by_its_class() -> None:
    made = scheduler()
    made.req_to_token_pool = SimpleNamespace(**vars(made.req_to_token_pool))

    assert refused(made).startswith("request table SimpleNamespace: ")


@pytest.mark.parametrize(
    "name", ["chunked_req", "running_batch", "waiting_queue", "enable_overlap"]
)
def test_an_attribute_that_we_rely_on_is_missed_by_name(name: str) -> None:
    made = scheduler()
    delattr(made, name)

    assert f".{name}: this build of SGLang lacks it" in refused(made)


def buffers(pool: Any, size: int = 16) -> Any:
    from kvdefrag.sglang.pools import buffers_of

    return buffers_of(pool, size)


def pool_refused(pool: Any) -> str:
    from kvdefrag.sglang.refusal import Refusal

    with pytest.raises(Refusal) as found:
        buffers(pool)
    return str(found.value)


def heads(**more: Any) -> Any:
    fields: dict[str, Any] = {
        "page_size": 1,
        "k_buffer": [torch.zeros(17, 2, 4) for _ in range(2)],
        "v_buffer": [torch.zeros(17, 2, 3) for _ in range(2)],
    }
    return MHATokenToKVPool(**fields | more)


def test_every_layer_of_keys_and_values_is_found() -> None:
    assert len(buffers(heads())) == 4


def test_case_08_a_latent_pool_without_values_is_found() -> None:
    pool = MLATokenToKVPool(page_size=1, kv_buffer=[torch.zeros(17, 1, 6) for _ in range(3)])

    assert len(buffers(pool)) == 3


@pytest.mark.parametrize("field", ["index_k_with_scale_buffer", "anything_new"])
def test_case_06_rows_that_are_not_known_are_refused(field: str) -> None:
    assert f"MHATokenToKVPool.{field}: " in pool_refused(heads(**{field: [torch.zeros(17, 4)]}))


def test_case_06_scales_of_quantised_rows_are_found() -> None:
    scales = [torch.zeros(17, 4) for _ in range(2)]
    pool = heads(k_scale_buffer=scales, v_scale_buffer=[s.clone() for s in scales])

    assert len(buffers(pool)) == 8
    assert "(2, 2)" in pool_refused(heads(k_scale_buffer=[torch.zeros(2, 2)]))


@pytest.mark.parametrize("field", ["native_k_scale_buffer", "native_v_scale_buffer"])
def test_case_06_scales_that_lie_in_one_another_are_refused(field: str) -> None:
    assert f"MHATokenToKVPool.{field}: " in pool_refused(heads(**{field: [torch.zeros(2, 99)]}))


@pytest.mark.parametrize(
    "more", [{"use_hnd": True}, {"kv_cache_layout": "vectorized_5d"}, {"kv_cache_layout": "hnd"}]
)
def test_a_layout_by_pages_is_refused(more: dict[str, Any]) -> None:
    assert pool_refused(heads(**more)).startswith("MHATokenToKVPool in layout ")


def real_pool(name: str) -> Any:
    """Return one of SGLang's pools with 16 slots and two layers."""
    from sglang.srt.mem_cache import memory_pool

    shared = {"size": 16, "page_size": 1, "layer_num": 2, "device": "cpu"}
    shared |= {"enable_memory_saver": False, "dtype": torch.bfloat16}
    if name.startswith("MLA"):
        shared |= {"kv_lora_rank": 48, "qk_rope_head_dim": 16}
    else:
        shared |= {"head_num": 2, "head_dim": 64}
    if name.endswith("MXFP8"):
        shared["dtype"] = torch.float8_e4m3fn
    return getattr(memory_pool, name)(**shared)


def rows_of(pool: Any, rows: int) -> dict[str, torch.Tensor]:
    """Return every tensor of a pool that has a row to each slot, as bytes."""
    found = {}
    for field, value in vars(pool).items():
        for number, item in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(item, torch.Tensor) and item.shape[:1] == (rows,):
                found[f"{field}[{number}]"] = item.view(torch.uint8)
    return found


POOLS = {
    "MHATokenToKVPool": 4,
    "MHATokenToKVPoolFP4": 8,
    "MHATokenToKVPoolMXFP8": 8,
    "MLATokenToKVPool": 2,
    "MLATokenToKVPoolFP4": 4,
}


@pytest.mark.parametrize("name", POOLS)
def test_case_06_a_real_pool_is_moved_whole_with_its_scales(name: str) -> None:
    from kvdefrag.core.mover import TorchMover
    from kvdefrag.core.plan import MovePlan

    pool = real_pool(name)
    every = rows_of(pool, 17)
    generator = torch.Generator().manual_seed(5)
    for rows in every.values():
        rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8, generator=generator))
    before = {field: rows.clone() for field, rows in every.items()}

    TorchMover(buffers(pool)).copy(MovePlan(torch.tensor([7, 12, 0]), torch.tensor([3, 5, 0])))

    assert len(every) == POOLS[name]
    for field, rows in every.items():
        wanted = before[field].clone()
        wanted[[3, 5]] = before[field][[7, 12]]
        assert torch.equal(rows, wanted), field


def test_every_supported_pool_is_tested_above() -> None:
    from kvdefrag.sglang import pools

    assert set(pools._BUFFERS) == set(POOLS)


def test_case_07_an_unknown_pool_is_refused_by_its_class() -> None:
    assert pool_refused(SimpleNamespace(page_size=1)).startswith("pool SimpleNamespace: ")


def test_a_pool_in_pages_is_refused() -> None:
    assert "page_size 64" in pool_refused(heads(page_size=64))


@pytest.mark.parametrize("shape", [(16, 2, 4), (2, 17, 4)])
def test_a_buffer_without_a_row_to_each_slot_is_refused(shape: tuple[int, ...]) -> None:
    assert str(shape) in pool_refused(heads(k_buffer=[torch.zeros(shape)]))


def test_rows_that_are_not_contiguous_are_refused() -> None:
    turned = torch.zeros(17, 4, 2).transpose(1, 2)

    assert "(17, 2, 4)" in pool_refused(heads(k_buffer=[turned]))


def watched_by_canary(rows: int) -> Any:
    """Return a scheduler whose model runner has KV canary, with so many rows of fingerprints."""
    from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, PoolKind

    def fingerprints() -> torch.Tensor:
        return torch.zeros(rows, 32, dtype=torch.uint8)

    group = CanaryBufferGroup(
        kind=PoolKind.FULL,
        k_head=fingerprints(),
        k_tail=fingerprints(),
        v_head=fingerprints(),
        v_tail=None,
        real_kv_sources_k=(),
        real_kv_sources_v=(),
        swa_index_lut=None,
        kv_token_id_vs_position_offset=0,
    )
    runner = SimpleNamespace(canary_manager=SimpleNamespace(_buffer_groups=(group,)))
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=heads),
        tp_worker=SimpleNamespace(model_runner=runner),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )


def test_fingerprints_of_kv_canary_are_moved_along() -> None:
    from kvdefrag.sglang.pools import all_buffers

    found = all_buffers(watched_by_canary(17), 16)

    assert [tuple(t.shape) for t in found if t.dtype == torch.uint8] == [(17, 32)] * 3
    assert len(found) == 7


def test_kv_canary_that_keeps_them_otherwise_is_refused() -> None:
    from kvdefrag.sglang.pools import all_buffers
    from kvdefrag.sglang.refusal import Refusal

    with pytest.raises(Refusal, match=r"KV canary buffer \(16, 32\): 17 rows are needed"):
        all_buffers(watched_by_canary(16), 16)
    made = watched_by_canary(17)
    made.tp_worker.model_runner.canary_manager = object()
    with pytest.raises(Refusal, match="--kv-canary: "):
        all_buffers(made, 16)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdefrag.sglang import compat
    from kvdefrag.sglang.refusal import Refusal

    monkeypatch.setattr(compat, "version", lambda name: "0.5.99")

    with pytest.raises(Refusal, match=r"sglang 0\.5\.99: versions 0\.5\.17 and 0\.5\.23"):
        compat.compat()
