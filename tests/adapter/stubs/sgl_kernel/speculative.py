"""Where SGLang looks for the helpers of speculation."""

from sgl_kernel.rows import *  # noqa: F403
from sgl_kernel.trees import *  # noqa: F403
