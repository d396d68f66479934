"""Slots in and out of table rows, and rows of the pools; arguments as SGLang passes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor


def _stretches(rows: Tensor, starts: Tensor, ends: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Yield row, columns, and the place in a flat list of all stretches."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, slice(start, end), slice(at, at + end - start)
        at += end - start


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, width):
    """Write a flat list of slots into stretches of table rows."""
    for row, columns, place in _stretches(rows, starts, ends):
        table[row, columns] = slots[place].to(table.dtype)


def assign_extend_cache_locs_cpu(rows, table, starts, ends, out, width):
    """Read stretches of table rows into a flat list."""
    for row, columns, place in _stretches(rows, starts, ends):
        out[place] = table[row, columns].to(out.dtype)


def assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, width, topk, steps):
    """Read the slots behind each committed prefix, `topk * steps` of them."""
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + topk * steps, out, width)


def build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, width):
    """Return a row to each branch: the committed prefix, then the branch's own slots."""
    branches = torch.zeros((rows.numel() * topk, width), dtype=table.dtype)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        mine = branches[i * topk : (i + 1) * topk]
        mine[:, :length] = table[row, :length]
        own = table[row, length : length + topk * steps].view(topk, steps)
        mine[:, length : length + steps] = own
    return branches


def fill_bonus_tokens_cpu(accepted, lengths, bonus, stride):
    """Pick each request's last accepted token."""
    last = torch.arange(lengths.numel()) * stride + lengths.long() - 1
    bonus.view(-1)[: last.numel()] = accepted.reshape(-1)[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accepted, slots, out, size=None):
    """Pick the slots of the accepted nodes; -1 stands for none."""
    chosen = accepted.reshape(-1)
    chosen = chosen[chosen >= 0].long()
    out[: chosen.numel()] = slots[chosen]


def rotate_input_ids_cpu(ids, starts, counts, following, select=None):
    """Shift each request's tokens left by one and put the next token behind them."""
    behind = following.reshape(-1).tolist()
    for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        ids[start : start + count - 1] = ids[start + 1 : start + count].clone()
        ids[start + count - 1 if select is None else int(select[i])] = behind[i]


def copy_all_layer_kv_cache_cpu(pointers, strides, to, of):
    """Copy rows `of` to rows `to` in buffers given by address and row bytes; they may overlap."""
    if not to.numel():
        return
    to, of = to.long(), of.long()
    rows = int(torch.cat([to, of]).max()) + 1
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(pointer)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[to] = buffer[of].clone()
