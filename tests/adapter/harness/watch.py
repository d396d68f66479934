"""Looks at every row of every pool around each step; any difference is an error.

Four things are checked, all bit for bit but the third:

1. our step moves rows only: each live row reads the same in every buffer before and after;
2. SGLang's own step leaves committed rows alone: a slot that is live was not given out again;
3. every row encodes its token: the values of layer 0 depend on the token alone, and are computed
   here from the checkpoint;
4. free list, table rows and tree hold each slot 1..size, private and free ones exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvdefrag.sglang.census import owners_of
from kvdefrag.sglang.compat import Compat, compat, requests_of


class WatchError(AssertionError):
    """A row or a slot is not what it should be."""


class Live(NamedTuple):
    """One row: slots of its tokens, their bytes in every buffer; an idle session has no request."""

    name: str
    request: Any
    row: int
    protected: int
    committed: int
    slots: Tensor
    content: list[Tensor]


class Codebook:
    """What layer 0 of a checkpoint stores for each token, whatever its position.

    Args:
        folder: The checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        x = _normed(weights["model.embed_tokens.weight"], 1e-5)
        at = "model.layers.0.self_attn."
        if f"{at}v_proj.weight" in weights:
            self.rows, self.field = x @ weights[f"{at}v_proj.weight"].T, "v_buffer"
            return
        latent = (x @ weights[f"{at}kv_a_proj_with_mqa.weight"].T)[:, :64]
        self.rows, self.field = _normed(latent, 1e-6), "kv_buffer"

    def check(self, pool: Any, slots: Tensor, tokens: Tensor) -> None:
        """Raise unless the rows at `slots` hold `tokens`."""
        wanted = self.rows[tokens]
        found = getattr(pool, self.field)[0][slots].flatten(1)[:, : wanted.shape[1]]
        wrong = ~torch.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(1)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise WatchError(f"slot {int(slots[at])} does not hold its token {int(tokens[at])}")


class Watch:
    """Checks a scheduler's rows and slots.

    Args:
        scheduler: SGLang's.
        book: Codebook of the target's checkpoint.
        drafts: Pools of the draft workers.

    Attributes:
        rows: Rows compared so far.
    """

    def __init__(self, scheduler: Any, book: Codebook, drafts: list[Any]) -> None:
        self._scheduler, self._book = scheduler, book
        self._names: Compat = compat()
        self._pools = [scheduler.token_to_kv_pool_allocator.get_kvcache(), *drafts]
        self._buffers = [b for pool in self._pools for b in _buffers(pool)]
        self._before: dict[str, Live] = {}
        self._known: dict[tuple[str, int], Live] = {}
        self._available = 0
        self._followed = False
        self.rows = 0

    def at_top(self) -> None:
        """Check before anything of a step has happened."""
        now = {live.name: live for live in self._live()}
        for live in now.values():
            self._against_known(live)
            self._tokens(live)
        self._permutation()
        self._known = {(rid, live.row): live for rid, live in now.items()}

    def before(self) -> None:
        """Look at everything before our step."""
        self._before = {live.name: live for live in self._live()}
        self._followed = self._copies_follow()
        self._available = self._scheduler.token_to_kv_pool_allocator.available_size()

    def after(self) -> None:
        """Check that our step moved rows and nothing else."""
        now = {live.name: live for live in self._live()}
        if now.keys() != self._before.keys():
            raise WatchError("a step changed who is running")
        for rid, live in now.items():
            was = self._before[rid]
            _same(was, live, was.slots.shape[0], "our step changed")
            self._tokens(live)
            self.rows += live.slots.shape[0] * len(self._buffers)
        available = self._scheduler.token_to_kv_pool_allocator.available_size()
        if available != self._available:
            raise WatchError(f"a step changed the free slots: {self._available} to {available}")
        if self._followed and not self._copies_follow():
            raise WatchError("the prefix indices of the chunked request no longer name its slots")
        self._permutation()
        self._known = {(rid, live.row): live for rid, live in now.items()}

    def _copies_follow(self) -> bool:
        # 0.5.17: the next chunk may write these into the row again.
        chunked = self._scheduler.chunked_req
        copied = getattr(chunked, "prefix_indices", None)
        lengths = None if chunked is None else self._names.lengths(chunked)
        if lengths is None or not isinstance(copied, Tensor) or not len(copied):
            return False
        table = self._scheduler.req_to_token_pool.req_to_token
        return torch.equal(table[lengths.row, : len(copied)].long(), copied.long())

    def _live(self) -> Iterator[Live]:
        s = self._scheduler
        table = s.req_to_token_pool.req_to_token
        found = [(r, k) for r in requests_of(s) if (k := self._names.lengths(r)) is not None]
        running = {lengths.row: request for request, lengths in found}
        for lengths, _ in owners_of(s, self._names):
            request = running.get(lengths.row)
            name = f"row {lengths.row} of a session" if request is None else request.rid
            slots = table[lengths.row, : lengths.allocated].long().clone()
            content = [buffer[slots] for buffer in self._buffers]
            committed = min(lengths.committed, lengths.allocated)
            yield Live(name, request, lengths.row, lengths.protected, committed, slots, content)

    def _against_known(self, live: Live) -> None:
        was = self._known.get((live.name, live.row))
        if was is None or live.committed < was.committed:
            return
        # SGLang itself may exchange slots for the tree's, which hold the same tokens.
        length = min(was.committed, live.slots.shape[0])
        theirs = was.slots[:length] != live.slots[:length]
        theirs[live.protected :] = False
        keep = ~theirs
        for a, b in zip(was.content, live.content, strict=True):
            same = (a[:length] == b[:length]).flatten(1).all(1) | ~keep
            if not same.all():
                position = int((~same).nonzero()[0])
                slot = int(live.slots[position])
                raise WatchError(f"{live.name}: slot {slot} at position {position} was overwritten")

    def _tokens(self, live: Live) -> None:
        if live.request is None:
            return
        tokens = [*live.request.origin_input_ids, *live.request.output_ids]
        length = min(live.committed, len(tokens))
        named = torch.tensor(tokens[:length], dtype=torch.int64)
        self._book.check(self._pools[0], live.slots[:length], named)

    def _permutation(self) -> None:
        s = self._scheduler
        allocator = s.token_to_kv_pool_allocator
        table = s.req_to_token_pool.req_to_token
        core = getattr(allocator, "core", None)
        book = core.reservations if core is not None else None
        private, shared = [], [_tree_values(s.tree_cache)]
        rows = 0
        for lengths, _ in owners_of(s, self._names):
            rows += 1
            end = max(lengths.allocated, int(book.held[lengths.row]) if book else 0)
            private.append(table[lengths.row, lengths.protected : end].long())
            shared.append(table[lengths.row, : lengths.protected].long())
        if rows != s.req_to_token_pool.size - len(s.req_to_token_pool.free_slots):
            raise WatchError(f"{rows} rows have a known owner, others are taken too")
        named = [torch.cat([*private, torch.zeros(0, dtype=torch.int64)])]
        named += [torch.cat(shared).unique()]
        named += [torch.cat([allocator.free_pages, allocator.release_pages])]
        every = torch.cat(named).sort().values
        if not torch.equal(every, torch.arange(1, allocator.size + 1)):
            raise WatchError(_what_is_wrong(*named, allocator.size))


def _what_is_wrong(private: Tensor, shared: Tensor, free: Tensor, size: int) -> str:
    every = torch.cat([private, shared, free])
    count = every.bincount(minlength=size + 1)
    lost, twice = (count[1:] == 0).nonzero() + 1, (count > 1).nonzero()
    return (
        f"slots nobody holds: {lost.flatten().tolist()[:8]}, held twice: "
        f"{twice.flatten().tolist()[:8]} (of {len(private)} private, {len(shared)} shared, "
        f"{len(free)} free)"
    )


def _same(was: Live, live: Live, length: int, what: str) -> None:
    for number, (a, b) in enumerate(zip(was.content, live.content, strict=True)):
        wrong = (a[:length] != b[:length]).flatten(1).any(1)
        if wrong.any():
            position = int(wrong.nonzero()[0])
            raise WatchError(
                f"{what} buffer {number} of {live.name} at position {position}: slot "
                f"{int(was.slots[position])} to {int(live.slots[position])}"
            )


def _tree_values(cache: Any) -> Tensor:
    cache = getattr(cache, "inner", cache)
    if getattr(cache, "disable", False) or not hasattr(cache, "all_values_flatten"):
        return torch.zeros(0, dtype=torch.int64)
    if not cache.evictable_size() + cache.protected_size():
        return torch.zeros(0, dtype=torch.int64)  # 0.5.17 fails on an empty tree
    return cache.all_values_flatten().long().flatten()


def _buffers(pool: Any) -> list[Tensor]:
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def _normed(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
