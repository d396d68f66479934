"""The few functions of SGLang's CPU kernels that its Python imports by name, in plain torch.

There is no wheel of the CPU build. Any other name raises ImportError, which SGLang's guarded
imports expect; `torch.ops.sgl_kernel.convert_weight_packed` is missing on purpose, so that every
layer takes its plain torch path.
"""

from sgl_kernel import attend as _attend  # noqa: F401  puts two kernels under torch.ops
from sgl_kernel.rows import (  # noqa: F401
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.trees import (  # noqa: F401
    build_tree_kernel_efficient_cpu,
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
)

__version__ = "0.0.0"
