"""The attention backend: loads a request's prefix layer by layer, and starts its row at the offset.

SGLang's own backend object is kept; `adopt_backend` changes its class, so that its attributes,
graph flags and identity checks stay what they are. Decode needs nothing but the start of each row.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.errors import ChunkUnreadable, UnsupportedError
from impress_sglang.integration.recompute import PrefixCapture, recompute_prefix
from impress_sglang.integration.request import PrefixRequest
from impress_sglang.integration.runtime import ServingRuntime
from impress_sglang.integration.saving import EarlySave
from impress_sglang.management.estimate import pairs_of
from impress_sglang.timeline import ATTENTION, COPY, NO_TIMELINE
from impress_sglang.transfer.loader import LayerInputs


@dataclasses.dataclass(frozen=True, slots=True)
class _BatchRow:
    """A request of the batch that has a stored prefix: its place, and its rows among the new."""

    index: int
    request: PrefixRequest
    new: slice


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """An extend pass under way: when it began, and `loading_ms` of its requests until then."""

    began: float
    new_tokens: int
    pairs: float
    loading_ms: float


class ImpressTorchNativeBackend(TorchNativeAttnBackend):
    """torch_native with rectangular attention, row starts and prefix loading.

    Invariant: `_row_starts[row]` is the first entry of that request's row which attention sees; it
    is set in every extend batch for every row of the batch, so a row that is reused needs no reset.
    """

    _runtime: ServingRuntime | None
    _capture: PrefixCapture | None
    _row_starts: Tensor
    _rows: list[_BatchRow]
    _pass: _Pass | None
    _saves: list[EarlySave]
    _layer: int
    _model_runner: Any

    def connect(self, runtime: ServingRuntime) -> None:
        """Give the backend its requests; until then no row has a stored prefix."""
        self._runtime = runtime

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Note which requests of the batch have a stored prefix, and where their rows start."""
        super().init_forward_metadata(forward_batch)
        self._rows = []
        self._pass = None
        self._saves = []
        if not forward_batch.forward_mode.is_extend():
            return
        live = {} if self._runtime is None else self._runtime.live
        starts, first, lengths = [], 0, forward_batch.seq_lens_cpu.tolist()
        began, new_tokens, pairs = time.perf_counter(), 0, 0.0
        # SGLang's warm-up batches have no requests.
        rids = forward_batch.rids or [None] * forward_batch.batch_size
        for index, rid in enumerate(rids):
            stop = first + forward_batch.extend_seq_lens_cpu[index]
            request = live.get(rid)
            start = 0 if request is None or request.adopted else request.start
            starts.append(start)
            new_tokens += stop - first
            pairs += pairs_of(lengths[index] - start - (stop - first), stop - first)
            if request is not None and not request.adopted:
                self._rows.append(_BatchRow(index, request, slice(first, stop)))
            first = stop
        self._row_starts[forward_batch.req_pool_indices] = torch.tensor(
            starts, device=self._row_starts.device
        )
        if self._runtime is not None and self._runtime.begin_saves is not None:
            self._saves = self._runtime.begin_saves(rids, lengths)
        loading = sum(row.request.loading_ms for row in self._rows)
        self._pass = _Pass(began, new_tokens, pairs, loading)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """SGLang's entry; a recompute of a prefix keeps its KVs outside the pool."""
        if self._capture is not None:
            return self._capture.attend(q, k, v, layer)
        output: Tensor = super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return output

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Load what the layer uses of each stored prefix, then attend."""
        for row in self._rows:
            if row.request.layers_loaded == layer.layer_id:
                self._load_layer(row, q, k, layer, forward_batch)
        self._layer = layer.layer_id
        output: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        for save in self._saves:
            save.open(self._layer + 1)
        if self._runtime is not None and self._layer == self._runtime.shape.num_layers - 1:
            self._note_pass(self._runtime)
        return output

    def _note_pass(self, runtime: ServingRuntime) -> None:
        """Tell the estimator what computing took; a recompute in between is not what it means."""
        noted, requests = self._pass, [row.request for row in self._rows]
        if noted is None or any(request.recomputed for request in requests):
            return
        loading = sum(request.loading_ms for request in requests) - noted.loading_ms
        seconds = time.perf_counter() - noted.began - loading / 1e3
        runtime.estimator.note_forward(noted.new_tokens, noted.pairs, seconds)

    def _load_layer(
        self, row: _BatchRow, q: Tensor, k: Tensor, layer: Any, forward_batch: Any
    ) -> None:
        assert self._runtime is not None
        request = row.request
        key_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        # Only a selection needs the resident keys, for its softmax.
        resident = request.resident_slots[: request.resident_len if request.start else 0]
        inputs = LayerInputs(
            queries=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[row.new],
            new_keys=k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[row.new],
            resident_keys=key_pool[resident],
            scaling=layer.scaling,
        )
        try:
            loaded = self._runtime.load_layer(layer.layer_id, request, inputs)
        except ChunkUnreadable as error:
            self._recompute(request, error, forward_batch)
            loaded = self._runtime.load_layer(layer.layer_id, request, inputs)
        with request.stats.timed("load_ms"), request.timeline.span(COPY, layer.layer_id):
            key_pool[request.slots] = loaded.keys.to(key_pool.device)
            value_pool[request.slots] = loaded.values.to(value_pool.device)
        self._runtime.finish_layer(request)

    def _recompute(
        self, request: PrefixRequest, error: ChunkUnreadable, forward_batch: Any
    ) -> None:
        """Replace an unreadable source by KVs computed here, so that the answer is still right."""
        assert self._runtime is not None
        self._runtime.discard_source(request, error)
        pool = self.token_to_kv_pool
        self._capture = PrefixCapture(pool, request.resident_slots, self._runtime.shape)
        try:
            recompute_prefix(self._model_runner, self._capture, request, forward_batch)
            request.source = self._capture.source()
        finally:
            self._capture = None

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        assert encoder_lens is None and not is_cross_attn
        return self._attend_rows(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_seq_lens.tolist(),
            scaling,
            causal,
            sliding_window_size,
        )

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        assert encoder_lens is None and not is_cross_attn
        # A decode step extends each row by one token, which sees all of it.
        return self._attend_rows(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            [1] * len(seq_lens),
            scaling,
            True,
            sliding_window_size,
        )

    def _attend_rows(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        new_lens: list[int],
        scaling: float | None,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        """Attention of each request's last new tokens over its row, from the row's start on."""
        starts = self._row_starts[req_pool_indices].tolist()
        requests = {row.index: row.request for row in self._rows}
        first = 0
        for index, (row, kv_len, new_len) in enumerate(
            zip(req_pool_indices.tolist(), seq_lens.tolist(), new_lens, strict=True)
        ):
            began = time.perf_counter()
            request = requests.get(index)
            timeline = NO_TIMELINE if request is None else request.timeline
            slots = req_to_token[row, starts[index] : kv_len]
            with timeline.span(ATTENTION, self._layer):
                output[first : first + new_len] = rectangular_attention(
                    query[first : first + new_len],
                    k_cache[slots],
                    v_cache[slots],
                    scaling=scaling,
                    causal=causal,
                    window=window,
                )
            if request is not None:
                request.attention_ms += (time.perf_counter() - began) * 1e3
            first += new_len
        return output


def adopt_backend(backend: Any, model_runner: Any) -> None:
    """Turn SGLang's backend object into ours, in place.

    Raises:
        UnsupportedError: this kind of backend cannot carry a start offset.
    """
    if type(backend) is not TorchNativeAttnBackend:
        raise UnsupportedError(
            f"IMPRESS cannot start rows at an offset in {type(backend).__name__}; "
            "use --attention-backend torch_native"
        )
    backend.__class__ = ImpressTorchNativeBackend
    backend._runtime = None
    backend._capture = None
    backend._rows = []
    backend._pass = None
    backend._saves = []
    backend._layer = 0
    backend._model_runner = model_runner
    num_rows = model_runner.req_to_token_pool.req_to_token.shape[0]
    backend._row_starts = torch.zeros(num_rows, dtype=torch.int64, device=backend.device)
