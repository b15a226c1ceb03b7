"""The small engine of `bench.engine.run`: layers of a model, computed or stored prefixes, saving.

What a layer costs depends on shapes, not on weights: weights are random, and a few layers may stand
for all. Rotary embedding is left out (elementwise, far below a hundredth of a layer). A stored
prefix goes through the core code as in the server (`serving.runtime`, `integration.attention`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from bench.core.emulation import SlowFileSystem
from bench.engine.report import MODEL, Served, stage_clock
from bench.engine.workload import ModelShape, Planter, Question, Request, Workload
from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.config import ImpressConfig
from impress_sglang.management import rewriting
from impress_sglang.management.policies import Wish, make_policy
from impress_sglang.management.readers import AnySource
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredMatch
from impress_sglang.management.writing import Offer, StoreOutcome
from impress_sglang.options import EXACT_BITS
from impress_sglang.serving.estimate import Estimate, Estimator, Work, pairs_of
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.writer import LayerReader, WriteAbandoned
from impress_sglang.timeline import ATTENTION, COPY, NO_TIMELINE, STAGES, Timeline
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.precise import ALLOCATIONS, PreciseLoader
from impress_sglang.transfer.resident import parts_alone
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import Demand, SegmentSource

logger = logging.getLogger(__name__)

# Attention of n queries [n, Hq, D] over [kv, G, D] keys and values, the last n of them causal.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
# Fills the pool of a layer from its queries, keys and values; the length that attention sees.
Place = Callable[[int, Tensor, Tensor, Tensor], int]

# How far two attention kernels may differ, in units of their outputs' size.
KERNEL_TOLERANCE = 0.05
NAMESPACE = "bench"
# Names the model of the stores.
IDENTITY = "0" * 32
POLL_SECONDS = 0.01


class EngineFailed(RuntimeError):
    """The benchmark cannot go on; the message says why, for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, [out, in]; queries, keys and values in one, gate and up in one."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    ffn_norm: Tensor
    up: Tensor
    down: Tensor


class Model:
    """Random layers of a shape on one device."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        distinct_layers: int,
        seed: int,
    ) -> None:
        """Layer i has the weights of layer i modulo `distinct_layers`."""
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.attend, self.attention_name = choose_attention(shape, device, dtype)
        self._generator = torch.Generator(device).manual_seed(seed)
        count = min(distinct_layers, shape.layers)
        self._layers = [self._make_layer() for _ in range(count)]
        self._embedding = self._random(shape.vocabulary, shape.hidden, spread=1.0)
        self._head = self._random(shape.vocabulary, shape.hidden)
        self._norm = torch.ones(shape.hidden, device=device, dtype=dtype)

    @property
    def distinct_layers(self) -> int:
        """Layers that have weights of their own."""
        return len(self._layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [n, hidden] of int64 [n] tokens; any number is a token."""
        return functional.embedding(tokens % self.shape.vocabulary, self._embedding)

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [n, Hq, D], keys and values [n, G, D] of hidden states [n, hidden]."""
        shape, own = self.shape, self._layers[layer % len(self._layers)]
        normed = self._normed(hidden, own.attention_norm)
        flat = self._linear(normed, own.qkv).view(len(hidden), -1, shape.head_dim)
        heads = [shape.query_heads, shape.kv_heads, shape.kv_heads]
        queries, keys, values = flat.split(heads, dim=1)
        return queries, keys, values

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Hidden states after a layer, from those before it and attention's output [n, Hq, D]."""
        own = self._layers[layer % len(self._layers)]
        hidden = hidden + self._linear(attended.reshape(len(hidden), -1), own.output)
        up = self._linear(self._normed(hidden, own.ffn_norm), own.up)
        if self.shape.gated:
            gate, up = up.chunk(2, dim=1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.relu(up)
        return hidden + self._linear(inner, own.down)

    def first_token(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely token after hidden states [n, hidden], and the last logits [vocab]."""
        logits = functional.linear(self._normed(hidden[-1:], self._norm), self._head)[0]
        return logits.argmax(), logits

    def _make_layer(self) -> _Layer:
        shape = self.shape
        inner = shape.query_heads * shape.head_dim
        both = inner + 2 * shape.kv_heads * shape.head_dim
        ones = torch.ones(shape.hidden, device=self.device, dtype=self.dtype)
        return _Layer(
            attention_norm=ones,
            qkv=self._random(both, shape.hidden),
            output=self._random(shape.hidden, inner),
            ffn_norm=ones.clone(),
            up=self._random(shape.ffn * (2 if shape.gated else 1), shape.hidden),
            down=self._random(shape.hidden, shape.ffn),
        )

    def _random(self, rows: int, columns: int, spread: float | None = None) -> Tensor:
        """Normal weights that keep the size of what they are applied to, or of a given spread."""
        weights = torch.randn(
            rows, columns, generator=self._generator, device=self.device, dtype=self.dtype
        )
        return weights.mul_(columns**-0.5 if spread is None else spread)

    def _linear(self, rows: Tensor, weights: Tensor) -> Tensor:
        bias = None if self.shape.gated else weights.new_zeros(len(weights))
        return functional.linear(rows, weights, bias)

    def _normed(self, hidden: Tensor, weights: Tensor) -> Tensor:
        size = (self.shape.hidden,)
        if self.shape.gated:
            return functional.rms_norm(hidden, size, weights)
        return functional.layer_norm(hidden, size, weights, torch.zeros_like(weights))


def choose_attention(
    shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, str]:
    """The same attention for all systems of a run, and its name.

    On a CPU that is the one of the server. It hides keys by a mask, which takes an accelerator off
    its fast kernels; there the aligned causal kernel is taken if it works for these heads.
    """
    scaling = shape.head_dim**-0.5

    def masked(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return rectangular_attention(queries, keys, values, scaling=scaling, causal=True)

    def aligned(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return aligned_attention(queries, keys, values, scaling)

    if device.type == "cpu":
        return masked, "rectangular"
    if _agree(aligned, masked, shape, device, dtype):
        return aligned, "lower-right causal"
    return masked, "rectangular"


def aligned_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention of the last n of kv positions by torch's lower-right causal bias.

    Args:
        queries: [n, Hq, D].
        keys: [kv, G, D], Hq a multiple of G, kv >= n.
        values: [kv, G, Dv].
        scaling: factor of the logits.

    Returns:
        [n, Hq, Dv].
    """
    from torch.nn.attention.bias import causal_lower_right

    output = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=causal_lower_right(len(queries), len(keys)),
        scale=scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)


def _agree(
    one: Attention, other: Attention, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether an attention runs for these heads and gives what another one gives."""
    generator = torch.Generator(device).manual_seed(0)

    def rows(count: int, heads: int) -> Tensor:
        size = (count, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    tensors = rows(40, shape.query_heads), rows(200, shape.kv_heads), rows(200, shape.kv_heads)
    try:
        found, expected = one(*tensors).float(), other(*tensors).float()
    except RuntimeError as error:
        logger.warning("attention by a mask, since the aligned kernel fails here: %s", error)
        return False
    return bool((found - expected).abs().max() <= KERNEL_TOLERANCE * expected.abs().max())


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A request with all that is known before its time begins: int32 [m + n] and its tensors."""

    prompt: npt.NDArray[np.int32]
    tokens: Tensor
    question: Question


class Engine:
    """A model with room for the KVs of one request, and the planted KVs.

    One thread uses it, and one may read the pool while it computes (`Gate`).
    """

    def __init__(self, model: Model, planter: Planter, workload: Workload) -> None:
        self.model = model
        self.planter = planter
        self.workload = workload
        shape, rows = model.shape, max(workload.lengths) + workload.longest_new
        size = (rows, shape.kv_heads, shape.head_dim)

        def memory() -> Tensor:
            return torch.zeros(size, device=model.device, dtype=model.dtype)

        self.keys = [memory() for _ in range(shape.layers)]
        self.values = [memory() for _ in range(shape.layers)]
        self.passes: list[tuple[int, float, float]] = []
        """New tokens, attended pairs and seconds of each request that was computed."""
        self._spare = memory(), memory()

    def prepare(self, request: Request) -> _Asked:
        """Plant the question of a request, and wait until the device is idle."""
        prompt = self.workload.prompt(request)
        tokens = torch.from_numpy(prompt.astype(np.int64)).to(self.model.device)
        question = self.planter.question(request.question, request.new_tokens)
        self.synchronize()
        return _Asked(prompt, tokens, question)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def plant(self, prefix: int) -> None:
        """Put the KVs of a prefix into the pool."""
        length = self.workload.lengths[prefix]
        for layer, (keys, values) in enumerate(self.planter.prefix(prefix, length)):
            self.keys[layer][:length] = keys
            self.values[layer][:length] = values

    def serve_computed(self, request: Request, gate: Gate | None = None) -> Served:
        """Compute prefix and question; the gate opens as layers are done.

        What the prefix's projections give is written to memory that nobody reads: the pool has its
        planted KVs already.
        """
        self.plant(request.prefix)
        asked, length = self.prepare(request), self.workload.lengths[request.prefix]
        clock = stage_clock(str(request.question), self.model.device)

        def place(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> int:
            with clock.span(COPY, layer):
                for spare, computed in zip(self._spare, (keys, values), strict=True):
                    spare[:length] = computed[:length]
                queries[length:] = asked.question.queries[layer]
                return self.add_new(layer, length, asked.question, values[length:])

        opened = None if gate is None else gate.open
        logits = self.forward(asked.tokens, clock, place, opened)
        clock.finish()
        new = len(asked.tokens)
        self.passes.append((new, pairs_of(0, new), clock.duration_ms / 1e3))
        return Served(clock.duration_ms, clock.totals(), logits)

    def add_new(self, layer: int, before: int, question: Question, values: Tensor) -> int:
        """Write the new tokens' planted keys and computed values [n, G, D] after `before` rows."""
        stop = before + len(values)
        self.keys[layer][before:stop] = question.new_keys[layer]
        self.values[layer][before:stop] = values
        return stop

    def forward(
        self,
        tokens: Tensor,
        timeline: Timeline,
        place: Place,
        done: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run the model over tokens [n]; logits of the token after them, computed when it returns.

        `place` may overwrite the queries that it is given; `done` hears of each layer's KVs.
        """
        model = self.model
        hidden = model.embed(tokens)
        for layer in range(model.shape.layers):
            with timeline.span(MODEL, layer):
                queries, keys, values = model.project(layer, hidden)
            count = place(layer, queries, keys, values)
            if done is not None:
                done(layer)
            with timeline.span(ATTENTION, layer):
                attended = model.attend(
                    queries, self.keys[layer][:count], self.values[layer][:count]
                )
            with timeline.span(MODEL, layer):
                hidden = model.finish(layer, hidden, attended)
        with timeline.span(MODEL, model.shape.layers):
            token, logits = model.first_token(hidden)
        int(token)
        self.synchronize()
        return logits


class Gate:
    """Lets the writing thread read each layer of the pool once it is computed (AttentionStore)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cuda = engine.model.device.type == "cuda"
        self._changed = threading.Condition()
        self._events: list[Any] = []
        self._abandoned = False

    def open(self, layer: int) -> None:
        """The KVs of a layer are there, or will be when the device is done."""
        event = torch.cuda.current_stream().record_event() if self._cuda else None
        with self._changed:
            assert layer == len(self._events)
            self._events.append(event)
            self._changed.notify_all()

    def abandon(self) -> None:
        """There will be no more layers."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def reader(self, start: int, stop: int) -> LayerReader:
        """Gives the rows [start, stop) of each layer, on the CPU."""
        stream = torch.cuda.Stream(self._engine.model.device) if self._cuda else None

        def read(layer: int) -> tuple[Tensor, Tensor]:
            event = self._wait(layer)
            with torch.cuda.stream(stream):
                if stream is not None:
                    stream.wait_event(event)
                rows = self._engine.keys[layer][start:stop], self._engine.values[layer][start:stop]
                return rows[0].cpu(), rows[1].cpu()

        return read

    def _wait(self, layer: int) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or len(self._events) > layer)
            if len(self._events) <= layer:
                raise WriteAbandoned("the engine has stopped")
            return self._events[layer]


def compute_and_store(engine: Engine, store: PrefixStore, request: Request) -> Served:
    """Serve a request whose prefix is not stored, and save the prefix behind the computing.

    Raises:
        EngineFailed: the store did not take it.
    """
    with _saving(engine, store, request.prefix) as gate:
        return engine.serve_computed(request, gate)


def store_planted(engine: Engine, store: PrefixStore, prefix: int) -> None:
    """Save the planted KVs of a prefix without computing it.

    Raises:
        EngineFailed: the store did not take it.
    """
    with _saving(engine, store, prefix) as gate:
        engine.plant(prefix)
        for layer in range(engine.model.shape.layers):
            gate.open(layer)


@contextmanager
def _saving(engine: Engine, store: PrefixStore, prefix: int) -> Iterator[Gate]:
    """A prefix is offered when its pass begins; the pool is free when the block has ended."""
    tokens, gate = engine.workload.tokens(prefix), Gate(engine)
    outcome = store.writes.offer(
        NAMESPACE,
        Offer(
            tokens,
            lambda start: gate.reader(start, len(tokens)),
            lambda: None,
            gate.abandon,
            min_tokens=1,
        ),
    )
    if outcome is not StoreOutcome.ACCEPTED:
        raise EngineFailed(f"a prefix of {len(tokens)} tokens was not stored: {outcome.value}")
    try:
        yield gate
    except BaseException:
        gate.abandon()
        raise
    finally:
        store.writes.drain()
    if store.stats.segments_failed:
        raise EngineFailed(f"a prefix of {len(tokens)} tokens could not be written")


# Fills slots with what a layer uses.
_LoadLayer = Callable[[int, LayerInputs, LayerSlots, LoadStats], None]


class StoredEngine:
    """An engine in front of a store: prefixes are loaded by a policy."""

    def __init__(self, engine: Engine, config: ImpressConfig, shape: KVShape) -> None:
        """Open the store, which has the prefixes already.

        Raises:
            ImpressError: it cannot be opened, or its caches do not fit in memory.
        """
        self.policy = make_policy(config)
        self._files = SlowFileSystem()
        self.store = PrefixStore(config, IDENTITY, shape, engine.model.device, self._files)
        self._engine = engine
        self._wish = Wish(config.usual_retention, config.usual_bits)
        self._shape = shape
        rule = self.policy.identification
        self._evidence = rule.evidence
        self._loader = PrefixLoader(shape, rule)
        self._precise = PreciseLoader(shape, ALLOCATIONS[config.allocate])
        self._estimator = Estimator(engine.model.shape.hidden, overlapped=config.readahead > 0)
        for own in engine.passes:
            self._estimator.note_forward(*own)

    def serve(self, request: Request) -> Served:
        """Serve a request whose prefix is stored.

        Raises:
            EngineFailed: it is not.
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        engine, new = self._engine, request.new_tokens
        asked = engine.prepare(request)
        clock = stage_clock(str(request.question), engine.model.device)
        with self._open(request, asked, clock) as stored:

            def place(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> int:
                stored.load(layer)
                with clock.span(COPY, layer):
                    queries[:] = asked.question.queries[layer]
                    count = engine.add_new(layer, stored.k, asked.question, values)
                stored.finish_layer()
                return count

            logits = engine.forward(asked.tokens[-new:], clock, place)
        clock.finish()
        totals = clock.totals()
        loading = sum(totals.get(stage, 0.0) for stage in STAGES if stage != ATTENTION)
        self._learn(stored, loading, clock.duration_ms)
        estimated = stored.estimate.load
        return Served(
            clock.duration_ms,
            totals,
            logits,
            stored.source.stats,
            stored.stats,
            None if estimated is None else estimated * 1e3,
        )

    def warm(self, request: Request) -> None:
        """Load what a request needs, without running the model.

        Raises:
            EngineFailed: its prefix is not stored.
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        with self._open(request, self._engine.prepare(request), NO_TIMELINE) as stored:
            for layer in range(self._shape.num_layers):
                stored.load(layer)
                stored.finish_layer()
        self._learn(stored, stored.stats.probe_ms + stored.stats.load_ms, None)

    def emulate_ssd(self, mbps: float) -> None:
        """Read no faster than so many MB/s from now on; 0 for as fast as it goes."""
        self._files.set_rate(mbps)

    def reorder(self) -> None:
        """Rewrite all segments that were selected from, and wait for it.

        Nothing else runs, so the rewriting thread need not rest between layers.
        """
        with mock.patch.object(rewriting, "REST_RATIO", 0.0):
            self.store.reorders.enqueue(force=True)
            self.store.poll()
            while self.store.reorders.summary()["pending"]:
                time.sleep(POLL_SECONDS)
                self.store.poll()

    @contextmanager
    def _open(self, request: Request, asked: _Asked, timeline: Timeline) -> Iterator[_Stored]:
        """Match, estimate and open; the source is given back at the end if it is not before."""
        bits = self.policy.bits(self._wish)
        match = self.store.match(NAMESPACE, asked.prompt[:-1])
        length = self._engine.workload.lengths[request.prefix]
        if match.num_tokens != length:
            raise EngineFailed(f"{match.num_tokens} of {length} tokens of a prefix are stored")
        estimate = self._estimate(match, Work(0, length, request.new_tokens))
        k = self.policy.tokens_to_load(length, estimate.retention)
        source: AnySource
        if bits < EXACT_BITS:
            spans = match.slice(0, length)
            source = self.store.open_coded(spans, [False] * len(spans), timeline)
            self.store.touch(match)
            load = self._load_coded(source)
        else:
            source = self.store.open_source(match, 0, length, self._demand(k, length), timeline)
            load = self._load_exact(source)
        stored = _Stored(self._engine, self.store, load, source, asked.question, k, estimate)
        try:
            self.store.ahead.join(source)
            yield stored
        finally:
            stored.close()

    def _load_exact(self, source: SegmentSource) -> _LoadLayer:
        def load(layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
            self._loader.load(layer, source, inputs, slots, stats)

        return load

    def _load_coded(self, source: CodedSource) -> _LoadLayer:
        """All tokens, each into the row of its number; `impress` with retention 1."""
        bits, device = self._wish.bits, self._engine.model.device
        units = parts_alone(source, torch.arange(source.num_tokens, device=device))

        def load(layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
            self._precise.load(layer, units, inputs, slots, bits, stats, source.timeline)

        return load

    def _demand(self, k: int, num_tokens: int) -> Demand:
        """See `ServingRuntime.demand_of`."""
        return Demand(
            whole=k == num_tokens,
            probe=bool(self._shape.probe_kv_heads),
            all_keys=self._evidence == "keys",
        )

    def _estimate(self, match: StoredMatch, work: Work) -> Estimate:
        """See `ServingRuntime.decide`; here the answer is always to load."""
        bits, exact = self.policy.bits(self._wish), self.policy.exact(self._wish)
        retention = 1.0 if exact else self._wish.retention
        if bits < EXACT_BITS:
            num_bytes = self.store.forecast.coded_bytes(match.slice(0, work.stored)).expected(bits)
        else:
            stored = self.store.forecast.stored_bytes(match.slice(0, work.stored))
            all_keys = self._evidence == "keys" and not exact
            num_bytes = stored.expected(retention, all_keys=all_keys)
        seconds = self.store.forecast.seconds_to_read(num_bytes)
        return self._estimator.estimate(work, retention, seconds, bits)

    def _learn(self, stored: _Stored, loading_ms: float, ttft_ms: float | None) -> None:
        """What the server does after a request; `ttft_ms` None if the model did not run."""
        work = stored.work
        copying = max(loading_ms - stored.source.stats.wait_ms, 0.0)
        whole = stored.k == work.stored and stored.estimate.bits == EXACT_BITS
        self._estimator.note_load(work, copying / 1e3, whole=whole)
        if ttft_ms is not None:
            seconds = max(ttft_ms - loading_ms, 0.0) / 1e3
            self._estimator.note_forward(work.new, pairs_of(stored.k, work.new), seconds)
        self.store.poll()
        self.store.ahead.top_up()


class _Stored:
    """A request with a stored prefix of which each layer uses `k` tokens."""

    def __init__(
        self,
        engine: Engine,
        store: PrefixStore,
        load: _LoadLayer,
        source: AnySource,
        question: Question,
        k: int,
        estimate: Estimate,
    ) -> None:
        self.source = source
        self.k = k
        self.estimate = estimate
        self.stats = LoadStats()
        self.work = Work(0, source.num_tokens, len(question.queries[0]))
        self._keys, self._values = engine.keys, engine.values
        self._store = store
        self._load = load
        self._question = question
        self._layers = 0
        self._open = True

    def load(self, layer: int) -> None:
        """Put what attention of a layer uses into the first rows of the pool."""
        queries, keys = self._question.queries[layer], self._question.new_keys[layer]
        inputs = LayerInputs(queries, keys, keys[:0], queries.shape[2] ** -0.5)
        slots = LayerSlots.of(self._keys[layer][: self.k], self._values[layer][: self.k])
        self._load(layer, inputs, slots, self.stats)
        self._store.ahead.top_up()

    def finish_layer(self) -> None:
        """A layer is in the pool; after the last one the source is given back."""
        self._layers += 1
        if self._layers == self.source.num_layers:
            self.close()

    def close(self) -> None:
        """Give the source back, once."""
        if self._open:
            self._open = False
            self._store.close_source(self.source)
