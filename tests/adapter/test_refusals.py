"""What is not supported is refused by name, and the scheduler is left as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch


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
        spec_algorithm=None,
        enable_overlap=True,
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
]


def test_a_plain_server_is_supported() -> None:
    from kvdefrag.sglang.support import check_server

    check_server(scheduler(page_size=1, pp_size=1, disaggregation_mode="null"))


@pytest.mark.parametrize("flag", FLAGS)
def test_a_feature_that_keeps_slots_by_itself_is_refused(flag: str) -> None:
    assert refused(scheduler(**{flag: True})).startswith(f"--{flag.replace('_', '-')}: ")


def test_every_refused_flag_is_tested_above() -> None:
    from kvdefrag.sglang import support

    assert {name for name, _ in support._OFF} == set(FLAGS)


def test_case_34_pages_of_more_than_one_slot_are_refused() -> None:
    assert refused(scheduler(page_size=64)).startswith("--page-size 64: ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"pp_size": 2}, "--pp-size 2: "),
        ({"dcp_size": 2}, "--dcp-size 2: "),
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


@pytest.mark.parametrize("name", ["chunked_req", "running_batch", "enable_overlap"])
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


@pytest.mark.parametrize(
    "field", ["k_scale_buffer", "v_scale_buffer", "index_k_with_scale_buffer", "anything_new"]
)
def test_case_06_scales_and_other_rows_that_are_not_known_are_refused(field: str) -> None:
    assert f"MHATokenToKVPool.{field}: " in pool_refused(heads(**{field: [torch.zeros(17, 4)]}))


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


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdefrag.sglang import compat
    from kvdefrag.sglang.refusal import Refusal

    monkeypatch.setattr(compat, "version", lambda name: "0.5.99")

    with pytest.raises(Refusal, match=r"sglang 0\.5\.99: versions 0\.5\.17 and 0\.5\.23"):
        compat.compat()
