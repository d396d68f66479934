"""Which servers the plugin attaches to; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvdefrag.sglang.allocator import KvdefragAllocator
from kvdefrag.sglang.compat import require
from kvdefrag.sglang.refusal import Refusal

_OFF: tuple[tuple[str, str], ...] = (
    ("enable_lmcache", "LMCache maps slots outside our view"),
    ("enable_flexkv", "FlexKV maps slots outside our view"),
    ("enable_unified_memory", "unified memory moves pages by itself"),
    ("enable_unified_cache_external_linker", "an external linker maps slots outside our view"),
    ("enable_hisparse", "HiSparse keeps tables by slot"),
    ("enable_hierarchical_cache", "HiCache transfers name slots that must not move meanwhile"),
    ("enable_pdmux", "pdmux runs forwards on two streams"),
    ("enable_return_routed_experts", "captured experts are kept by slot"),
)


def check_server(scheduler: Any) -> None:
    """Check the server's settings and the scheduler's parts.

    Raises:
        Refusal: Names the setting that stands in the way.
    """
    args = scheduler.server_args
    for name, why in _OFF:
        if getattr(args, name, False):
            raise Refusal(f"--{name.replace('_', '-')}", why)
    _one(args, "page_size", "pages of one slot are what is defragmented")
    _one(args, "pp_size", "other micro-batches keep slots across steps")
    _one(args, "dcp_size", "slots are owned by rank")
    mode = getattr(args, "disaggregation_mode", "null")
    if mode not in ("null", None):
        raise Refusal(f"--disaggregation-mode {mode}", "transfers name slots that must not move")
    if getattr(args, "dllm_algorithm", None):
        raise Refusal("--dllm-algorithm", "rows are reused across blocks")
    if scheduler.model_config.is_encoder_decoder:
        raise Refusal("encoder-decoder model", "its rows hold encoder slots as well")
    require(scheduler, "req_to_token_pool", "tree_cache", "running_batch", "last_batch",
            "chunked_req", "spec_algorithm", "enable_overlap")  # fmt: skip
    require(scheduler.req_to_token_pool, "req_to_token", "free_slots", "req_generation")
    _exactly(scheduler.token_to_kv_pool_allocator, KvdefragAllocator)
    _exactly_named(scheduler.req_to_token_pool, "ReqToTokenPool")


def _one(args: Any, name: str, why: str) -> None:
    value = getattr(args, name, 1) or 1
    if value != 1:
        raise Refusal(f"--{name.replace('_', '-')} {value}", f"{why}; 1 is supported")


def _exactly(found: object, wanted: type) -> None:
    if type(found) is not wanted:
        raise Refusal(f"allocator {type(found).__name__}", "TokenToKVPoolAllocator is supported")


def _exactly_named(found: object, wanted: str) -> None:
    if type(found).__name__ != wanted:
        raise Refusal(f"request table {type(found).__name__}", f"{wanted} is supported")


Check = Callable[[Any], None]
