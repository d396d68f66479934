"""SGLang's Triton backend with our attention where it is served; all the rest is stock's own.

Stock makes its metadata, writes the new rows and hands a layer to one of two functions that it
keeps as attributes. Those two are the seam: a layer that our step covers is served in their
place, with the very arguments that stock's kernel would get, and any other goes on to stock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from kvdefrag.attention import Crossover, Kind
from kvdefrag.sglang.attention_compat import Seams
from kvdefrag.sglang.attention_layers import Layer, ReadCall, decode_call, extend_call, why_not
from kvdefrag.sglang.attention_steps import Described, Make, Providers, describe
from kvdefrag.sglang.attention_support import Rows, rows_of
from kvdefrag.sglang.refusal import Refusal

logger = logging.getLogger(__name__)


class TreeAttnBackend(TritonAttnBackend):  # type: ignore[misc]
    """Serves decode, verify, draft-decode and draft-extend layers; made by `backend_class`.

    Attributes:
        kvdefrag_refused: Why this one is stock throughout, or None.
        kvdefrag_error: The fault of ours after which it is stock, or None.
        kvdefrag_layers: Layers by what became of them; a captured graph counts once.
        kvdefrag_providers: Who serves which step; None where refused.
    """

    kvdefrag_table: ClassVar[Crossover]
    kvdefrag_seams: ClassVar[Seams]
    kvdefrag_make: ClassVar[Make | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kvdefrag_refused: str | None = None
        self.kvdefrag_error: str | None = None
        self.kvdefrag_layers: Counter[str] = Counter()
        self.kvdefrag_providers: Providers | None = None
        self._described: Described | None = None
        self._planned_in_capture: bool | None = None
        self._tree_in_pool = False
        self._captured: list[Described] = []  # graphs hold addresses of what these own
        try:
            self._rows: Rows = rows_of(self, self.kvdefrag_seams)
        except Refusal as refusal:
            self.kvdefrag_refused = str(refusal)
            logger.warning("kvdefrag: attention stays stock: %s", refusal)
            return
        self.kvdefrag_providers = Providers(
            self._rows, self.kvdefrag_table, self.max_context_len, type(self).kvdefrag_make
        )
        stock: dict[str, Any] = self.__dict__
        decode, extend = stock["decode_attention_fwd"], stock["extend_attention_fwd"]
        self.decode_attention_fwd = self._around(decode, decode_call, tree=False)
        self.extend_attention_fwd = self._around(extend, extend_call, tree=True)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kw: Any) -> Any:
        found = super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kw)
        if self.kvdefrag_providers is not None:
            # A draft decodes every branch of its tree as a request of its own.
            self.kvdefrag_providers.reserve(max_num_tokens if self.skip_prefill else max_bs)
        return found

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._describe(forward_batch)
        self._plan()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture:
            # A replay has nothing to add: the plan is part of the graph.
            self._describe(forward_batch)
            if self._described is not None:
                self._captured.append(self._described)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        self._plan()

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        # Without rows to write they are in the pool already; rows that are not written are not.
        self._tree_in_pool = save_kv_cache or (k is None and v is None)
        try:
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **more
            )
        finally:
            self._tree_in_pool = False

    def kvdefrag_state(self) -> dict[str, Any]:
        """Return what `/server_info` shows, in plain values."""
        providers = self.kvdefrag_providers
        return {
            "active": self.kvdefrag_refused is None and self.kvdefrag_error is None,
            "refused": self.kvdefrag_refused,
            "error": self.kvdefrag_error,
            "providers": providers.names() if providers is not None else {},
            "layers": dict(self.kvdefrag_layers),
        }

    def _describe(self, batch: Any) -> None:
        self._described = self._planned_in_capture = None
        if self.kvdefrag_providers is None or self.kvdefrag_error is not None:
            return
        try:
            self._described = describe(self.forward_metadata, batch, self.kvdefrag_providers)
        except Exception as error:
            self._fault(error)

    def _plan(self) -> None:
        if self._described is None or self.kvdefrag_error is not None:
            return
        try:
            self._described.plan()
            self._planned_in_capture = self._capturing()
        except Exception as error:
            self._fault(error)

    def _around(self, stock: Callable[..., Any], read: ReadCall, *, tree: bool) -> Any:
        def run(*args: Any, **more: Any) -> Any:
            layer = read(args, more)
            if tree and not self._tree_in_pool:
                layer = layer._replace(plain=False)
            return None if self._serve(layer, tree=tree) else stock(*args, **more)

        uncompiled: Callable[..., Any] = torch.compiler.disable
        return uncompiled(run)

    def _serve(self, layer: Layer, *, tree: bool) -> bool:
        described = self._described
        if self.kvdefrag_error is not None or described is None:
            return False
        if (described.task.kind is not Kind.DECODE) != tree:
            return False
        if described.metadata is not self.forward_metadata:
            why = "metadata of another step"
        elif self._planned_in_capture is not self._capturing():
            why = "no plan within this graph"
        else:
            why = why_not(layer, described, self._rows)
        if why:
            self.kvdefrag_layers[why] += 1
            return False
        try:
            # A latent row's values are a part of it.
            v = None if self._rows.geometry.latent else layer.v
            described.provider.run(
                layer.q, layer.k, v, numbers=layer.numbers, mask=layer.mask, out=layer.out
            )
        except Exception as error:
            self._fault(error)
            return False
        self.kvdefrag_layers[f"{described.task.kind.value} by {described.provider.name}"] += 1
        return True

    def _capturing(self) -> bool:
        return self._rows.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _fault(self, error: Exception) -> None:
        self.kvdefrag_error = f"{type(error).__name__}: {error}"
        self._described = None
        logger.error("kvdefrag: attention is stock's again after a fault", exc_info=error)


def backend_class(
    table: Crossover, seams: Seams, *, make: Make | None = None
) -> type[TreeAttnBackend]:
    """Return the class that replaces SGLang's, under its name: SGLang compares names."""
    body = {
        "kvdefrag_table": table,
        "kvdefrag_seams": seams,
        "kvdefrag_make": staticmethod(make) if make else None,
        "__module__": TreeAttnBackend.__module__,
        "__doc__": TreeAttnBackend.__doc__,
    }
    return type("TritonAttnBackend", (TreeAttnBackend,), body)
