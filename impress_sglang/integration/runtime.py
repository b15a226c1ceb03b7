"""What the tree cache and the attention backend share in a scheduler process.

It owns the store and the requests that have a stored prefix, and holds no algorithm: matching is
the store's, selection the rule's, reading the loader's. The tree cache adds and removes requests;
the backend loads their layers.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from impress_sglang.config import EXACT_BITS, ImpressConfig
from impress_sglang.errors import ChunkUnreadable, ImpressError, PrefixUnreadable
from impress_sglang.integration.clocks import clock_for
from impress_sglang.integration.request import PrefixRequest
from impress_sglang.integration.saving import Save
from impress_sglang.management.disk import StoreDisk
from impress_sglang.management.estimate import (
    BITS,
    RETENTIONS,
    CodedBytes,
    Estimate,
    Estimator,
    StoredBytes,
    Work,
)
from impress_sglang.management.memory import StoreMemory
from impress_sglang.management.policies import Wish, make_policy
from impress_sglang.management.residents import ResidentParts
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.tree import StoredMatch, StoredSpan
from impress_sglang.storage.layout import KVShape
from impress_sglang.threads import BackgroundThread
from impress_sglang.timeline import NO_TIMELINE, RequestTimeline, Timeline, TimelineWriter
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.loader import LayerInputs, PrefixLoader
from impress_sglang.transfer.precise import ALLOCATIONS, PreciseLoader
from impress_sglang.transfer.resident import PartLoad, PartUse, ResidentPart
from impress_sglang.transfer.selective import SelectiveLoader
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import Demand, SegmentSource

logger = logging.getLogger(__name__)

# Why the store is not used while one is opened, and where that failed.
OPENING = "opening"
NOT_OPENED = "not opened"


@dataclasses.dataclass(slots=True)
class RequestTotals:
    """Counters over all requests since start; lengths in tokens, times in milliseconds."""

    requests: int = 0
    requests_ssd: int = 0
    requests_device: int = 0
    requests_computed: int = 0
    requests_recomputed: int = 0
    requests_failed: int = 0
    requests_declined: int = 0
    requests_prefetched: int = 0
    requests_not_served: dict[str, int] = dataclasses.field(default_factory=dict)
    requests_not_stored: dict[str, int] = dataclasses.field(default_factory=dict)
    prefix_tokens: int = 0
    used_tokens: int = 0
    ssd_bytes: int = 0
    ssd_needed_bytes: int = 0
    ahead_bytes: int = 0
    ahead_used_bytes: int = 0
    h2d_bytes: int = 0
    chunks_accessed: int = 0
    chunks_loaded: int = 0
    device_chunks: int = 0
    host_chunks: int = 0
    ssd_chunks: int = 0
    selected_chunks: int = 0
    important_bytes: int = 0
    important_device_bytes: int = 0
    layers_by_probe: int = 0
    layers_by_fallback: int = 0
    layers_whole: int = 0
    probe_ms: float = 0.0
    load_ms: float = 0.0
    wait_ms: float = 0.0
    attention_ms: float = 0.0

    def add(self, report: dict[str, Any]) -> None:
        """Count a finished request by its report."""
        self.requests += 1
        path = f"requests_{report['path']}"
        setattr(self, path, getattr(self, path) + 1)
        self.requests_recomputed += bool(report["recomputed"])
        self.requests_prefetched += bool(report["prefetched"])
        self.requests_declined += report["decision"] == "recompute"
        for use in ("not_served", "not_stored"):
            _count(getattr(self, f"requests_{use}"), report[use])
        for field in dataclasses.fields(self):
            if not field.name.startswith("requests"):
                setattr(self, field.name, getattr(self, field.name) + report[field.name])


class SelectionObserver(Protocol):
    """Sees what requests select; for benchmarks. It runs where requests are served."""

    def selected(self, shape: KVShape, layer: int, request: PrefixRequest, tokens: Tensor) -> None:
        """A layer of a request is loaded: int64 `tokens` [lanes, u] of its prefix, on the CPU."""
        ...


def _count(reasons: dict[str, int], reason: str | None) -> None:
    if reason is not None:
        reasons[reason] = reasons.get(reason, 0) + 1


class ServingRuntime:
    """Store, policy, loader and live requests of one scheduler."""

    observer: SelectionObserver | None = None
    """Of all that a process makes; a benchmark sets it before its server starts."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        identity: str,
        device: torch.device,
        hidden_size: int,
    ) -> None:
        """Open the store; `device` is where attention runs, `hidden_size` that of the model.

        Raises:
            ConfigError: a directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another server uses it for the same model.
        """
        self.config = config
        self.shape = shape
        self.identity = identity
        """Of the store that is open or being opened; empty if there is none."""
        self.aside: str | None = None
        """Why the store may not be used (see `weights.py`), also where one is open."""
        self.policy = make_policy(config)
        self.totals = RequestTotals()
        self.live: dict[str, PrefixRequest] = {}
        self.residents: ResidentParts
        """Of the tree cache: what is in slots in codes."""
        self.begin_saves: Callable[[Sequence[str], Sequence[int]], dict[int, Save]] | None = None
        """Of the tree cache: from a pass's requests and lengths to the writes that go with it."""
        self.abort: Callable[[str, str], None] | None = None
        """Of the tree cache: ends a request of the pass under way, with what the user is told."""
        self._memory = StoreMemory.allocate(config, shape, device)
        """Of the store; where none is open, for the next one."""
        self._store: PrefixStore | None = PrefixStore(config, identity, shape, memory=self._memory)
        self._opening: Future[StoreDisk] | None = None
        self._opener = BackgroundThread("impress-store")
        self._clock = clock_for(device)
        rule = self.policy.identification_rule()
        self._evidence = rule.evidence
        self._loader = PrefixLoader(shape, rule)
        allocation = ALLOCATIONS[config.allocate]
        self._precise = PreciseLoader(shape, allocation)
        self._selective = SelectiveLoader(shape, allocation)
        self.estimator = Estimator(hidden_size, overlapped=config.readahead > 0)
        self._timelines = TimelineWriter(config.trace_path) if config.trace_path else None

    @property
    def opened(self) -> PrefixStore | None:
        """The store, None while another one is being opened."""
        return self._store

    @property
    def store(self) -> PrefixStore:
        """The store, for who knows that one is open: it is used, or a request reads from it."""
        assert self._store is not None
        return self._store

    @property
    def suspended(self) -> str | None:
        """Why the store is not used, None while it is."""
        if self.aside is None and self._store is None:
            return OPENING
        return self.aside

    @property
    def uses_store(self) -> bool:
        """Whether prefixes are looked for in the store, and offered to it."""
        return self.policy.stores and self.suspended is None

    def use_again(self) -> None:
        """All KVs in the pool are of `identity`: use its store, once it is open."""
        if self.aside is not None:
            self.aside = None
            self._say_used()

    def reopen(self, identity: str) -> None:
        """Serve another identity: the model's weights were replaced. No request reads a prefix.

        What may wait for the disk is done in the background, one thing after another: the old store
        is closed, the other one opened. `take_over` makes it ours.
        """
        logger.info("prefixes of other weights are set aside; opening the store of %s", identity)
        assert not self.live
        self._discard_opening()
        self._discard_store()
        self.identity = identity
        self._opening = self._opener.submit(StoreDisk, self.config, identity)

    def poll(self) -> None:
        """Take in what other threads have done; never waits."""
        self.take_over()
        if self._store is not None:
            self._store.poll()

    def take_over(self) -> None:
        """Take a store that was opened in the background, if it is there; never waits for it."""
        opening = self._opening
        if opening is None or not opening.done():
            return
        self._opening = None
        try:
            disk = opening.result()
            try:
                self._store = PrefixStore(
                    self.config, self.identity, self.shape, disk=disk, memory=self._memory
                )
            except BaseException:
                self._opener.submit(_close_logged, disk.close)
                raise
        except Exception as error:
            # Whatever it is, answers are right without the store.
            logger.error(
                "the store of these weights cannot be opened; the next flush tries again: %s",
                error,
                exc_info=not isinstance(error, ImpressError),
            )
            self.identity = ""
            self.aside = self.aside or NOT_OPENED
            return
        self._say_used()

    def close(self) -> None:
        """Finish writes and close the store; nothing is served after that.

        Another one that is being opened is waited for no longer than `--impress-io-timeout`.
        """
        if self._store is None:
            self._memory.close()
        else:
            self._store.close()
        self._discard_opening()
        self._opener.close(self.config.io_timeout)

    def _discard_store(self) -> None:
        """Close what is open, in the background where that waits for the disk."""
        store, self._store = self._store, None
        if store is not None:
            # So that none of them tells the tree cache of its end from the other thread.
            store.abandon_writes()
            # Memory is not allocated again: that would take long, or what is left would not do.
            self._memory = store.retire().emptied(self.config)
            self._opener.submit(_close_logged, store.leave_disk)

    def _discard_opening(self) -> None:
        """Close what is being opened when it is there, in the background."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.cancel():
            self._opener.submit(_close_late, opening)

    def _say_used(self) -> None:
        if self.suspended is None:
            logger.info("the store is used again, for weights %s", self.identity)

    def demand_of(self, k: int, num_tokens: int) -> Demand:
        """What a request that uses k of a prefix's tokens will ask of each layer."""
        return Demand(
            whole=k == num_tokens,
            probe=bool(self.shape.probe_kv_heads),
            all_keys=self._evidence == "keys",
        )

    def decide(self, match: StoredMatch, work: Work, wish: Wish) -> Estimate:
        """How much of a stored prefix to load, and what that and computing it would take.

        Args:
            match: what is stored.
            work: of the request; its stored tokens are the last ones of the match.
            wish: of the request.
        """
        # What the device has passed by now counts.
        self._clock.poll()
        config, policy = self.config, self.policy
        start = match.num_tokens - work.stored
        exact, bits = policy.exact(wish), policy.bits(wish)
        spans = match.slice(start, match.num_tokens)

        @functools.cache
        def stored() -> StoredBytes:
            return self.store.stored_bytes(match, start, match.num_tokens)

        @functools.cache
        def coded(whole: bool) -> CodedBytes:
            missing: Sequence[StoredSpan] = spans
            if whole:
                # Of a part of a prefix nothing is shared.
                covers = self.residents.cover(spans, start)
                missing = [cover.span for cover in covers if cover.part is None]
            return self.store.coded_bytes(missing)

        def estimate(retention: float, bits: float) -> Estimate:
            if bits < EXACT_BITS:
                whole = policy.tokens_to_load(work.stored, retention) == work.stored
                num_bytes = coded(whole).expected(bits)
            else:
                all_keys = self._evidence == "keys" and retention < 1.0
                num_bytes = stored().expected(retention, all_keys=all_keys)
            seconds = self.store.seconds_to_read(num_bytes)
            return self.estimator.estimate(work, retention, seconds, bits)

        if exact:
            return estimate(1.0, bits)
        retentions, most = [wish.retention], [bits]
        if config.auto_retention and not wish.chosen:
            retentions = [*(own for own in RETENTIONS if own > wish.retention), wish.retention]
        if config.auto_bits and not wish.bits_chosen and bits < EXACT_BITS:
            most = [*BITS, bits]
        # Bits go first, then tokens.
        choices = [(retentions[0], own) for own in most]
        choices += [(own, bits) for own in retentions[1:]]
        return self.estimator.largest_hidden([estimate(*own) for own in choices])

    def join_loads(
        self,
        uses: Sequence[PartUse],
        source: CodedSource | None = None,
        timeline: Timeline = NO_TIMELINE,
    ) -> list[PartLoad]:
        """Join what the parts of a request are read from now, and begin to read the others.

        Args:
            uses: of the request.
            source: of those parts that nobody reads, if it is there already.
            timeline: of the request.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        parts = list(dict.fromkeys(use.part for use in uses))
        fresh = [part for part in parts if part.load is None]
        if fresh:
            if source is None:
                source = self._open_parts(fresh)
            source.timeline = timeline
            PartLoad(source, fresh)
            self.store.ahead.join(source)
        loads = list(dict.fromkeys(part.load[0] for part in parts if part.load is not None))
        for load in loads:
            load.pending += 1
        return loads

    def _open_parts(self, parts: Sequence[ResidentPart]) -> CodedSource:
        spans = []
        for part in parts:
            segment = self.store.tree.get(part.segment_id)
            if segment is None:
                raise ChunkUnreadable(part.segment_id, "was removed after it was matched")
            spans.append(StoredSpan(segment, part.start, part.stop))
        return self.store.open_coded(spans, [bool(part.layers_loaded) for part in parts])

    def _renew_loads(self, request: PrefixRequest) -> None:
        """See that no load of a request that begins its pass was read by another pass.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        stale = [load for load in request.loads if load.source.layer > 0]
        for load in stale:
            request.loads.remove(load)
            if load.leave():
                self.store.close_source(load.source)
                request.reads.add(load.source.stats)
            else:
                # Others go on with it.
                for part in load.parts:
                    if part.load is not None and part.load[0] is load:
                        part.load = None
        if stale:
            own = {id(load) for load in request.loads}
            joined = self.join_loads(request.uses, timeline=request.timeline)
            for load in joined:
                load.pending -= id(load) in own
            request.loads = joined

    def timeline_for(self, rid: str) -> Timeline:
        """Where a request's time goes, if that is wanted."""
        return NO_TIMELINE if self._timelines is None else RequestTimeline(rid)

    def keep_timeline(self, request: PrefixRequest) -> None:
        """Write a request's timeline, if there is one."""
        if self._timelines is not None and isinstance(request.timeline, RequestTimeline):
            self._timelines.write(request.timeline)

    def load_layer(
        self, layer: int, request: PrefixRequest, inputs: LayerInputs, slots: LayerSlots
    ) -> None:
        """Fill slots with what a layer uses of a request's stored prefix.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """
        if request.source is None:
            assert request.units is not None
            if not layer:
                self._renew_loads(request)
            self._precise.load(
                layer,
                request.units,
                inputs,
                slots,
                request.bits,
                request.stats,
                request.timeline,
            )
            self.store.ahead.top_up()
            return
        if isinstance(request.source, CodedSource):
            if request.restored is None:
                request.restored = self._selective.begin(request.source, slots.keys.pool.device)
            selected = self._selective.load(
                layer,
                request.source,
                request.restored,
                inputs,
                slots,
                request.bits,
                request.stats,
            )
        else:
            selected = self._loader.load(layer, request.source, inputs, slots, request.stats)
        self.store.ahead.top_up()
        if self.observer is not None:
            self.observer.selected(self.shape, layer, request, selected)

    def finish_layer(self, request: PrefixRequest) -> None:
        """Count a layer that is in its slots; after the last one the source is given back."""
        if isinstance(request.source, SegmentSource | CodedSource):
            request.source.end_layer(request.layers_loaded)
        for load in request.loads:
            load.end_layer(request.layers_loaded)
        request.layers_loaded += 1
        if request.layers_loaded == self.shape.num_layers:
            self.release_source(request)
            self._note_load(request)
            request.publish()

    def release_source(self, request: PrefixRequest) -> None:
        """Give a request's source back to the store."""
        if isinstance(request.source, SegmentSource | CodedSource):
            # What was read ahead is counted when the source is closed.
            self.store.close_source(request.source)
            request.reads.add(request.source.stats)
        request.source = request.restored = None
        loads, request.loads = request.loads, []
        for load in loads:
            # Of what several requests read together the last one tells.
            if load.leave():
                self.store.close_source(load.source)
                request.reads.add(load.source.stats)

    def _note_load(self, request: PrefixRequest) -> None:
        """Tell the estimator what loading took besides waiting for the drive."""
        stopwatch, request.loading = request.loading, None
        if stopwatch is None or not request.undisturbed:
            return
        waited = request.reads.wait_ms / 1e3
        work = Work(request.resident_len, request.num_tokens, request.new_tokens)
        whole = request.k == request.num_tokens and request.bits == EXACT_BITS

        def note(seconds: list[float]) -> None:
            self.estimator.note_load(work, max(seconds[0] - waited, 0.0), whole=whole)

        self._clock.when_known([stopwatch], note)

    def discard_source(self, request: PrefixRequest, error: PrefixUnreadable) -> None:
        """A chunk was unreadable: forget the segment, and note that the prefix is computed."""
        logger.warning("stored prefix of request %s is computed again: %s", request.rid, error)
        self.release_source(request)
        for use in request.uses:
            # Its slots will hold something else than its levels say.
            self.residents.hide(use.part)
        self.store.report(error)
        request.recomputed = True

    def fail(self, request: PrefixRequest, reason: str) -> None:
        """End a request whose prefix can neither be read nor computed now; others go on."""
        request.failed = True
        self.release_source(request)
        for use in request.uses:
            # A layer may be half in its slots, and nobody may go on with what it did not load.
            self.residents.hide(use.part)
        assert self.abort is not None
        self.abort(
            request.rid,
            f"the stored prefix of this request cannot be used now: {reason}; send it again",
        )

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        totals, store = dataclasses.asdict(self.totals), self._store
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in totals.items()}
        return {
            "config": dataclasses.asdict(self.config),
            "identity": self.identity,
            "suspended": self.suspended,
            "probe_kv_heads": list(self.shape.probe_kv_heads),
            "kv_heads": self.shape.num_kv_heads,
            "requests_live": len(self.live),
            "totals": rounded,
            "store": None if store is None else store.summary(),
            "cache": None if store is None else store.cache_summary(),
            "reorder": None if store is None else store.reorder_summary(),
        }


def _close_logged(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:
        logger.exception("a store that is not used any more could not be closed")


def _close_late(opening: Future[StoreDisk]) -> None:
    """Of an opening that has ended, and whose store nobody wants any more."""
    if opening.exception() is None:
        _close_logged(opening.result().close)
