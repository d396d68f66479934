"""Which servers the plugin attaches to; everything else is refused by name."""

from __future__ import annotations

from typing import Any

from kvdefrag.sglang.allocator import KvdefragAllocator
from kvdefrag.sglang.compat import require
from kvdefrag.sglang.refusal import Refusal
from kvdefrag.sglang.rules import argument_refusals


def check_server(scheduler: Any) -> None:
    """Check the server's settings and the scheduler's parts.

    Raises:
        Refusal: Names the setting that stands in the way.
    """
    args = scheduler.server_args
    for refusal in argument_refusals(lambda name, default: getattr(args, name, default)):
        raise refusal
    if scheduler.model_config.is_encoder_decoder:
        raise Refusal("encoder-decoder model", "its rows hold encoder slots as well")
    for name, what in (("is_hybrid_swa", "sliding-window"), ("is_hybrid_ssm", "state-space")):
        if getattr(scheduler, name, False):
            raise Refusal(f"{what} model", "its second kind of slots is not known")
    require(scheduler, "req_to_token_pool", "tree_cache", "running_batch", "last_batch",
            "chunked_req", "waiting_queue", "spec_algorithm", "enable_overlap", "tp_worker",
            "metrics_collector_context")  # fmt: skip
    require(scheduler.req_to_token_pool, "req_to_token", "free_slots", "req_generation")
    _exactly(scheduler.token_to_kv_pool_allocator, KvdefragAllocator)
    _exactly_named(scheduler.req_to_token_pool, "ReqToTokenPool")
    device = scheduler.req_to_token_pool.req_to_token.device.type
    if device not in ("cuda", "cpu"):
        raise Refusal(f"device {device}", "cuda and cpu are supported")


def _exactly(found: object, wanted: type) -> None:
    if type(found) is not wanted:
        raise Refusal(f"allocator {type(found).__name__}", "TokenToKVPoolAllocator is supported")


def _exactly_named(found: object, wanted: str) -> None:
    if type(found).__name__ != wanted:
        raise Refusal(f"request table {type(found).__name__}", f"{wanted} is supported")
