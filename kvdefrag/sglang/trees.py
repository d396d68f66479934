"""Slot tensors of prefix tree nodes, rewritten in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Tree(Protocol):
    """Gives the values of the nodes between the root and locked nodes."""

    name: str

    def values(self, ends: Iterable[Any]) -> Sequence[Tensor]:
        """Return the slots of every node on the paths to `ends`, int64, each node once."""
        ...


class NoTree:
    """A cache whose values cannot be rewritten, or that has none: private rows only."""

    def __init__(self, name: str) -> None:
        self.name = f"{name} (private rows only)"

    def values(self, ends: Iterable[Any]) -> Sequence[Tensor]:
        return ()


class LinkedTree:
    """`RadixCache`: nodes linked to their parents, each with a `value`."""

    def __init__(self, cache: Any) -> None:
        self.name = type(cache).__name__
        self._root = cache.root_node

    def values(self, ends: Iterable[Any]) -> Sequence[Tensor]:
        seen: set[int] = set()
        found: list[Tensor] = []
        for node in ends:
            while node is not None and node is not self._root and id(node) not in seen:
                seen.add(id(node))
                if node.value is not None and len(node.value):
                    found.append(node.value)
                node = node.parent
        return found


class CoreTree:
    """`UnifiedRadixCache`: nodes by number in a core, whose values are views of its storage."""

    def __init__(self, cache: Any, component: Any) -> None:
        self._core, self._component = cache.tree_core, component
        self.name = f"{type(cache).__name__} ({type(self._core).__name__})"

    def values(self, ends: Iterable[Any]) -> Sequence[Tensor]:
        ends = [end for end in ends if end is not None]
        seen: set[int] = set()
        found: list[Tensor] = []
        for path in self._core.collect_path_info(ends) if ends else ():
            for info in path:
                if info.node_id in seen:
                    continue
                seen.add(info.node_id)
                value = self._core.get_component_device_value(info.node_id, self._component)
                if value is not None and value.numel():
                    found.append(value)
        return found


def tree_of(cache: Any) -> Tree:
    """Return the values of a prefix cache, or `NoTree` for one we cannot rewrite."""
    name = type(cache).__name__
    if name == "StreamingSession":
        return tree_of(cache.inner)
    if name == "RadixCache" and not cache.disable:
        return LinkedTree(cache)
    if name == "UnifiedRadixCache" and _aliases(cache):
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        return CoreTree(cache, ComponentType.FULL)
    return NoTree(name)


def _aliases(cache: Any) -> bool:
    # Writing into a value must change the tree: an undocumented property of the wheel, so it is
    # tried on a tree of our own with the same core.
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    if cache.disable:
        return False
    device = cache.token_to_kv_pool_allocator.device
    scratch = type(cache)(
        CacheInitParams(
            disable=False,
            req_to_token_pool=cache.req_to_token_pool,
            token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
        )
    )
    if type(scratch.tree_core) is not type(cache.tree_core):
        return False
    slots = torch.arange(1, 4, dtype=torch.int64, device=device)
    end = scratch.insert(InsertParams(key=RadixKey(array("q", [1, 2, 3])), value=slots))
    value = CoreTree(scratch, ComponentType.FULL).values([end.last_device_node])
    if len(value) != 1:
        return False
    value[0].add_(1)
    return bool((scratch.all_values_flatten() == slots + 1).all())
