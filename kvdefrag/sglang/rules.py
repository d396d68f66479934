"""Versions and server arguments that the plugin refuses; needs neither SGLang nor a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from kvdefrag.config import Config
from kvdefrag.sglang.refusal import Refusal

VERSIONS = ("0.5.17", "0.5.23")

_OFF: tuple[tuple[str, str], ...] = (
    ("enable_lmcache", "LMCache maps slots outside our view"),
    ("enable_flexkv", "FlexKV maps slots outside our view"),
    ("enable_unified_memory", "unified memory moves pages by itself"),
    ("enable_unified_cache_external_linker", "an external linker maps slots outside our view"),
    ("enable_hisparse", "HiSparse keeps tables by slot"),
    ("enable_hierarchical_cache", "HiCache transfers name slots that must not move meanwhile"),
    ("enable_pdmux", "pdmux runs forwards on two streams"),
    ("enable_return_routed_experts", "captured experts are kept by slot"),
    ("enable_return_indexer_topk", "captured indexer choices are kept by slot"),
    ("enable_session_radix_cache", "sessions in the tree keep slots that are not known"),
    ("enable_page_major_kv_layout", "a slot's rows lie within a page"),
    ("enable_kv_cache_sharding", "slots are owned by rank"),
    ("enable_dsa_cache_layer_split", "ranks hold different layers"),
    ("enable_pd_role_switch", "transfers name slots that must not move"),
)
_ONE: tuple[tuple[str, str], ...] = (
    ("page_size", "pages of one slot are what is defragmented"),
    ("pp_size", "other micro-batches keep slots across steps"),
    ("dcp_size", "slots are owned by rank"),
    ("attn_cp_size", "prompts are split over ranks"),
)
# SGLang raises the page size for these when it starts; a running server shows the page size itself.
_PAGED_BACKENDS = (
    *("cutedsl_mla", "cutlass_mla", "flashmla", "hpc_ops", "tokenspeed_mla"),
    *("trtllm_mha", "trtllm_mla"),
)
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


class Lookup(Protocol):
    """Returns a server argument by its name in `ServerArgs`, or what stands in for it."""

    def __call__(self, name: str, default: Any, /) -> Any: ...


def argument_refusals(argument: Lookup) -> Iterator[Refusal]:
    """Yield what stands in the way among the arguments of a server, in a fixed order."""
    for name, why in _OFF:
        if argument(name, False):
            flag = _flag(name)
            yield Refusal(flag, why, f"start the server without {flag}")
    for name, why in _ONE:
        value = argument(name, 1) or 1
        if value != 1:
            flag = _flag(name)
            yield Refusal(f"{flag} {value}", f"{why}; 1 is supported", f"use {flag} 1")
    mode = argument("disaggregation_mode", "null")
    if mode not in ("null", None):
        what, why = f"--disaggregation-mode {mode}", "transfers name slots that must not move"
        yield Refusal(what, why, "start the server without --disaggregation-mode")
    if argument("dllm_algorithm", None):
        change = "start the server without --dllm-algorithm"
        yield Refusal("--dllm-algorithm", "rows are reused across blocks", change)


def implied_refusals(argument: Lookup) -> Iterator[Refusal]:
    """Yield what will stand in the way once SGLang has resolved arguments as they are written."""
    for name in _BACKENDS:
        backend = argument(name, None)
        if backend in _PAGED_BACKENDS:
            flag = _flag(name)
            change = f"use {flag} triton, fa3 or flashinfer"
            yield Refusal(f"{flag} {backend}", "it sets a page size above 1", change)


def version_refusal(found: str) -> Refusal | None:
    """Return why a version of SGLang is refused, or None for one that is supported."""
    if found in VERSIONS:
        return None
    supported = " and ".join(VERSIONS)
    change = f"install sglang {VERSIONS[-1]}"
    return Refusal(f"sglang {found}", f"versions {supported} are supported", change)


def change_for(refused: str) -> str:
    """Return what to do about a refusal that a server has told in words; empty if unknown."""
    if refused.startswith("ConfigError: "):
        return "correct that setting in the server's environment or settings file"
    what = refused.partition(": ")[0]
    name, _, value = what.removeprefix("--").replace("-", "_").partition(" ")
    known = {name: int(value) if value.isdecimal() else value or True}
    return next((r.change for r in argument_refusals(known.get)), "")


def placement_options(config: Config) -> dict[str, Any]:
    """Return the settings that a `SlotAllocator` is made with."""
    placement = config.placement
    return {
        "page": config.page,
        "discipline": placement.free_list,
        "reservation": placement.reservation,
        "reorder_interval": placement.reorder_interval,
        "evict_for_pages": placement.evict_for_pages,
        "checks": placement.checks,
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
