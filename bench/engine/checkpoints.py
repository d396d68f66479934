"""Checkpoints of random weights for the engine benchmarks: small, but of real widths.

SGLang's own dummy weights are so small that attention does next to nothing, so that a lost row
would not show in the output; these are scaled so that each layer matters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, WIDTH, INNER, HEADS, KV_HEADS, HEAD = 32_000, 1024, 2816, 16, 8, 128
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128

_BASE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 262_144,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    # Outside the vocabulary: nothing ends early.
    "eos_token_id": VOCABULARY,
    "attention_bias": False,
}
_LLAMA = _BASE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-5,
}
_MLA = _BASE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    # Every layer is dense: nothing here is about experts.
    "first_k_dense_replace": 1_000,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    # SGLang's rotary embedding for this model insists on a scaling.
    "rope_scaling": {
        "type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 32_768,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}

Weights = dict[str, Tensor]


def write(folder: Path, names: tuple[str, ...]) -> None:
    """Write the named checkpoints, of `llama`, `smooth`, `eagle`, `mla` and `deep`, where missing.

    `smooth` is a target whose next token depends most on the last one, so that the one-layer head
    `eagle` can guess it now and then. `deep` has a configuration only, for dummy weights: it
    serves to measure time.
    """
    made: dict[str, tuple[dict[str, Any], Callable[[], Weights] | None]] = {
        "llama": (_LLAMA | {"num_hidden_layers": 8}, lambda: _llama(1, 8)),
        "smooth": (_LLAMA | {"num_hidden_layers": 8}, lambda: _smooth(_llama(1, 8))),
        "eagle": (
            _LLAMA | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1},
            lambda: _eagle(_llama(1, 8)),
        ),
        "mla": (_MLA | {"num_hidden_layers": 4}, lambda: _mla(4)),
        "deep": (
            _LLAMA | {"num_hidden_layers": 48, "hidden_size": 4096, "intermediate_size": 14_336},
            None,
        ),
    }
    for name in names:
        config, weights = made[name]
        target = folder / name
        if (target / "config.json").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        if weights is not None:
            tensors = {k: w.to(torch.bfloat16).contiguous() for k, w in weights().items()}
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(config, indent=1))


class _Random:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=self._generator)
        return drawn * (gain / math.sqrt(columns))


def _outer(draw: _Random) -> Weights:
    return {
        "model.embed_tokens.weight": draw(VOCABULARY, WIDTH, 0.5 * math.sqrt(WIDTH)),
        "lm_head.weight": draw(VOCABULARY, WIDTH, 4.0),
        "model.norm.weight": torch.ones(WIDTH),
    }


def _rest(draw: _Random, at: str) -> Weights:
    return {
        f"{at}mlp.gate_proj.weight": draw(INNER, WIDTH),
        f"{at}mlp.up_proj.weight": draw(INNER, WIDTH),
        f"{at}mlp.down_proj.weight": draw(WIDTH, INNER),
        f"{at}input_layernorm.weight": torch.ones(WIDTH),
        f"{at}post_attention_layernorm.weight": torch.ones(WIDTH),
    }


def _llama(seed: int, layers: int) -> Weights:
    draw = _Random(seed)
    weights = _outer(draw)
    for layer in range(layers):
        weights |= _llama_layer(draw, f"model.layers.{layer}.")
    return weights


def _llama_layer(draw: _Random, at: str) -> Weights:
    return {
        f"{at}self_attn.q_proj.weight": draw(HEADS * HEAD, WIDTH, 2.0),
        f"{at}self_attn.k_proj.weight": draw(KV_HEADS * HEAD, WIDTH, 2.0),
        f"{at}self_attn.v_proj.weight": draw(KV_HEADS * HEAD, WIDTH, 2.0),
        f"{at}self_attn.o_proj.weight": draw(WIDTH, HEADS * HEAD, 2.0),
        **_rest(draw, at),
    }


def _mla(layers: int) -> Weights:
    draw = _Random(2)
    weights = _outer(draw)
    for layer in range(layers):
        at = f"model.layers.{layer}.self_attn."
        weights[f"{at}q_proj.weight"] = draw(HEADS * (NOPE + ROPE), WIDTH, 2.0)
        weights[f"{at}kv_a_proj_with_mqa.weight"] = draw(LATENT + ROPE, WIDTH, 2.0)
        weights[f"{at}kv_a_layernorm.weight"] = torch.ones(LATENT)
        weights[f"{at}kv_b_proj.weight"] = draw(HEADS * (NOPE + VALUE), LATENT, 2.0)
        weights[f"{at}o_proj.weight"] = draw(WIDTH, HEADS * VALUE, 2.0)
        weights |= _rest(draw, f"model.layers.{layer}.")
    return weights


def _smooth(target: Weights) -> Weights:
    layers = ("o_proj.weight", "down_proj.weight")
    return {name: w * (0.08 if name.endswith(layers) else 1.0) for name, w in target.items()}


def _eagle(target: Weights) -> Weights:
    draw = _Random(7)
    weights = _llama_layer(draw, "layers.0.")
    del weights["layers.0.input_layernorm.weight"]
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        weights[name] *= 0.1
    weights["embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
    weights["fc.weight"] = torch.cat([torch.eye(WIDTH), 0.1 * torch.eye(WIDTH)], dim=1)
    weights["fc.bias"] = torch.zeros(WIDTH)
    return weights
