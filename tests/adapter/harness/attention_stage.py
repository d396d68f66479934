"""A real Triton backend of SGLang's over a small pool on a CPU, and hand-made batches for it.

With the stand-in for Triton our kernel is played by its float64 reference and SGLang's kernels
by nothing. With `KVDEFRAG_TRITON` naming a folder that holds Triton, both run in its interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness.attention_pool import CONTEXT, HEADS, Pool

QUERIES = 5
REAL = os.environ.get("KVDEFRAG_TRITON")
VERSION = version("sglang") if importlib.util.find_spec("sglang") else ""


def load_triton() -> None:
    """Put the real Triton in the place of its stand-in, before anything imports either."""
    if REAL and "triton" not in sys.modules:
        folder = Path(REAL) / "triton"
        spec = importlib.util.spec_from_file_location(
            "triton", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["triton"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class Reference:
    """Plays our kernel: a provider in float64."""

    name, follows_lengths = "kernel", True

    def __init__(self, task: Any, where: torch.device) -> None:
        self.task = task

    def takes(self, numbers: Any) -> bool:
        return True

    def plan(self, step: Any) -> None:
        self.step = step

    def run(self, q, k, v, *, numbers, mask=None, out=None):
        from kvdefrag_kernels.attention_reference import tree_attention_torch, visible_tokens

        step, queries = self.step, self.task.queries
        slots, seen = [], []
        for i, prefix in enumerate(step.lengths.tolist()):
            begin = int(step.indptr[i])
            held = step.indices[begin : begin + prefix]
            part = None
            if step.tree_slots is not None:
                held = torch.cat([held, step.tree_slots[i * queries : (i + 1) * queries]])
            if mask is not None:
                first = int(step.mask_starts[i])
                part = mask[first : first + queries * (prefix + queries)]
            slots.append(held)
            seen.append(visible_tokens(self.task.kind.visible, prefix, queries, part))
        found, _ = tree_attention_torch(
            self.task.geometry, q, k, v, slots, seen, **numbers._asdict()
        )
        out.copy_(found)
        return out


def kernel(task: Any, where: torch.device) -> Any:
    """Make our kernel for a CPU: in the interpreter, or its reference."""
    if not REAL:
        return Reference(task, where)
    from kvdefrag.attention import TreeKernel
    from kvdefrag_kernels.attention_geometry import Tile

    return TreeKernel(task, where, tile=Tile(16, 16, 4, 2, 2, 2))


def batch(mode: str, pool: Pool, lengths: list[int], **more: Any) -> Any:
    """Return what a backend reads of a ForwardBatch, for rows 1, 2, ..."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    fields: dict[str, Any] = {
        "forward_mode": getattr(ForwardMode, mode),
        "batch_size": len(lengths),
        "req_pool_indices": torch.arange(1, len(lengths) + 1),
        "seq_lens": torch.tensor(lengths),
        "seq_lens_cpu": torch.tensor(lengths),
        "seq_lens_sum": sum(lengths),
        "out_cache_loc_is_physical": True,
        "mha_one_shot": False,
    }
    absent = (
        "spec_info", "encoder_lens", "extend_seq_lens", "extend_prefix_lens", "positions",
        "extend_prefix_lens_cpu", "extend_seq_lens_cpu", "kv_loc_plan", "out_cache_loc",
        "attn_attend_prefix_cache", "kv_loc_cols",
    )  # fmt: skip
    return SimpleNamespace(**dict.fromkeys(absent) | fields | more)


class Gather:
    """Plays the kernel and, in 0.5.23, the object that list the slots of prefixes."""

    is_translating = False

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __getitem__(self, grid: Any) -> Any:
        return lambda table, rows, lens, indptr, start, out, stride: self.gather(
            rows, lens, indptr, out
        )

    def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out, **more) -> None:
        self.gather(req_pool_indices, seq_lens, indptr, out)

    def read_source(self, plan, *, req_pool_indices, bs) -> Any:
        return SimpleNamespace(
            ids=self.table, row_ids=req_pool_indices, row_stride=self.table.stride(0),
            entry_page_size=1, is_translated=False, v2p=None,
        )  # fmt: skip

    def gather(self, rows, lens, indptr, out) -> None:
        for row, length, begin in zip(rows.tolist(), lens.tolist(), indptr.tolist(), strict=False):
            out[begin : begin + length] = self.table[row, :length].long()


def runner(pool: Pool, **more: Any) -> Any:
    """Return what a backend reads of a ModelRunner."""
    from sglang.srt.configs.model_config import AttentionArch

    arch = AttentionArch.MLA if pool.latent else AttentionArch.MHA
    model = SimpleNamespace(
        attention_arch=arch, get_max_num_attention_heads=lambda: HEADS,
        get_num_kv_heads=lambda *_: pool.kv_heads, v_head_dim=pool.v_dim,
        swa_v_head_dim=pool.v_dim, head_dim=pool.k_dim, context_len=CONTEXT,
        hf_config=SimpleNamespace(), qk_nope_head_dim=0, qk_rope_head_dim=0, kv_lora_rank=256,
        is_encoder_decoder=False,
    )  # fmt: skip
    arguments = SimpleNamespace(
        triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None,
        chunked_prefill_size=4096, enable_deterministic_inference=False, page_size=1,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "req_to_token_pool": pool.rows, "token_to_kv_pool": pool.pool,
        "token_to_kv_pool_allocator": SimpleNamespace(), "sliding_window_size": None,
        "page_size": 1, "model_config": model, "device": "cpu", "gpu_id": 0,
        "is_draft_worker": False, "kv_cache_dtype": torch.bfloat16,
        "spec_algorithm": SimpleNamespace(is_dspark=lambda: False),
        "decode_num_tokens_per_req": lambda: QUERIES, "server_args": arguments,
        "kv_index_translator": Gather(pool.rows.req_to_token),
    }  # fmt: skip
    return SimpleNamespace(**fields | more)


def set_up(monkeypatch: Any, pool: Pool, *, deterministic: bool = False, dcp: int = 1) -> Any:
    """Give SGLang's module what it asks its context for; return the module."""
    from sglang.srt.layers.attention import triton_backend as module

    kernels = SimpleNamespace(
        triton_attention_num_kv_splits=8,
        triton_attention_split_tile_size=None,
        enable_lean_attention=False,
    )
    answers: dict[str, Any] = {
        "get_parallel": SimpleNamespace(
            attn_dcp_size=dcp, attn_dcp_rank=0, attn_tp_size=1, dcp_enabled=dcp > 1
        ),
        "get_spec": SimpleNamespace(
            speculative_num_draft_tokens=QUERIES, speculative_num_steps=3,
            speculative_eagle_topk=2,
        ),
        "get_exec": SimpleNamespace(
            kernel=kernels, dllm=SimpleNamespace(dllm_algorithm=None),
            deterministic=SimpleNamespace(enable_deterministic_inference=deterministic),
        ),
        "get_schedule": SimpleNamespace(chunked_prefill_size=4096, page_size=1),
        "cuda_graph_fully_disabled": True, "mambaish_config": None, "hybrid_gdn_config": None,
        "kimi_linear_config": None, "linear_attn_model_spec": None, "is_dspark_draft": False,
        "is_kimi_k3": False, "is_qwen3_5": False, "resolve_draft_decode_window": (0, 0),
    }  # fmt: skip
    for name, answer in answers.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)
    from sglang.srt.mem_cache import memory_pool

    if hasattr(memory_pool, "get_parallel"):
        monkeypatch.setattr(memory_pool, "get_parallel", lambda: answers["get_parallel"])
    if hasattr(module, "create_flashinfer_kv_indices_triton"):
        gather = Gather(pool.rows.req_to_token)
        monkeypatch.setattr(module, "create_flashinfer_kv_indices_triton", gather)
    return module
