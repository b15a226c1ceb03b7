"""Attention that loads the prefixes of requests, layer by layer, and starts rows at an offset.

A prefix is loaded into slots of the pool before a layer attends. So a backend must read the KVs of
a row's earlier tokens in that layer, in the slots that `req_to_token` had when it was prepared.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable, UnsupportedError
from impress_sglang.paper.plugin.options import BACKENDS
from impress_sglang.paper.request import StoredRequest
from impress_sglang.plugin.rectangular import extend_rows


class PrefixAttention(AttentionBackend):
    """Loads what each layer uses of the stored prefixes of a batch; mixed into SGLang's backends.

    It subclasses `AttentionBackend`, as Python lets an object change only to a class with the same
    layout.
    """

    _live: Mapping[str, StoredRequest]
    _fail: Callable[[str], None]
    _pool: Any
    _starts: list[int]
    """First entry of each row of the batch."""
    _loading: list[tuple[str, StoredRequest, slice]]
    """Requests of an extend with a stored prefix, and the rows of their new tokens."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Find requests with a stored prefix, and where their rows start, then plan."""
        # SGLang's warm-up batches have no requests; rows of beams, which use no store, come last.
        rids = list[Any](forward_batch.rids or ())
        rids += [None] * (len(forward_batch.seq_lens) - len(rids))
        requests = [self._live.get(rid) for rid in rids]
        self._starts = [0 if request is None else request.start for request in requests]
        self._loading = []
        if forward_batch.forward_mode.is_extend():
            stop = 0
            counts = forward_batch.extend_seq_lens_cpu
            for rid, request, count in zip(rids, requests, counts, strict=True):
                stop += count
                if request is not None and not request.adopted:
                    self._loading.append((rid, request, slice(stop - count, stop)))
        self._plan(forward_batch)

    def _plan(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """SGLang's entry point; an extend first loads what the layer uses of each stored prefix."""
        for rid, request, new in self._loading:
            if request.layers_loaded == layer.layer_id:
                self._load_layer(rid, request, new, q, k, layer, forward_batch)
        with contextlib.ExitStack() as stack:
            for _, request, _ in self._loading:
                # On an accelerator, this is the time of the launch only.
                stack.enter_context(request.timed("attention_ms"))
            output: Tensor = super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return output

    def _load_layer(
        self,
        rid: str,
        request: StoredRequest,
        new: slice,
        q: Tensor,
        k: Tensor | None,
        layer: Any,
        forward_batch: Any,
    ) -> None:
        """Fill a request's slots for a layer; if that is impossible, the request ends.

        Where SGLang fuses rotating keys with writing them, `k` is None: the keys are in the pool.
        """
        keys = self._pool.get_key_buffer(layer.layer_id)
        values = self._pool.get_value_buffer(layer.layer_id)
        if not request.failed:
            if k is None:
                new_keys = keys[forward_batch.out_cache_loc[new]]
            else:
                new_keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[new]
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[new]
            try:
                request.load(layer.layer_id, queries, new_keys, layer.scaling, keys, values)
                request.store.ahead.top_up()
            except (PrefixUnreadable, MemoryError, torch.OutOfMemoryError) as error:
                request.fail(error)
                self._fail(rid)
        if request.failed:
            # The row stays in the pass to its end, and must not introduce NaN.
            keys.index_fill_(0, request.slots, 0)
            values.index_fill_(0, request.slots, 0)
        request.end_layer()


class ImpressTorchNativeBackend(PrefixAttention, TorchNativeAttnBackend):
    """torch_native with rectangular attention, over each row from its start."""

    def _run_sdpa_forward_extend(self, *where: Any, **named: Any) -> Tensor:
        return extend_rows(self._starts, *where, **named)

    def _run_sdpa_forward_decode(self, *where: Any, **named: Any) -> Tensor:
        # Extend each row by one token that sees all of it.
        *tensors, lengths, encoder_lens = where
        ones, named["causal"] = torch.ones_like(lengths), True
        tensors += [lengths, lengths - ones, ones, encoder_lens]
        return extend_rows(self._starts, *tensors, **named)


class ImpressTritonBackend(PrefixAttention, TritonAttnBackend):
    """SGLang's triton backend with row starts and prefix loading.

    It reads the slots of each row from SGLang's index translator once per batch, and nothing else
    of a row. So it is enough to prepare it with lengths that count from the rows' starts, and to
    start the translator there. Positions, and the lengths that the model and the scheduler see,
    still count from the beginning of the prompt.
    """

    kv_index_translator: Any

    def _plan(self, forward_batch: Any) -> None:
        if not any(self._starts):
            super()._plan(forward_batch)
            return
        starts = torch.tensor(self._starts, device=forward_batch.seq_lens.device)
        # Lengths on the host stay: they only bound sizes.
        batch = copy.copy(forward_batch)
        batch.seq_lens = _less(batch.seq_lens, starts)
        if batch.extend_prefix_lens is not None:
            batch.extend_prefix_lens = _less(batch.extend_prefix_lens, starts)
        translator = self.kv_index_translator
        self.kv_index_translator = reads = _OffsetReads(translator, starts)
        try:
            super()._plan(batch)
        finally:
            # SGLang checks that a backend keeps the runner's.
            self.kv_index_translator = translator
        assert reads.asked, "rows were read without their starts"


class _OffsetReads:
    """Stands in for SGLang's `KVIndexTranslator` while one batch is prepared.

    It has only the methods that are right with an offset, so that any other way of reading rows
    fails instead of reading from the beginning of the rows.
    """

    def __init__(self, translator: Any, starts: Tensor) -> None:
        self.asked = False
        self._translator = translator
        self._starts = starts

    def pack_read_stream(self, plan: Any, *, seq_lens: Tensor, **keywords: Any) -> Any:
        """Gather the batch's slots like SGLang, `seq_lens` entries of each row from its start."""
        assert keywords.get("kv_start_idx") is None, "a window starts rows by itself"
        self.asked = True
        keywords["kv_start_idx"] = self._starts[: seq_lens.numel()]
        return self._translator.pack_read_stream(plan, seq_lens=seq_lens, **keywords)


def _less(lengths: Tensor, starts: Tensor) -> Tensor:
    """Lengths counted from the starts, in their own dtype."""
    return lengths - starts.to(lengths.dtype)


# By the exact class: a subclass may read rows differently.
ADOPTED = {
    TorchNativeAttnBackend: ImpressTorchNativeBackend,
    TritonAttnBackend: ImpressTritonBackend,
}


def adopt_backend(
    backend: Any, live: Mapping[str, StoredRequest], pool: Any, fail: Callable[[str], None]
) -> None:
    """Turn SGLang's backend object into ours, in place; `UnsupportedError` for another class.

    `live` are requests by id, now and later; `pool`: SGLang's KV pool. `fail` gets the id of a
    request whose prefix cannot be loaded.
    """
    adopted = ADOPTED.get(type(backend))
    if adopted is None:
        raise UnsupportedError(
            f"IMPRESS does not know how {type(backend).__name__} attends; "
            f"use --attention-backend {', '.join(BACKENDS)}"
        )
    backend.__class__ = adopted
    backend._live, backend._pool, backend._fail = live, pool, fail
    backend._starts, backend._loading = [], []
