"""Where SGLang 0.5.17 and 0.5.23 differ, in one place; what we rely on is checked at start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from torch import Tensor

from kvdefrag.sglang.refusal import Refusal
from kvdefrag.sglang.rules import version_refusal


class KvLengths(NamedTuple):
    """Table row and lengths of one request, in tokens."""

    row: int
    protected: int
    committed: int
    allocated: int


class Compat(NamedTuple):
    """How one version of SGLang keeps its requests.

    Attributes:
        version: The version.
        row: Returns a request's table row.
        lengths: Returns a request's row and lengths, or None if it holds no KV.
        end_node: Returns the deepest tree node that a request has locked, or None.
        copies: Returns tensors of a chunked request that repeat slots its row names.
        sessions: Yields row and lengths that a streaming session holds, and the deepest tree node
            it has locked; also while a request runs on them.
        dp_rank: Returns the scheduler's data-parallel rank, None without such ranks.
    """

    version: str
    row: Callable[[Any], int]
    lengths: Callable[[Any], KvLengths | None]
    end_node: Callable[[Any], Any]
    copies: Callable[[Any], Sequence[Tensor]]
    sessions: Callable[[Any], Iterator[tuple[KvLengths, Any]]]
    dp_rank: Callable[[Any], int | None]


def compat() -> Compat:
    """Return how the installed version keeps its requests.

    Raises:
        Refusal: The version is not supported.
    """
    found = version("sglang")
    refusal = version_refusal(found)
    if refusal is not None:
        raise refusal
    return {"0.5.17": _OLD, "0.5.23": _NEW}[found]


def requests_of(scheduler: Any) -> Iterable[Any]:
    """Return every request that may own a table row, each once."""
    found: dict[int, Any] = {}
    for batch in (scheduler.last_batch, scheduler.running_batch):
        if batch is not None:
            found.update(zip(map(id, batch.reqs), batch.reqs, strict=True))
    if scheduler.chunked_req is not None:
        found[id(scheduler.chunked_req)] = scheduler.chunked_req
    return found.values()


def require(owner: object, *names: str) -> None:
    """Check that `owner` has every attribute we rely on.

    Raises:
        Refusal: One is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            raise Refusal(f"{type(owner).__name__}.{name}", "this build of SGLang lacks it")


def _old_row(request: Any) -> int:
    return int(request.req_pool_idx)


def _new_row(request: Any) -> int:
    return int(request.kv.req_pool_idx)


def _old_lengths(request: Any) -> KvLengths | None:
    if request.req_pool_idx is None or request.kv is None:
        return None
    return KvLengths(
        request.req_pool_idx,
        request.cache_protected_len,
        request.kv_committed_len,
        request.kv.kv_allocated_len,
    )


def _new_lengths(request: Any) -> KvLengths | None:
    kv = request.kv
    if kv is None or not kv.holds_kv or kv.req_pool_idx is None:
        return None
    return KvLengths(
        kv.req_pool_idx, kv.cache_protected_len, kv.kv_committed_len, kv.kv_allocated_len
    )


def _old_end_node(request: Any) -> Any:
    # A turn of a session has a stand-in, which is in no tree.
    return request.last_node if hasattr(request.last_node, "value") else None


def _new_end_node(request: Any) -> Any:
    return None if request.lock is None else request.lock.node


def _old_copies(request: Any) -> Sequence[Tensor]:
    # The next chunk writes these into the row, so they must follow a move.
    found = request.prefix_indices
    return (found,) if isinstance(found, Tensor) and found.numel() else ()


def _new_copies(_: Any) -> Sequence[Tensor]:
    return ()


def _old_sessions(cache: Any) -> Iterator[tuple[KvLengths, Any]]:
    for slot in getattr(cache, "slots", {}).values():
        if slot.is_holding_kv and slot.req_pool_idx is not None:
            lengths = slot.cache_protected_len, slot.kv_committed_len, slot.kv.kv_allocated_len
            yield KvLengths(slot.req_pool_idx, *lengths), slot.last_node


def _new_sessions(cache: Any) -> Iterator[tuple[KvLengths, Any]]:
    records = cache.session_records()
    for name, kv in records.items():
        if kv.holds_kv and kv.req_pool_idx is not None:
            lock = cache.session.slots[name].lock
            lengths = kv.cache_protected_len, kv.kv_committed_len, kv.kv_allocated_len
            yield KvLengths(kv.req_pool_idx, *lengths), None if lock is None else lock.node


def _old_dp_rank(scheduler: Any) -> int | None:
    rank: int | None = scheduler.ps.dp_rank
    return rank


def _new_dp_rank(_: Any) -> int | None:
    from sglang.srt.runtime_context import get_parallel

    rank: int | None = get_parallel().dp_rank
    return rank


_OLD = Compat(
    "0.5.17", _old_row, _old_lengths, _old_end_node, _old_copies, _old_sessions, _old_dp_rank
)
_NEW = Compat(
    "0.5.23", _new_row, _new_lengths, _new_end_node, _new_copies, _new_sessions, _new_dp_rank
)
