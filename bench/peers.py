"""Movers that other projects have, behind one signature: `mover(buffers, src, dst) -> call`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

Buffers = tuple[torch.Tensor, ...]
Mover = Callable[[Buffers, torch.Tensor, torch.Tensor], Callable[[], object]]


def torch_index(buffers: Buffers, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
    """One `x[dst] = x[src]` a buffer."""

    def run() -> None:
        for x in buffers:
            x[dst] = x[src]

    return run


def torch_index_copy(
    buffers: Buffers, src: torch.Tensor, dst: torch.Tensor
) -> Callable[[], object]:
    """`index_select` and `index_copy_`, on the widest words a row allows."""
    wide = [_words(b) for b in buffers]

    def run() -> None:
        for x in wide:
            x.index_copy_(0, dst, x.index_select(0, src))

    return run


def torch_gather(buffers: Buffers, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
    """`torch.gather` and `scatter_` with indices expanded over the row."""
    wide = [_words(b) for b in buffers]
    width = wide[0].shape[1]
    take, put = (i.view(-1, 1).expand(-1, width) for i in (src, dst))

    def run() -> None:
        for x in wide:
            x.scatter_(0, put, torch.gather(x, 0, take))

    return run


def sglang_tiled(buffers: Buffers, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
    """SGLang's `copy_all_layer_kv_cache_tiled`, chunked as its pool does it."""
    from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_func

    row = buffers[0].shape[1]
    tile = 512 if row >= 8192 else 256 if row >= 4096 else 128
    cap = 128 if tile >= 512 else 256
    config = {
        "bytes_per_tile": tile,
        "byte_tiles": -(-row // tile),
        "num_warps": 4 if tile <= 256 else 8,
        "num_locs_upper": cap,
    }
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device="cuda")
    strides = torch.full((len(buffers),), row, dtype=torch.int64, device="cuda")

    def run() -> None:
        for first in range(0, src.numel(), cap):
            part = slice(first, first + cap)
            count = src[part].numel()
            upper = 1 << (count - 1).bit_length()
            copy_all_layer_kv_cache_func(
                pointers, strides, dst[part], src[part], count, upper, config
            )

    return run


def sglang_native(buffers: Buffers, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
    """SGLang's `move_kv_cache_native`; buffers alternate as K and V, an odd last one is extra."""
    from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

    paired = len(buffers) // 2 * 2
    rows = [b.unsqueeze(1) for b in buffers]

    def run() -> None:
        move_kv_cache_native(rows[0:paired:2], rows[1:paired:2], dst, src)
        for odd in rows[paired:]:
            odd[dst] = odd[src]

    return run


def sgl_kernel_transfer(
    buffers: Buffers, src: torch.Tensor, dst: torch.Tensor
) -> Callable[[], object]:
    """`sgl_kernel.transfer_kv_all_layer` (`_mla` for an odd number of buffers), pool to itself."""
    from sgl_kernel.kvcacheio import transfer_kv_all_layer, transfer_kv_all_layer_mla

    row = buffers[0].shape[1]

    def pointers(part: Buffers) -> torch.Tensor:
        return torch.tensor([b.data_ptr() for b in part], dtype=torch.uint64, device="cuda")

    if len(buffers) % 2:
        every = pointers(buffers)
        return lambda: transfer_kv_all_layer_mla(every, every, src, dst, row, len(buffers))
    keys, values = pointers(buffers[0::2]), pointers(buffers[1::2])
    return lambda: transfer_kv_all_layer(
        keys, keys, values, values, src, dst, row, len(buffers) // 2
    )


def memcpy_per_run(buffers: Buffers, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
    """One `cuMemcpyAsync` per run of rising rows and buffer."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    copies = _copies(buffers, src, dst)
    address, length = ctypes.c_uint64, ctypes.c_size_t

    def run() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for to, from_, size in copies:
            if copy(address(to), address(from_), length(size), stream):
                raise RuntimeError("cuMemcpyDtoDAsync failed")

    return run


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


def memcpy_batch(buffers: Buffers, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
    """One `cuMemcpyBatchAsync` for every run of every buffer (CUDA 13 driver)."""
    batch = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    copies = _copies(buffers, src, dst)
    count = len(copies)
    to, from_, size = zip(*copies, strict=True)
    words = ctypes.c_uint64 * count
    targets, sources, sizes = words(*to), words(*from_), words(*size)
    attributes, first = _Attributes(order=1), ctypes.c_size_t(0)
    stream = torch.cuda.Stream()  # the call refuses the default stream

    def run() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        code = batch(
            targets, sources, sizes, ctypes.c_size_t(count), ctypes.byref(attributes),
            ctypes.byref(first), ctypes.c_size_t(1), ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync returned {code}")
        torch.cuda.current_stream().wait_stream(stream)

    return run


def _copies(buffers: Buffers, src: torch.Tensor, dst: torch.Tensor) -> list[tuple[int, int, int]]:
    runs: list[list[int]] = []
    for s, d in zip(src.tolist(), dst.tolist(), strict=True):
        if runs and s == runs[-1][0] + runs[-1][2] and d == runs[-1][1] + runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([s, d, 1])
    return [
        (b.data_ptr() + d * b.shape[1], b.data_ptr() + s * b.shape[1], n * b.shape[1])
        for b in buffers
        for s, d, n in runs
    ]


def _words(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.int64 if buffer.shape[1] % 8 == 0 else torch.int32)


PEERS: dict[str, Mover] = {
    "torch_index": torch_index,
    "torch_index_copy": torch_index_copy,
    "torch_gather": torch_gather,
    "sglang_tiled": sglang_tiled,
    "sglang_native": sglang_native,
    "sgl_kernel_transfer": sgl_kernel_transfer,
    "memcpy_per_run": memcpy_per_run,
    "memcpy_batch": memcpy_batch,
}
