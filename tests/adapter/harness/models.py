"""Tiny checkpoints with random weights, written once into a folder.

SGLang's own dummy weights are so small that attention does next to nothing: a lost row would not
show in the output. These are scaled so that each layer matters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 1000, 128, 256, 2, 4, 2, 32
LATENT, ROPE, NOPE, VALUE = 64, 16, 32, 32

Weights = dict[str, Tensor]

_BASE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    # Outside the vocabulary: nothing ends early, and nobody has to be told to ignore it, which
    # would take SGLang's admission another way.
    "eos_token_id": VOCABULARY,
    "attention_bias": False,
}
LLAMA = _BASE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-5,
}
EAGLE = LLAMA | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
MLA = _BASE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    # Every layer is dense: experts need kernels that a CPU lacks.
    "first_k_dense_replace": LAYERS,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
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
        "factor": 4,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1e-6,
        "mscale_all_dim": 1e-6,
    },
}


def write_models(folder: Path) -> None:
    """Write every checkpoint that is missing in `folder`."""
    target = _llama(seed=1)
    _write(folder / "llama", LLAMA, lambda: target)
    _write(folder / "draft", LLAMA, lambda: _noisy(target))
    _write(folder / "smooth", LLAMA, lambda: _smooth(target))
    _write(folder / "eagle", EAGLE, lambda: _eagle(target))
    _write(folder / "mla", MLA, _mla)


def _write(folder: Path, config: dict[str, Any], weights: Any) -> None:
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: w.contiguous() for name, w in weights().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


class _Random:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=self._generator)
        return drawn * (gain / math.sqrt(columns))


def _llama(seed: int, layers: int = LAYERS, prefix: str = "model.") -> Weights:
    draw = _Random(seed)
    w = {f"{prefix}embed_tokens.weight": draw(VOCABULARY, WIDTH, 0.5 * math.sqrt(WIDTH))}
    w["lm_head.weight"] = draw(VOCABULARY, WIDTH, 4.0)
    w[f"{prefix}norm.weight"] = torch.ones(WIDTH)
    for layer in range(layers):
        at = f"{prefix}layers.{layer}."
        w[f"{at}self_attn.q_proj.weight"] = draw(HEADS * HEAD, WIDTH, 2.0)
        w[f"{at}self_attn.k_proj.weight"] = draw(KV_HEADS * HEAD, WIDTH, 2.0)
        w[f"{at}self_attn.v_proj.weight"] = draw(KV_HEADS * HEAD, WIDTH, 2.0)
        w[f"{at}self_attn.o_proj.weight"] = draw(WIDTH, HEADS * HEAD, 2.0)
        w |= _rest(draw, at)
    return w


def _rest(draw: _Random, at: str) -> Weights:
    return {
        f"{at}mlp.gate_proj.weight": draw(INNER, WIDTH),
        f"{at}mlp.up_proj.weight": draw(INNER, WIDTH),
        f"{at}mlp.down_proj.weight": draw(WIDTH, INNER),
        f"{at}input_layernorm.weight": torch.ones(WIDTH),
        f"{at}post_attention_layernorm.weight": torch.ones(WIDTH),
    }


def _mla() -> Weights:
    draw = _Random(2)
    w = {"model.embed_tokens.weight": draw(VOCABULARY, WIDTH, 0.5 * math.sqrt(WIDTH))}
    w["lm_head.weight"] = draw(VOCABULARY, WIDTH, 4.0)
    w["model.norm.weight"] = torch.ones(WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        w[f"{at}self_attn.q_proj.weight"] = draw(HEADS * (NOPE + ROPE), WIDTH, 2.0)
        w[f"{at}self_attn.kv_a_proj_with_mqa.weight"] = draw(LATENT + ROPE, WIDTH, 2.0)
        w[f"{at}self_attn.kv_a_layernorm.weight"] = torch.ones(LATENT)
        w[f"{at}self_attn.kv_b_proj.weight"] = draw(HEADS * (NOPE + VALUE), LATENT, 2.0)
        w[f"{at}self_attn.o_proj.weight"] = draw(WIDTH, HEADS * VALUE, 2.0)
        w |= _rest(draw, at)
    return w


def _noisy(target: Weights) -> Weights:
    """Return a draft that is right often, not always, and from any branch."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: w + 0.03 * w.std(correction=0) * torch.randn(w.shape, generator=generator)
        for name, w in target.items()
    }


def _smooth(target: Weights) -> Weights:
    """Return a target whose next token depends on the last one most: a small head can guess it."""
    layers = ("o_proj.weight", "down_proj.weight")
    return {name: w * (0.08 if name.endswith(layers) else 1.0) for name, w in target.items()}


def _eagle(target: Weights) -> Weights:
    """Return a draft head for `_smooth` that looks at the last token, and a little around it."""
    w = _llama(seed=7, layers=1, prefix="")
    for name in ("lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"):
        del w[name]
    w["embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        w[name] *= 0.1
    w["fc.weight"] = torch.cat([torch.eye(WIDTH), 0.1 * torch.eye(WIDTH)], dim=1)
    return w
