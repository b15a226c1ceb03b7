"""The engine in front of a store: the product's own runtime serves prefixes, without SGLang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.core.emulation import SlowFileSystem
from bench.core.session import BenchFailed
from bench.engine.clock import LOAD, Served, stage_clock
from bench.engine.model import Asked, Engine
from bench.engine.workload import Request
from impress_sglang.config import ImpressConfig
from impress_sglang.cost import pairs_of
from impress_sglang.management.policies import LoadOptions
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.writing import Offer, StoreOutcome
from impress_sglang.options import EXACT_BITS
from impress_sglang.precision.codec import planes_of
from impress_sglang.serving.clocks import clock_for
from impress_sglang.serving.paper.admission import AdmissionPlan
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.serving.paper.runtime import ServingRuntime
from impress_sglang.serving.report import new_report
from impress_sglang.storage.files import install
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import Tokens
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.filling import FillStats, SlotFiller
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.slots import LayerSlots

NAMESPACE = "bench"
# Names the model of the stores.
IDENTITY = "0" * 32
POLL_SECONDS = 0.01


def store_planted(engine: Engine, store: PrefixStore, prefix: int) -> None:
    """Save the planted KVs of a prefix without computing it; see `save`."""
    tokens = engine.workload.tokens(prefix)
    layers = engine.planter.prefix(prefix, len(tokens))

    def read(layer: int) -> tuple[Tensor, Tensor]:
        keys, values = next(layers)
        return keys.cpu(), values.cpu()

    save(store, tokens, read)


def save(store: PrefixStore, tokens: Tokens, read: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    """Write the KVs that `read` gives layer after layer.

    Raises:
        BenchFailed: the store did not take them.
    """
    # Nobody waits for the write, and nobody wants its memory back.
    offer = Offer(tokens, lambda start: read, lambda: None, lambda: None, min_tokens=1)
    outcome = store.writes.offer(NAMESPACE, offer)
    store.writes.drain()
    if outcome is not StoreOutcome.ACCEPTED or store.stats.segments_failed:
        raise BenchFailed(f"{len(tokens)} tokens were not stored: {outcome.value}")


class CodedLoading:
    """Loads all tokens of a prefix from codes, as load jobs do; see `serving.paper.loading`."""

    def __init__(self, filler: SlotFiller, store: PrefixStore, source: CodedSource) -> None:
        self._filler = filler
        self._store = store
        self._source = source

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        stats.layers_whole += 1
        keys, values, rows = slots.keys.pool, slots.values.pool, slots.keys.rows
        assert rows is not None
        fills, nothing = FillStats(), contextlib.nullcontext
        with stats.timed("load_ms"):
            self._filler.fill(layer, self._source, keys, values, rows, fills, nothing)

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""
        self._source.end_layer(layer)

    def close(self) -> ReadStats:
        """See `Loading.close`."""
        self._store.close_source(self._source)
        return self._source.stats


class StoredEngine:
    """An engine whose prefixes are loaded by a policy; each request reads its own."""

    def __init__(self, engine: Engine, config: ImpressConfig, shape: KVShape) -> None:
        """Open the store, which has the prefixes already.

        Raises:
            ImpressError: it cannot be opened, or its caches do not fit in memory.
        """
        self._engine = engine
        self._files = SlowFileSystem()
        install(self._files)
        device = engine.model.device
        hidden = engine.model.shape.hidden
        self._runtime = ServingRuntime(config, shape, IDENTITY, device, hidden)
        self._load_options = LoadOptions(config.usual_retention, config.usual_bits)
        coded = self._runtime.policy.bits(self._load_options) < EXACT_BITS
        self._planes = planes_of(config.usual_bits) if coded else None
        self._filler = SlotFiller(shape, device)
        self._clock = clock_for(device)
        for seen in engine.passes:
            self._runtime.estimator.note_forward(*seen)

    @property
    def reorders(self) -> bool:
        """Whether its policy does."""
        return self._runtime.policy.reorders

    def serve(self, request: Request) -> Served:
        """Serve a request whose prefix is stored.

        Raises:
            BenchFailed: it is not.
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """
        engine, asked = self._engine, self._engine.prepare(request)
        clock = stage_clock(engine.model.device)
        with clock.span(LOAD):
            stored, estimated = self._open(request, asked)

        def place(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> int:
            with clock.span(LOAD):
                self._load(stored, asked, layer)
                queries[:] = asked.question.queries[layer]
                return engine.add_new(layer, stored.k, asked.question, values)

        logits = engine.forward(asked.tokens[-request.new_tokens :], clock, place)
        stages = clock.finish()
        seconds = max(clock.duration_ms - stages[LOAD], 0.0) / 1e3
        pairs = pairs_of(stored.k, request.new_tokens)
        self._runtime.estimator.note_forward(request.new_tokens, pairs, seconds)
        self._close(stored)
        estimated_ms = None if estimated is None else estimated * 1e3
        return Served(clock.duration_ms, stages, logits, stored.reads, stored.stats, estimated_ms)

    def warm(self, request: Request) -> None:
        """Load what a request needs, without running the model; see `serve`."""
        asked = self._engine.prepare(request)
        stored, _ = self._open(request, asked)
        for layer in range(self._engine.model.shape.layers):
            self._load(stored, asked, layer)
        self._close(stored)

    def emulate_ssd(self, mbps: float) -> None:
        """Read no faster than so many MB/s from now on; 0 for as fast as it goes."""
        self._files.set_rate(mbps)

    def reorder(self) -> None:
        """Rewrite all segments that were selected from, and wait for it."""
        store = self._runtime.store
        store.reorders.enqueue(force=True)
        store.poll()
        while store.reorders.summary()["pending"]:
            time.sleep(POLL_SECONDS)
            store.poll()

    def close(self) -> None:
        """Close the store."""
        self._runtime.close()

    def _open(self, request: Request, asked: Asked) -> tuple[StoredRequest, float | None]:
        """Match, plan and open; the request, and the seconds that loading is estimated to take."""
        runtime, length = self._runtime, self._engine.workload.lengths[request.prefix]
        device = self._engine.model.device
        tokens = asked.prompt[:-1]
        match = runtime.admission.find(NAMESPACE, tokens, self._load_options)
        plan = runtime.admission.plan(match, tokens, 0, self._load_options)
        if plan is None or plan.work.stored != length:
            raise BenchFailed(f"{match.num_tokens} of {length} tokens of a prefix are stored")
        if self._planes is not None:
            return self._open_coded(request, plan, self._planes), None
        stored = runtime.open(
            str(request.question),
            plan,
            torch.empty(0, dtype=torch.int64, device=device),
            new_report(runtime.config.policy, 0, len(asked.prompt)),
            lambda count: torch.arange(count, device=device),
        )
        assert stored is not None
        stored.time_loading(self._clock.stopwatch())
        return stored, plan.estimate.load

    def _open_coded(self, request: Request, plan: AdmissionPlan, planes: int) -> StoredRequest:
        """A request whose prefix comes from codes: servers load these before a pass."""
        store, device = self._runtime.store, self._engine.model.device
        source = store.open_whole(plan.spans, planes)
        assert isinstance(source, CodedSource)
        store.ahead.join(source)
        stored = self._runtime.live[str(request.question)] = StoredRequest(
            rid=str(request.question),
            token_ids=plan.token_tensor(),
            resident_slots=torch.empty(0, dtype=torch.int64, device=device),
            slots=torch.arange(plan.k, device=device),
            num_tokens=plan.work.stored,
            quality=plan.quality,
            loading=CodedLoading(self._filler, store, source),
            report=new_report("impress", 0, plan.stop),
            new_tokens=plan.work.new,
        )
        stored.time_loading(self._clock.stopwatch())
        return stored

    def _load(self, stored: StoredRequest, asked: Asked, layer: int) -> None:
        """Put what attention of a layer uses into the first rows of the pool."""
        engine = self._engine
        queries, keys = asked.question.queries[layer], asked.question.new_keys[layer]
        inputs = LayerInputs(queries, keys, keys[:0], queries.shape[2] ** -0.5)
        slots = LayerSlots.of(engine.keys[layer], engine.values[layer], stored.slots)
        assert stored.stopwatch is not None
        with stored.stopwatch:
            self._runtime.load_layer(layer, stored, inputs, slots)
        self._runtime.finish_layer(stored)

    def _close(self, stored: StoredRequest) -> None:
        runtime = self._runtime
        runtime.release(stored.rid)
        runtime.served.poll()
        runtime.store.ahead.top_up()
