"""The tree cache: SGLang's radix cache for what is resident, our store for what has left it.

Stages: match, admit, write back. A request whose stored prefix is longer than its resident one is
admitted as a sink row (docs/design.md). Only the scheduler's thread calls this class.

Slots that SGLang's tree does not know are counted, so that SGLang's own accounting
(available + evictable + protected + uncached == total) holds at every step:
  * private: the k slots of a live sink row, as protected;
  * shared: slots of prefixes in codes, as protected while a request uses them, and else as
    evictable;
  * held: slots of approximate KVs that a write still reads, as evictable.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from torch import Tensor

from impress_sglang.config import EXACT_BITS
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.integration.eligibility import serve_refusal, store_refusal
from impress_sglang.integration.eviction import Awaited, ScoreEviction
from impress_sglang.integration.pool import PoolAccess, PoolLayerReader
from impress_sglang.integration.request import (
    PrefixRequest,
    estimate_fields,
    new_report,
    wish_of,
)
from impress_sglang.integration.runtime import ServingRuntime
from impress_sglang.integration.saving import GatedLayerReader, Save
from impress_sglang.integration.weights import WeightWatch
from impress_sglang.management.estimate import Estimate, Work, buffer_bytes
from impress_sglang.management.readers import AnySource
from impress_sglang.management.residents import Cover, ResidentParts
from impress_sglang.management.tree import StoredMatch, StoredSpan
from impress_sglang.management.writing import Offer, StoreOutcome
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.storage.writer import LayerReader
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.resident import PartUse, ResidentPart, UsedUnits

logger = logging.getLogger(__name__)

REPORT_KEY = "impress"


@dataclasses.dataclass(frozen=True, slots=True)
class _Offer:
    """What `match_prefix` promised: k of the tokens [resident_len, stop) of a stored prefix.

    `covers`: where the tokens are of a prefix in codes, if all of it is used; `missing` slots must
    be allocated, and `idle` ones, which counted as room, will not be room any more. All lengths
    are whole pages.
    """

    match: StoredMatch
    work: Work
    k: int
    token_ids: Tokens
    estimate: Estimate
    page_size: int
    covers: tuple[Cover, ...] = ()
    idle: int = 0

    @property
    def missing(self) -> int:
        if not self.covers:
            return self.k
        return sum(len(cover.span) for cover in self.covers if cover.part is None)

    @property
    def promised(self) -> int:
        """What SGLang is told to load; if that were nothing, it would not ask for it.

        It takes this much from the room by which it admits requests.
        """
        return max(self.missing + self.idle, self.page_size)

    @property
    def resident_len(self) -> int:
        return self.work.resident

    @property
    def stop(self) -> int:
        return self.work.resident + self.work.stored

    def same_parts(self, other: _Offer) -> bool:
        """Whether another offer reads the same of a prefix in codes."""
        return bool(self.covers) and self.covers == other.covers

    def same_reads(self, other: _Offer) -> bool:
        """Whether another offer reads the same of the same segments."""
        return (
            self.work == other.work
            and self.k == other.k
            and self.estimate.bits == other.estimate.bits
            and not self.covers
            and not other.covers
            and [span.segment.segment_id for span in self.match.spans]
            == [span.segment.segment_id for span in other.match.spans]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Prefetch:
    """What is read for a request that waits."""

    offer: _Offer
    source: AnySource
    timeline: Timeline


class ImpressRadixCache(RadixCache):
    """SGLang's `RadixCache` that finds evicted prefixes again on SSD."""

    def __init__(
        self,
        params: CacheInitParams,
        runtime: ServingRuntime,
        identify: Callable[[], str],
        forward_stream: Any,
    ) -> None:
        """`identify` names the model's weights; it is asked again after each flush."""
        self._runtime = runtime
        self._watch = WeightWatch(runtime, identify)
        self._pool_access = PoolAccess()
        self._forward_stream = forward_stream
        self._offers: dict[str, _Offer] = {}
        self._prefetches: dict[str, _Prefetch] = {}
        self._declined: set[str] = set()
        self._refused: set[str] = set()
        self._counted: set[str] = set()
        self._private_tokens = 0
        self._held_tokens = 0
        self._writing_tokens = 0
        self._locking: set[Save] = set()
        self._started = False
        self._residents = ResidentParts(
            lambda slots: self.token_to_kv_pool_allocator.free(slots), params.page_size
        )
        runtime.residents = self._residents
        self.awaited = Awaited(self._residents)
        super().__init__(params)
        config = runtime.config
        self._score_eviction: ScoreEviction | None = None
        if runtime.policy.scores and params.eviction_policy == "lru":
            self._score_eviction = ScoreEviction(
                config.half_life, config.part_retention, self.awaited
            )
            self.eviction_strategy = self._score_eviction
        self._started = True
        # Requests that are not finished, for what begins in the middle of a pass.
        self._requests: dict[str, Any] = {}
        self._saves: dict[str, Save] = {}
        runtime.begin_saves = self.begin_saves
        runtime.abort = self.abort

    def reset(self) -> None:
        """SGLang's flush, when it is idle: what is resident goes, what is stored stays."""
        if self._started and self._runtime.opened is not None:
            # Accepted writes read slots that are about to be given away.
            self._runtime.store.drain()
        assert not self._runtime.live and not self._private_tokens and not self._held_tokens
        self._residents.forget_all()
        self.awaited.clear()
        self._drop_matches()
        self._declined.clear()
        self._refused.clear()
        self._counted.clear()
        super().reset()
        if self._started:
            self._watch.flushed()

    def suspend(self, cause: str) -> None:
        """Set the store aside: weights or the pool may change, until `resume`.

        Passes under way end first, so that each is of one kind of weights. Writes are given up, and
        the pool is not read any more.
        """
        torch.get_device_module(self.device).synchronize()
        for save in self._saves.values():
            save.abandon()
        self._pool_access.revoke()
        if self._runtime.opened is not None:
            self._runtime.store.abandon_writes()
        self._drop_matches()
        self._residents.hide_all()
        self._watch.begin(cause)

    def resume(self, *, settled: bool) -> None:
        """What `suspend` was called for is over; `settled` if nothing else goes on.

        The store is used again now if no KV is left in the pool, and else after the next flush.
        """
        allocator = self.token_to_kv_pool_allocator
        self._watch.end(settled=settled, empty=allocator.available_size() == allocator.size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The resident prefix, extended by a stored one where that is longer."""
        resident = super().match_prefix(params)
        req = params.req
        if req is None or self.disable:
            return resident
        self._requests[req.rid] = req
        report = new_report(self._runtime.policy.name, resident.device_prefix_len)
        refusal = serve_refusal(req)
        report.update(not_served=refusal, not_stored=store_refusal(req))
        req.customized_info = {REPORT_KEY: [report]}
        match = StoredMatch() if refusal is not None else self._find_stored(params.key, req)
        if self._score_eviction is not None and req.rid not in self._counted:
            self._counted.add(req.rid)
            self._score_eviction.note_request(
                resident.last_device_node, resident.device_prefix_len, match
            )
        offer = self._make_offer(match, params.key, resident.device_prefix_len, req)
        if offer is not None:
            report.update(estimate_fields(offer.estimate))
        offer = self._take(offer, req.rid, resident.last_device_node)
        if offer is None:
            self._offers.pop(req.rid, None)
            self._drop_prefetch(req.rid)
            return resident
        self._offers[req.rid] = offer
        promised = offer.promised
        return resident._replace(device_prefix_len=offer.stop - promised, host_hit_length=promised)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """Admit a sink row: allocate its k slots and open its source.

        None sends the request back to the queue; it is then matched without a stored prefix.
        """
        req = params.req
        assert req is not None
        offer = self._offers.pop(req.rid)
        assert offer.promised == params.host_hit_length
        request = self._open_request(req, offer)
        if request is None:
            self._declined.add(req.rid)
            return None
        self._runtime.live[req.rid] = request
        if not request.uses:
            self._private_tokens += request.k
        req.storage_hit_start = request.resident_len
        req.storage_hit_length = request.num_tokens
        return offer.promised, req.last_node

    def prefetch(self, req: Any) -> None:
        """A request begins to wait: note what it will use, and read it for its first layers.

        It is never held back for that: when it is admitted, it goes on with what is there.
        """
        runtime = self._runtime
        runtime.take_over()
        if self.disable or not runtime.uses_store:
            return
        if req.rid in self._prefetches or serve_refusal(req) is not None:
            return
        tokens = req.full_untruncated_fill_ids or req.origin_input_ids
        limit = req._compute_max_prefix_len(len(tokens))
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        match = self._find_stored(key, req)
        resident = super().match_prefix(MatchPrefixParams(key=key))
        offer = self._make_offer(match, key, resident.device_prefix_len, req)
        offer = self._take(offer, req.rid, resident.last_device_node)
        if offer is None or not runtime.store.ahead.enabled:
            return
        if not offer.missing or any(offer.same_parts(p.offer) for p in self._prefetches.values()):
            # Another request will have read it.
            return
        timeline = runtime.timeline_for(req.rid)
        try:
            source = self._open_source(offer, timeline)
        except PrefixUnreadable as error:
            logger.warning("request %s does without its stored prefix: %s", req.rid, error)
            runtime.store.report(error)
            return
        self._prefetches[req.rid] = _Prefetch(offer, source, timeline)
        runtime.store.ahead.wait(
            source, buffer_bytes(runtime.store.bytes_per_second, offer.estimate)
        )

    def prefix_device_indices(self, req: Any) -> Tensor:
        """The row of a request's prefix: zeros, resident slots, private slots.

        SGLang asks for it when it has admitted the request and locked what it uses.
        """
        self.awaited.forget(req.rid)
        request = self._runtime.live.get(req.rid)
        if request is None:
            return super().prefix_device_indices(req)
        zeros = request.slots.new_zeros(request.start)
        return torch.cat([zeros, request.resident_slots, request.slots])

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert what is exact into SGLang's tree, and offer what is new to the store."""
        request = self._runtime.live.get(req.rid)
        assert request is None or request.layers_loaded == self._runtime.shape.num_layers
        if request is not None:
            request.finish_timeline()
        if request is not None and request.failed:
            return
        if request is not None and request.approximate:
            if req.finished():
                self._offer_approximate(req, request, up_to)
            return
        if request is not None and not request.adopted:
            self._adopt(req, request)
        super().checkpoint(req, up_to=up_to, **kwargs)
        if (save := self._saves.pop(req.rid, None)) is not None:
            self._settle_save(save, req)
        self._offer_exact(req, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Give back what a request held; every end of a request comes through here."""
        if (save := self._saves.pop(req.rid, None)) is not None:
            save.abandon()
        super().on_release(req, checkpointed=checkpointed)
        self._forget(req.rid)
        request = self._runtime.live.pop(req.rid, None)
        if request is not None:
            self._runtime.release_source(request)
            request.publish()
            self._residents.leave(request.uses)
            if not request.adopted and not request.uses:
                self._private_tokens -= request.k
                self.token_to_kv_pool_allocator.free(request.slots)
            self._runtime.keep_timeline(request)
            self._end_failed(req, request)
        reports = (req.customized_info or {}).get(REPORT_KEY)
        if req.finished() and reports:
            self._runtime.totals.add(reports[0])

    def abort(self, rid: str, message: str) -> None:
        """End a request of the pass under way with status 503, and nothing of it is kept.

        SGLang does so itself where an external cache could not load: the request goes through its
        pass, whose output is dropped.
        """
        logger.error("request %s fails: %s", rid, message)
        if (save := self._saves.pop(rid, None)) is not None:
            save.abandon()
        status = HTTPStatus.SERVICE_UNAVAILABLE
        self._requests[rid].discard_output_reason = FINISH_ABORT(message, status)

    def has_failed(self, req: Any) -> bool:
        """Whether a request was ended by `abort`."""
        request = self._runtime.live.get(req.rid)
        return request is not None and request.failed

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """A request that was never admitted is gone."""
        super().release_aborted_request(handle)
        if handle.rid not in self._runtime.live:
            self._forget(handle.rid)

    def release_host_resources(self) -> None:
        """A graceful end: finish writes, and keep what the next start should know."""
        super().release_host_resources()
        for save in self._saves.values():
            save.abandon()
        self._runtime.close()

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang's eviction, after finished writes have let go of their slots.

        When nothing else is left, writes are given up whose slots come free by that, the latest
        first; nobody waits for them.
        """
        store, held, evicted = self._runtime.opened, self._held_tokens, 0
        if store is not None:
            store.poll()

        def freed() -> int:
            return evicted + held - self._held_tokens

        def enough() -> bool:
            nonlocal evicted
            while (missing := params.num_tokens - freed()) > 0:
                part = self._residents.oldest()
                leaves = self.evictable_leaves
                if part is not None and self.awaited.part_first(part, leaves):
                    evicted += self._residents.evict(part)
                    continue
                missing = self.awaited.tokens_before(leaves, missing)
                own = super(ImpressRadixCache, self).evict(EvictParams(num_tokens=missing))
                evicted += own.num_tokens_evicted
                if not own.num_tokens_evicted:
                    if part is None:
                        return False
                    evicted += self._residents.evict(part)
            return True

        if not enough() and store is not None and store.is_writing:
            nodes = self._nodes_of_writes()
            store.abandon_writes(enough, lambda save: self._frees(save, nodes))
            enough()
        return EvictResult(num_tokens_evicted=freed())

    def _delete_leaf(self, node: Any) -> None:
        super()._delete_leaf(node)
        self.awaited.move_up(node)

    def flush_pending_backups(self) -> None:
        """SGLang's tick after each batch."""
        self._runtime.poll()
        if self._runtime.opened is not None:
            self._runtime.store.ahead.top_up()

    def evictable_size(self) -> int:
        """Tokens that `evict` can free: SGLang's, and those that only writes hold."""
        own = self._held_tokens + self._residents.idle_tokens
        return int(super().evictable_size()) + own + self._locked_by_writes()

    def protected_size(self) -> int:
        """Tokens that cannot be evicted: SGLang's, and the slots only we know."""
        own = self._private_tokens + self._residents.used_tokens
        return int(super().protected_size()) + own - self._locked_by_writes()

    def _locked_by_writes(self) -> int:
        """Tokens of SGLang's tree that nothing but writes has locked.

        If they did not count as room, SGLang would let a request wait for the disk.
        """
        return sum(len(node.key) for node in self._nodes_of_writes())

    def _nodes_of_writes(self) -> set[Any]:
        """Nodes of SGLang's tree that nothing but writes has locked."""
        locks = Counter(node for save in self._locking for node in self._path(save.node))
        return {node for node, count in locks.items() if node.lock_ref == count}

    def _path(self, node: Any) -> Iterator[Any]:
        """A node of SGLang's tree and those above it, without the root."""
        while node is not self.root_node:
            yield node
            node = node.parent

    def _frees(self, save: Any, nodes: set[Any]) -> bool:
        """Whether giving a write up frees slots: a request that has them as well keeps them.

        `nodes` are those of `_nodes_of_writes`.
        """
        if save.node is None:
            return bool(save.held)
        return not nodes.isdisjoint(self._path(save.node))

    @property
    def runtime(self) -> ServingRuntime:
        """What it shares with the attention backend."""
        return self._runtime

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        self._runtime.poll()
        return {
            **self._runtime.summary(),
            "integrity": self._integrity(),
            "device_pool": {
                "tokens": self.token_to_kv_pool_allocator.size,
                "private_tokens": self._private_tokens,
                "shared_tokens": self._residents.used_tokens,
                "shared_idle_tokens": self._residents.idle_tokens,
                "held_tokens": self._held_tokens,
                "writing_tokens": self._writing_tokens,
            },
        }

    def _integrity(self) -> str:
        try:
            self.check_integrity()
        except AssertionError:
            logger.exception("the integrity check of IMPRESS failed")
            return "failed"
        return "ok"

    def check_integrity(self) -> None:
        """Compare our counters with the requests, and check the store.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        live = self._runtime.live.values()
        assert self._private_tokens == sum(r.k for r in live if not r.adopted and not r.uses)
        self._residents.check_integrity()
        self.awaited.check_integrity(self.page_size)
        assert self._held_tokens <= self._writing_tokens
        if self._runtime.opened is not None:
            self._runtime.store.check_integrity()

    def _find_stored(self, key: RadixKey, req: Any) -> StoredMatch:
        """The longest stored prefix that a request may take, in whole pages; it may be served."""
        policy, config = self._runtime.policy, self._runtime.config
        self._runtime.take_over()
        if req.rid in self._declined or not self._runtime.uses_store:
            return StoredMatch()
        if len(key) < config.min_prefix_tokens:
            return StoredMatch()
        wish = wish_of(req.sampling_params, config)
        least = EXACT
        depth = config.depth(wish.retention)
        if not policy.exact(wish) and depth:
            least = Quality(depth, wish.retention, wish.bits)
        match = self._runtime.store.match(
            _namespace(key), _as_tokens(key.raw_token_ids()), least=least
        )
        return StoredMatch(match.slice(0, self._whole_pages(match.num_tokens)))

    def _make_offer(
        self, match: StoredMatch, key: RadixKey, resident_len: int, req: Any
    ) -> _Offer | None:
        runtime = self._runtime
        num_tokens = match.num_tokens - resident_len
        if num_tokens < runtime.config.min_prefix_tokens:
            return None
        # SGLang leaves the last token out of the key: it is computed in any case.
        work = Work(resident_len, num_tokens, len(key) + 1 - match.num_tokens)
        estimate = runtime.decide(match, work, wish_of(req.sampling_params, runtime.config))
        k = runtime.policy.tokens_to_load(num_tokens, estimate.retention)
        spans, in_codes = match.slice(resident_len, match.num_tokens), estimate.bits < EXACT_BITS
        if not k or not runtime.store.can_read(spans, in_codes=in_codes):
            return None
        covers: tuple[Cover, ...] = ()
        if in_codes and k == num_tokens:
            covers = self._cover(match, work)
            stored = sum(len(cover.span) for cover in covers)
            k, work = stored, Work(resident_len, stored, work.new + work.stored - stored)
        token_ids = _as_tokens(key.raw_token_ids()[: resident_len + work.stored])
        idle = sum(len(own.span) for own in covers if own.part is not None and not own.part.users)
        return _Offer(match, work, k, token_ids, estimate, self.page_size, covers, idle)

    def _cover(self, match: StoredMatch, work: Work) -> tuple[Cover, ...]:
        """Where the tokens of a prefix in codes are; a short rest behind them is computed."""
        stop = work.resident + work.stored
        covers = self._residents.cover(match.slice(work.resident, stop), work.resident)
        last = max((i for i, cover in enumerate(covers) if cover.part is not None), default=-1)
        rest = sum(len(cover.span) for cover in covers[last + 1 :])
        if last >= 0 and rest < self._runtime.config.min_prefix_tokens:
            del covers[last + 1 :]
        return tuple(covers)

    def _whole_pages(self, num_tokens: int) -> int:
        """How many of the first tokens of a row are whole pages."""
        return num_tokens // self.page_size * self.page_size

    def _take(self, offer: _Offer | None, rid: str, node: Any) -> _Offer | None:
        """An offer; None if its tokens are computed because that is faster.

        Notes what a request, whose resident prefix ends at `node`, waits for.
        """
        config = self._runtime.config
        if offer is not None and config.load != "always" and not offer.estimate.loads_faster:
            self._runtime.store.measure_reading(offer.match)
            offer = None
        covers = () if offer is None else offer.covers
        self.awaited.note(rid, node, [cover.span for cover in covers])
        return offer

    def _open_source(self, offer: _Offer, timeline: Timeline) -> AnySource:
        if offer.covers:
            spans, in_slots = _spans_of(offer.covers)
            return self._runtime.store.open_coded(spans, in_slots, timeline)
        if offer.estimate.bits < EXACT_BITS:
            part = offer.match.slice(offer.resident_len, offer.stop)
            return self._runtime.store.open_coded(part, [False] * len(part), timeline)
        demand = self._runtime.demand_of(offer.k, offer.work.stored)
        return self._runtime.store.open_source(
            offer.match, offer.resident_len, offer.stop, demand, timeline
        )

    def _take_source(self, rid: str, offer: _Offer) -> tuple[AnySource, Timeline]:
        """The source of a request that is admitted: what was read while it waited, or a new one."""
        if offer.estimate.bits < EXACT_BITS:
            self._runtime.store.touch(offer.match)
        prefetch = self._prefetches.pop(rid, None)
        if prefetch is not None:
            if prefetch.offer.same_reads(offer):
                return prefetch.source, prefetch.timeline
            self._runtime.store.close_source(prefetch.source)
        timeline = self._runtime.timeline_for(rid)
        return self._open_source(offer, timeline), timeline

    def _take_coded(self, rid: str, parts: Sequence[ResidentPart]) -> CodedSource | None:
        """What was read of these parts while a request waited."""
        waiting = sorted(self._prefetches, key=lambda other: other != rid)
        for other in waiting:
            waited = self._prefetches[other]
            source = waited.source if isinstance(waited.source, CodedSource) else None
            if source is not None and waited.offer.covers and source.reads(parts):
                del self._prefetches[other]
                break
        else:
            source = None
        self._drop_prefetch(rid)
        return source

    def _drop_prefetch(self, rid: str) -> None:
        if (prefetch := self._prefetches.pop(rid, None)) is not None:
            self._runtime.store.close_source(prefetch.source)

    def _drop_matches(self) -> None:
        """Forget what waiting requests were matched with; they are matched again."""
        for rid in list(self._prefetches):
            self._drop_prefetch(rid)
        self._offers.clear()

    def _open_request(self, req: Any, offer: _Offer) -> PrefixRequest | None:
        prefetched = req.rid in self._prefetches
        try:
            if offer.covers:
                return self._open_coded(req, offer, prefetched=prefetched)
            source, timeline = self._take_source(req.rid, offer)
        except PrefixUnreadable as error:
            logger.warning("request %s does without its stored prefix: %s", req.rid, error)
            self._runtime.store.report(error)
            return None
        slots = self._allocate(offer.k)
        if slots is None:
            self._runtime.store.close_source(source)
            return None
        self._runtime.store.ahead.join(source)
        return self._new_request(
            req, offer, slots.to(torch.int64), timeline, source=source, prefetched=prefetched
        )

    def _open_coded(self, req: Any, offer: _Offer, *, prefetched: bool) -> PrefixRequest | None:
        """A request that shares the slots of a prefix in codes; None if there is no room for it.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        # Others may have brought some of it, or driven it out, since it was matched.
        spans = offer.match.slice(offer.resident_len, offer.stop)
        # What nobody will use of idle parts stays room: SGLang was not told of it.
        first = offer.resident_len
        self._residents.cut_idle(spans, first)
        offer = dataclasses.replace(offer, covers=tuple(self._residents.cover(spans, first)))
        # What is resident must not be evicted for the rest.
        resident = [PartUse(c.part, c.span.start, c.span.stop) for c in offer.covers if c.part]
        self._residents.use(resident)
        slots = self._allocate(offer.missing) if offer.missing else None
        self._residents.leave(resident)
        if offer.missing and slots is None:
            return None
        uses = self._uses_of(offer, slots)
        self._residents.use(uses)
        timeline = self._runtime.timeline_for(req.rid)
        try:
            fresh = list(dict.fromkeys(use.part for use in uses if use.part.load is None))
            loads = self._runtime.join_loads(uses, self._take_coded(req.rid, fresh), timeline)
        except BaseException:
            self._residents.leave(uses)
            raise
        self._runtime.store.touch(offer.match)
        request = self._new_request(
            req,
            offer,
            torch.cat([use.slots for use in uses]),
            timeline,
            units=UsedUnits(uses, self.device),
            prefetched=prefetched,
        )
        request.loads = loads
        return request

    def _uses_of(self, offer: _Offer, slots: Tensor | None) -> list[PartUse]:
        """The parts of an offer; those that are not resident get some of the new slots."""
        uses, first = [], 0
        for cover in offer.covers:
            span, part = cover.span, cover.part
            if part is None:
                assert slots is not None
                layout = span.segment.info.layout().codes
                assert layout is not None, "the store has no codes"
                own = slots[first : (first := first + len(span))].to(torch.int64)
                part = ResidentPart(
                    span.segment.segment_id,
                    layout,
                    self._runtime.shape.num_layers,
                    span.start,
                    span.stop,
                    own,
                    alone=cover.alone,
                )
                self._residents.add(part)
            uses.append(PartUse(part, span.start, span.stop))
        return uses

    def _new_request(
        self,
        req: Any,
        offer: _Offer,
        slots: Tensor,
        timeline: Timeline,
        *,
        prefetched: bool,
        source: AnySource | None = None,
        units: UsedUnits | None = None,
    ) -> PrefixRequest:
        resident_slots = self.path_device_indices(req.last_node)[: offer.resident_len]
        num_tokens = offer.stop - offer.resident_len
        retention = 1.0 if offer.k == num_tokens else offer.estimate.retention
        quality = offer.match.quality.after(retention, offer.estimate.bits)
        report = req.customized_info[REPORT_KEY][0]
        report.update(
            path="ssd" if offer.missing else "device",
            prefix_tokens=offer.stop,
            used_tokens=offer.resident_len + offer.k,
            stored_tokens=num_tokens,
            loaded_tokens=offer.missing,
            shared_tokens=offer.k - offer.missing,
            approximate=quality != EXACT,
            prefetched=prefetched,
        )
        return PrefixRequest(
            rid=req.rid,
            token_ids=torch.from_numpy(offer.token_ids.astype(np.int64)),
            resident_slots=resident_slots,
            slots=slots,
            num_tokens=num_tokens,
            bits=offer.estimate.bits,
            quality=quality,
            source=source,
            report=report,
            units=units,
            new_tokens=offer.work.new,
            timeline=timeline,
        )

    def _allocate(self, num_tokens: int) -> Tensor | None:
        """Slots of whole pages, in order; None if there is no room."""
        assert num_tokens == self._whole_pages(num_tokens)
        allocator = self.token_to_kv_pool_allocator
        missing = num_tokens - allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        slots: Tensor | None = allocator.alloc(num_tokens)
        return slots

    def _end_failed(self, req: Any, request: PrefixRequest) -> None:
        """Count a failed request; one that was put back to the queue may try again."""
        if request.failed and req.finished():
            self._runtime.totals.requests_failed += 1
        elif request.failed:
            req.discard_output_reason = None

    def _adopt(self, req: Any, request: PrefixRequest) -> None:
        """Hand the slots of a whole, exact prefix to SGLang's tree, like computed ones."""
        req.kv.cache_protected_len = request.resident_len
        self._private_tokens -= request.k
        request.adopted = True

    def _offer_exact(self, req: Any, up_to: int) -> None:
        """Offer a computed prefix; its slots are resident, and locked while a write reads them."""
        slots = self.path_device_indices(req.last_node)
        if up_to < len(req.origin_input_ids) or not self._wants(req, len(slots)):
            return
        save = Save(slots, self._runtime.shape.num_layers)
        if self._offer(req, save, 0, EXACT):
            self._lock_for(save, req.last_node)

    def begin_saves(self, rids: Sequence[str], lengths: Sequence[int]) -> dict[int, Save]:
        """Offer the prompts that the pass which begins now completes, to be saved behind it.

        `lengths` are tokens of each request after the pass. Returns saves by the place in `rids`.
        """
        saves = {}
        for place, (rid, length) in enumerate(zip(rids, lengths, strict=True)):
            request, req = self._runtime.live.get(rid), self._requests.get(rid)
            if req is None or length != len(req.origin_input_ids) or rid in self._saves:
                continue
            if request is not None and (request.approximate or request.failed):
                continue
            # What the tree takes over afterwards, and a save may go on reading.
            length = self._whole_pages(length)
            if self._wants(req, length):
                save = self._begin_save(req, length)
                if save is not None:
                    saves[place] = save
        return saves

    def _begin_save(self, req: Any, length: int) -> Save | None:
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        save = Save(row[:length].to(torch.int64, copy=True))
        if not self._offer(req, save, 0, EXACT):
            return None
        self._saves[req.rid] = save
        return save

    def _settle_save(self, save: Save, req: Any) -> None:
        """The prompt is computed: its slots are the tree's, unless that had the same KVs before."""
        owned = self.path_device_indices(req.last_node)[: len(save.slots)]
        if len(owned) < len(save.slots) or not torch.equal(owned, save.slots):
            save.abandon()
        elif not save.finished:
            self._lock_for(save, req.last_node)

    def _lock_for(self, save: Save, node: Any) -> None:
        save.node = node
        self.inc_lock_ref(node)
        self._locking.add(save)

    def _offer_approximate(self, req: Any, request: PrefixRequest, up_to: int) -> None:
        """Offer what was computed after a partly loaded prefix, holding its slots for the write."""
        first, quality = request.prefix_len, request.quality
        up_to = self._whole_pages(up_to)
        too_deep = quality.depth > self._runtime.config.depth(quality.retention)
        if too_deep or up_to <= first or not self._wants(req, up_to):
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        slots = row[first:up_to].to(torch.int64, copy=True)
        save = Save(slots, self._runtime.shape.num_layers)
        if self._offer(req, save, first, quality):
            # SGLang frees [cache_protected_len, up_to) next: these slots are ours now.
            req.kv.cache_protected_len = up_to
            save.held = True
            self._held_tokens += len(slots)

    def _wants(self, req: Any, num_tokens: int) -> bool:
        """Whether a request may be stored, is long enough, and the pool can spare its slots.

        Writes hold at most half of the pool, or a single long prefix. What was refused once for
        want of space is not offered again by the same request.
        """
        runtime = self._runtime
        if not runtime.uses_store or num_tokens < runtime.config.min_prefix_tokens:
            return False
        if store_refusal(req) is not None:
            return False
        spare = self.token_to_kv_pool_allocator.size // 2 - self._writing_tokens
        fits = self._writing_tokens == 0 or num_tokens <= spare
        return fits and req.rid not in self._refused

    def _offer(self, req: Any, save: Save, first: int, quality: Quality) -> bool:
        """Offer the tokens of a request, whose KVs from token `first` on are in a save's slots."""
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        stop = first + len(save.slots)
        tokens = _as_tokens(req.full_untruncated_fill_ids[:stop])
        key = RadixKey(req.full_untruncated_fill_ids[:1], req.extra_key, cache_salt=req.cache_salt)

        def read_layers(start: int) -> LayerReader:
            part = save.slots[start - first :]
            reader = PoolLayerReader(pool, part, self._forward_stream, self._pool_access)
            return GatedLayerReader(save, reader)

        offer = Offer(
            tokens,
            read_layers,
            on_done=lambda: self._finish_save(save),
            abandon=save.abandon,
            quality=quality,
            available_from=first,
            min_tokens=self._runtime.config.chunk_tokens,
            holder=save,
            queries=save.queries,
        )
        outcome = self._runtime.store.offer(_namespace(key), offer)
        if outcome is StoreOutcome.NO_SPACE:
            self._refused.add(req.rid)
        if outcome is StoreOutcome.ACCEPTED:
            self._writing_tokens += len(save.slots)
        return outcome is StoreOutcome.ACCEPTED

    def _finish_save(self, save: Save) -> None:
        """The slots of a save are not read any more, or given up."""
        save.finished = True
        self._writing_tokens -= len(save.slots)
        if save.node is not None:
            self._locking.remove(save)
            self.dec_lock_ref(save.node)
        if save.held:
            self._held_tokens -= len(save.slots)
            self.token_to_kv_pool_allocator.free(save.slots)

    def _forget(self, rid: str) -> None:
        self.awaited.forget(rid)
        self._offers.pop(rid, None)
        self._drop_prefetch(rid)
        self._requests.pop(rid, None)
        self._declined.discard(rid)
        self._counted.discard(rid)
        self._refused.discard(rid)


def _spans_of(covers: Sequence[Cover]) -> tuple[list[StoredSpan], list[bool]]:
    """What a source of some covers reads, and what of that is in slots."""
    spans = []
    for cover in covers:
        part, span = cover.part, cover.span
        spans.append(span if part is None else StoredSpan(span.segment, part.start, part.stop))
    return spans, [cover.part is not None and cover.part.layers_loaded > 0 for cover in covers]


def _namespace(key: RadixKey) -> str:
    return json.dumps([key.extra_key, key.cache_salt])


def _as_tokens(token_ids: Any) -> Tokens:
    return np.array(token_ids, dtype=np.int32)
