"""Where SGLang looks for the row copy."""

from sgl_kernel.rows import copy_all_layer_kv_cache_cpu  # noqa: F401
