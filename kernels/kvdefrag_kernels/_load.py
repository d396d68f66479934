"""Reach the device programs, or say clearly why that is not possible."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch


@functools.cache
def programs(name: str) -> ModuleType:
    """Import a module of device programs; RuntimeError names Triton where it is missing."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        raise RuntimeError(
            "this kernel needs Triton, which is not installed: pip install 'kvdefrag[gpu]', "
            "or use the *_torch reference of the same module"
        ) from error


def interpreted() -> bool:
    """True where Triton runs its interpreter, which takes CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """True where a kernel may start while the one before it ends (NVIDIA, from sm_90 on)."""
    if device.type != "cuda" or torch.version.hip is not None or interpreted():
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def meets(device: torch.device) -> bool:
    """True where all programs of a launch can wait for each other (cooperative launches)."""
    return device.type == "cuda" and torch.version.hip is None and not interpreted()


def need_device(device: torch.device, reference: str) -> None:
    """Raise unless a kernel can run on tensors of `device`; names the reference to use instead."""
    if device.type != "cuda" and not interpreted():
        raise RuntimeError(
            f"Triton kernels need GPU tensors (or TRITON_INTERPRET=1), got {device}; "
            f"use {reference} on this device"
        )


def need_indices(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless `tensor` is a contiguous 1-D int32 or int64 tensor on `device`."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")


def ceil_div(a: int, b: int) -> int:
    """Divide rounding up."""
    return -(-a // b)
