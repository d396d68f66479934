"""A process with the plugin loaded says what every name is that SGLang compares, as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import pytest
from harness import attention_stage as stage

warnings.filterwarnings("ignore")


def of(made: Any) -> list[str]:
    """Return the name of a class, or of an object's, and of its module's."""
    cls = made if isinstance(made, type) else type(made)
    return [cls.__name__, cls.__module__]


def main(*wanted: str) -> None:
    """Print what was asked for, or everything."""
    # Imported before the hooks are applied, as parts of a server may be.
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative import eagle_worker_v2

    load_plugins()
    from sglang.srt.layers.attention import triton_backend

    found: dict[str, Any] = {"class": of(triton_backend.TritonAttnBackend)}
    if "class" not in wanted:
        found["imported before"] = of(eagle_worker_v2.TritonAttnBackend)
        with pytest.MonkeyPatch.context() as patch:
            found |= compared(patch)
    print(json.dumps(found))


def compared(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what depends on the class's or the backend's name."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.speculative import dflash_utils, draft_utils

    pool = stage.Pool(latent=False)
    stage.set_up(patch, pool)
    runner = stage.runner(pool)
    factory: Any = object.__new__(draft_utils.DraftBackendFactory)
    factory.draft_model_runner, factory.topk, factory.speculative_num_steps = runner, 2, 3
    target = ATTENTION_BACKENDS["triton"](runner)
    drafts = factory._create_triton_decode_backend(), factory._create_triton_prefill_backend()
    # 0.5.23 gives more beside.
    decode, extend = (made[-1] if isinstance(made, tuple) else made for made in drafts)
    steps = decode.attn_backends
    return {
        "registry": of(target),
        "draft extend": of(extend),
        "steps of a draft": [of(step) for step in steps],
        "served": [b.kvdefrag_state()["active"] for b in (target, *steps)],
        "choices": "triton" in server_args.ATTENTION_BACKEND_CHOICES,
        "deterministic": "triton" in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        "mla handler": AttentionBackendRegistry.get_handler("triton").__name__,
        "dflash skips the mask": of(target)[0]
        in dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
