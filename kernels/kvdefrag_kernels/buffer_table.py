"""The pointer table that lets one launch reach every buffer of every pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

FIELDS = 8
STATE_WORDS = 8
# Buffers that one program serves where a unit has fewer than 16 bytes.
SHARED = 8
MAX_ROW_BYTES = 16_384


class Shape(NamedTuple):
    """How one buffer's rows are cut: units of 16, 4 or 1 bytes, units per row and per stride."""

    unit: int
    words: int
    pitch: int


class Group(NamedTuple):
    """Neighbouring lines of the table whose rows are cut alike."""

    first: int
    buffers: int
    shape: Shape


class BufferTable:
    """Base, stride and row bytes of every per-slot buffer, on the device, in one tensor.

    Dimension 0 of each buffer is the slot; what follows must be contiguous. Buffers may differ in
    dtype, row bytes (1 to 16,384) and stride. Besides the table it owns the launch state (verdict
    of the device check), 8 bytes of claim stamps per slot, and the staging memory of overlapping
    moves; nothing is allocated when rows move.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, scratch_bytes: int = 32 << 20) -> None:
        if not buffers:
            raise ValueError("a buffer table needs at least one buffer")
        if not 32 <= scratch_bytes < 1 << 31:
            raise ValueError(f"scratch_bytes must be in 32..2**31 - 1, got {scratch_bytes}")
        self.device = buffers[0].device
        self.scratch_bytes = scratch_bytes
        self.lines = torch.zeros(len(buffers), FIELDS, dtype=torch.int64, device=self.device)
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=self.device)
        self.state[0] = 1
        self.staging = torch.empty(scratch_bytes, dtype=torch.uint8, device=self.device)
        self.claims = torch.zeros(0, dtype=torch.int64, device=self.device)
        # Lines [first, last) of the buffers that one program serves.
        self.chunks = torch.zeros(len(buffers), 2, dtype=torch.int32, device=self.device)
        self.chunk_count = 0
        self.slots = 0
        self.groups: tuple[Group, ...] = ()
        self.buffers: tuple[torch.Tensor, ...] = ()
        self.refresh(buffers)

    def refresh(self, buffers: Sequence[torch.Tensor] | None = None) -> None:
        """Read addresses and strides again, after a pool was resized or remapped.

        The table keeps its own address, so a captured graph moves rows of the new buffers. It
        keeps its claim stamps too unless the pool has grown: then capture again.
        """
        found = tuple(self.buffers if buffers is None else buffers)
        if len(found) != self.lines.shape[0]:
            raise ValueError(f"the table was built for {self.lines.shape[0]} buffers")
        slots = min(_slots(b, self.device) for b in found)
        ordered = sorted(found, key=shape_of, reverse=True)
        host = torch.tensor([_line(b) for b in ordered], dtype=torch.int64)
        self.lines.copy_(host)
        if slots > self.claims.numel():
            self.claims = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.buffers, self.slots = found, slots
        self.groups = _groups([shape_of(b) for b in ordered])
        chunks = _chunks(self.groups)
        self.chunk_count = len(chunks)
        self.chunks[: len(chunks)].copy_(torch.tensor(chunks, dtype=torch.int32))

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot, over all buffers."""
        return sum(g.buffers * g.shape.unit * g.shape.words for g in self.groups)

    @property
    def history(self) -> torch.Tensor:
        """Reasons of all voided launches so far, ORed: a view of an int64 scalar on the device."""
        return self.state[4]

    @property
    def overhead_bytes(self) -> int:
        """Device memory this table holds beside the pools: staging, stamps, lines and state."""
        own = (self.lines, self.chunks, self.state, self.staging, self.claims)
        return sum(t.numel() * t.element_size() for t in own)


def shape_of(buffer: torch.Tensor) -> Shape:
    """Widest unit that address, stride and row bytes allow, and its count per row."""
    row = row_bytes_of(buffer)
    stride = buffer.stride(0) * buffer.element_size()
    odd = buffer.data_ptr() | row | stride
    unit = 16 if odd % 16 == 0 else 4 if odd % 4 == 0 else 1
    return Shape(unit, row // unit, stride // unit)


def row_bytes_of(buffer: torch.Tensor) -> int:
    """Bytes that one slot has in `buffer`."""
    return int(buffer[0].numel()) * buffer.element_size()


def signed_magic(words: int) -> int:
    """Give m - 2**31 for the 32-bit m with `n // words == n * m >> 32`, for n * words < 2**32.

    Shifted into the signed range because a launch argument's type, and so the compiled variant,
    follows its value. One word a row has no such m: the kernels do not divide then.
    """
    return (-(-(1 << 32) // words) & 0xFFFFFFFF) - (1 << 31)


def _line(buffer: torch.Tensor) -> list[int]:
    unit, words, pitch = shape_of(buffer)
    if pitch >= 1 << 31:
        raise ValueError(f"slots {pitch * unit} bytes apart are further than {unit} * 2**31 bytes")
    return [buffer.data_ptr(), pitch, words, signed_magic(words), unit, 0, 0, 0]


def _slots(buffer: torch.Tensor, device: torch.device) -> int:
    if buffer.device != device:
        raise ValueError(f"buffers must share one device: {buffer.device} beside {device}")
    if buffer.ndim == 0 or buffer.shape[0] < 1 or buffer.numel() == 0:
        raise ValueError(f"a buffer needs slots and row bytes, got shape {tuple(buffer.shape)}")
    if not buffer[0].is_contiguous():
        raise ValueError(f"rows must be contiguous, got strides {buffer.stride()}")
    row = row_bytes_of(buffer)
    if row > MAX_ROW_BYTES:
        raise ValueError(f"rows may have up to {MAX_ROW_BYTES} bytes, got {row}")
    if buffer.shape[0] > 1 and buffer.stride(0) * buffer.element_size() < row:
        raise ValueError(f"rows overlap: stride {buffer.stride(0)} elements, row {row} bytes")
    return int(buffer.shape[0])


def served(unit: int) -> int:
    """Buffers that one program of the copy serves, by the bytes of a unit."""
    return 1 if unit == 16 else SHARED


def _chunks(groups: Sequence[Group]) -> list[tuple[int, int]]:
    found = []
    for first, buffers, shape in groups:
        many = served(shape.unit)
        for i in range(first, first + buffers, many):
            found.append((i, min(i + many, first + buffers)))
    return found


def _groups(shapes: Sequence[Shape]) -> tuple[Group, ...]:
    found: list[Group] = []
    for i, shape in enumerate(shapes):
        if found and found[-1].shape == shape:
            found[-1] = found[-1]._replace(buffers=found[-1].buffers + 1)
        else:
            found.append(Group(i, 1, shape))
    return tuple(found)
