"""What every attention backend does for IMPRESS: loads the prefixes of requests, layer by layer.

SGLang's own backend object is kept; `adopt_backend` changes its class, so that its attributes,
graph flags and identity checks stay what they are. How a backend starts a row at an offset differs
between kinds: see `torch_native.py` and `paged.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import pkgutil
import time
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable, UnsupportedError
from impress_sglang.paper.loader import LayerInputs
from impress_sglang.paper.plugin.judged_backends import BACKENDS
from impress_sglang.paper.plugin.passes import Passes
from impress_sglang.paper.plugin.row_starts import RowStarts
from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.runtime import ServingRuntime
from impress_sglang.paper.saving import Save

logger = logging.getLogger(__name__)

# From the name of SGLang's class to the name of ours.
ADOPTED = {backend.kind: backend.own for backend in BACKENDS.values()}


@dataclasses.dataclass(frozen=True, slots=True)
class _BatchRow:
    """A request of the batch with a stored prefix: its place, and its rows of the new tokens."""

    index: int
    request: StoredRequest
    new: slice


class PrefixAttention(AttentionBackend):
    """Notes which requests of a batch have a stored prefix, and loads what each layer uses of it.

    A mixin: it stands before one of SGLang's backends among the bases of a class. It subclasses
    `AttentionBackend` because Python lets an object change only to a class with the same layout.
    Prefixes are loaded in eager passes only.
    """

    times_each = False
    """Whether a subclass itself records the attention time of each request."""

    _runtime: ServingRuntime | None
    _passes: Passes | None
    _starts: RowStarts
    _rows: list[_BatchRow]
    _saves: list[tuple[Save, slice]]
    _model_runner: Any

    def begin_serving(self, model_runner: Any) -> None:
        """Set the attributes that this class needs on an object made as SGLang's own class."""
        self._runtime = None
        self._passes = None
        self._rows = []
        self._saves = []
        self._model_runner = model_runner
        self._starts = RowStarts(model_runner.req_to_token_pool)

    def connect(self, runtime: ServingRuntime, passes: Passes) -> None:
        """Connect the backend to the runtime; until then no row has a stored prefix."""
        self._runtime = runtime
        self._passes = passes

    def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        """Whether a batch loads nothing; SGLang asks before it runs one in a graph."""
        if self._runtime is None:
            return True
        live, layers = self._runtime.live, self._runtime.shape.num_layers
        for request in filter(None, map(live.get, forward_batch.rids or ())):
            loaded = request.layers_loaded == layers and not request.failed and not request.start
            if not (request.adopted or loaded):
                return False
        return True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Note which requests have a stored prefix, and where their rows start, then plan."""
        self._rows = []
        self._saves = []
        self._starts.void_reallocated()
        if forward_batch.forward_mode.is_extend():
            self._begin_extend(forward_batch)
        self._plan(forward_batch)

    def _plan(self, forward_batch: Any) -> None:
        """Prepare a batch as SGLang does."""
        super().init_forward_metadata(forward_batch)

    def _begin_extend(self, forward_batch: Any) -> None:
        live = {} if self._runtime is None else self._runtime.live
        starts, new, first, lengths = [], [], 0, forward_batch.seq_lens_cpu.tolist()
        # SGLang's warm-up batches have no requests.
        rids = forward_batch.rids or [None] * forward_batch.batch_size
        for index, rid in enumerate(rids):
            stop = first + forward_batch.extend_seq_lens_cpu[index]
            request = live.get(rid)
            start = 0 if request is None or request.adopted else request.start
            starts.append(start)
            new.append(slice(first, stop))
            if request is not None and not request.adopted:
                self._rows.append(_BatchRow(index, request, new[-1]))
            first = stop
        rows = forward_batch.req_pool_indices
        host_rows = forward_batch.req_pool_indices_cpu
        self._starts.set(rows, rows.cpu() if host_rows is None else host_rows, starts)
        if self._passes is not None:
            saves = self._passes.begin_saves(rids, lengths)
            self._saves = [(save, new[place]) for place, save in saves.items()]

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
        """SGLang's entry point, even if it then dispatches to an object of another class.

        An extend first loads what the layer uses of each stored prefix.
        """
        arguments = q, k, v, layer, forward_batch, save_kv_cache
        if not forward_batch.forward_mode.is_extend():
            output: Tensor = super().forward(*arguments, **kwargs)
            return output
        for row in self._rows:
            if row.request.layers_loaded == layer.layer_id:
                self._load_layer(row, q, k, layer, forward_batch)
        output = self._attend(*arguments, **kwargs)
        for save, new in self._saves:
            if self._runtime is not None and self._runtime.shape.coded:
                queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[new]
                save.note_queries(layer.layer_id, queries)
            save.open(layer.layer_id + 1)
        return output

    def _attend(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Run SGLang's attention for a layer, for all requests of the batch at once.

        On an accelerator only the time of the launch is recorded.
        """
        rows = () if self.times_each else self._rows
        began = time.perf_counter()
        output: Tensor = super().forward(*arguments, **keywords)
        for row in rows:
            row.request.stats.attention_ms += (time.perf_counter() - began) * 1e3
        return output

    def _load_layer(
        self, row: _BatchRow, q: Tensor, k: Tensor | None, layer: Any, forward_batch: Any
    ) -> None:
        """Fill a request's slots for a layer; if that is impossible, the request begins again.

        Where SGLang fuses rotating keys with writing them, `k` is None: the keys are in the pool.
        """
        runtime, passes = self._runtime, self._passes
        assert runtime is not None and passes is not None
        request, pool = row.request, self._model_runner.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        if not request.failed:
            if k is None:
                new_keys = keys[forward_batch.out_cache_loc[row.new]]
            else:
                new_keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[row.new]
            inputs = LayerInputs(
                queries=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[row.new],
                new_keys=new_keys,
                resident_keys=keys,
                resident_rows=request.resident_slots,
                scaling=layer.scaling,
            )
            try:
                runtime.loader.load(
                    layer.layer_id,
                    request.source,
                    inputs,
                    keys,
                    values,
                    request.slots,
                    request.stats,
                )
                request.store.ahead.top_up()
            except (PrefixUnreadable, MemoryError, torch.OutOfMemoryError) as error:
                runtime.fail(request, error)
                passes.fail(request.rid)
        if request.failed:
            # The row stays in the pass to its end and must not bring NaN into it.
            keys.index_fill_(0, request.slots, 0)
            values.index_fill_(0, request.slots, 0)
        request.end_layer()


def adopt_backend(backend: Any, model_runner: Any) -> None:
    """Turn SGLang's backend object into ours, in place.

    Raises:
        UnsupportedError: backends of this class have not been judged.
    """
    kind = type(backend)
    # Its exact class: a subclass of a judged one may read rows differently.
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("sglang.srt.layers.attention.")
    own = ADOPTED.get(name)
    if own is None:
        raise UnsupportedError(
            f"IMPRESS does not know how {kind.__name__} attends; "
            f"use --attention-backend {', '.join(BACKENDS)}"
        )
    backend.__class__ = pkgutil.resolve_name(f"impress_sglang.paper.plugin.{own}")
    backend.begin_serving(model_runner)
