"""Where kernels run."""

from __future__ import annotations

import torch


def launches(device: torch.device) -> bool:
    """Return whether kernels work on tensors of this device; elsewhere their references do."""
    return device.type == "cuda"
