"""The tree cache: SGLang's radix cache for what is resident, our store for what has left it.

Translates SGLang's calls: `serving/` plans, opens and saves. A request whose stored prefix is
longer than its resident one is admitted with that (docs/design.md). Only the scheduler's thread
calls this class.

Slots that SGLang's tree does not know are counted, so that SGLang's own accounting
(available + evictable + protected + uncached == total) holds at every step:
  * private: the k slots of a live request of its own, as protected;
  * shared: slots of prefixes in codes, as protected while a request uses them, and else as
    evictable;
  * held: slots of approximate KVs that a write still reads, as evictable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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

from impress_sglang.integration.checking import IntegrityCheck
from impress_sglang.integration.eligibility import serve_refusal, store_refusal
from impress_sglang.integration.eviction import Awaited, ScoreEviction
from impress_sglang.integration.passes import REPORT_KEY, KnownRequest, KnownRequests, Passes
from impress_sglang.integration.pool_sweeps import PoolSweeps
from impress_sglang.integration.prompt_saves import PromptSaves, as_tokens, namespace_of
from impress_sglang.integration.weights import WeightWatch
from impress_sglang.management.stored import StoredMatch
from impress_sglang.serving.admission import AdmissionPlan
from impress_sglang.serving.blend_plan import BlendPlan
from impress_sglang.serving.report import estimate_fields, new_report
from impress_sglang.serving.request import StoredRequest
from impress_sglang.serving.runtime import ServingRuntime
from impress_sglang.serving.truncation import truncated_tokens_of


class ImpressRadixCache(RadixCache):
    """SGLang's `RadixCache` that finds evicted prefixes again on SSD."""

    def __init__(
        self,
        params: CacheInitParams,
        runtime: ServingRuntime,
        read_identity: Callable[[], str],
        forward_stream: Any,
    ) -> None:
        """`read_identity` names the model's weights; it is asked again after each flush."""
        self.runtime = runtime
        """What it shares with the attention backend."""
        self._saves = PromptSaves(self, runtime, forward_stream)
        self._known = KnownRequests()
        self.passes = Passes(runtime, self._known, self._saves)
        """Told of forward passes by the attention backend."""
        self.weights = WeightWatch(runtime.served, read_identity, self._set_aside, self._is_empty)
        """Told of new weights by the hooks around SGLang's handlers."""
        self.sweeps = PoolSweeps(self)
        """Who frees what is purged."""
        self.held_back = set[str]()
        """Requests that wait for the pass of another one, which brings their prefix."""
        self._private_tokens = 0
        self._residents = runtime.residents
        self.awaited = Awaited(self._residents)
        self.check = IntegrityCheck(runtime.served, self._check_requests)
        """What somebody may order, and how it ended."""
        self._started = False
        super().__init__(params)
        runtime.describe_pool = self._describe_pool
        config = runtime.config
        self._score_eviction: ScoreEviction | None = None
        if runtime.policy.scores and params.eviction_policy == "lru":
            self._score_eviction = ScoreEviction(
                config.half_life, config.part_retention, self.awaited.turn
            )
            self.eviction_strategy = self._score_eviction
        self._started = True

    def reset(self) -> None:
        """SGLang's flush, when it is idle: what is resident goes, what is stored stays."""
        store = self.runtime.served.opened
        if self._started and store is not None:
            # Accepted writes read slots that are about to be given away.
            store.writes.drain()
            # Other weights may come, and another store.
            self.runtime.tell_metrics(now=True)
        assert not self.runtime.live and not self._private_tokens
        assert not self._saves.held_tokens
        self._residents.forget_all()
        self.awaited.clear()
        self.sweeps.clear()
        if self.runtime.queue_order is not None:
            self.runtime.queue_order.forget_states()
        self.runtime.prefetches.drop_all()
        self._saves.forget_all()
        self._known.start_again()
        super().reset()
        if self._started:
            self.weights.flushed()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The resident prefix, extended by a stored one where that is longer."""
        resident = super().match_prefix(params)
        req = params.req
        if req is None or self.disable:
            return resident
        known = self._known.note(req)
        self.held_back.discard(req.rid)
        length = len(req.origin_input_ids)
        report = new_report(self.runtime.policy.name, resident.device_prefix_len, length)
        refusal = serve_refusal(req)
        report.update(
            not_served=refusal,
            not_stored=store_refusal(req),
            truncated_tokens=truncated_tokens_of(req.sampling_params),
        )
        if report["not_stored"] is None:
            self._saves.sight(req)
        req.customized_info = {REPORT_KEY: [report]}
        match, plan = StoredMatch(), None
        if refusal is None:
            match, plan = self._plan(params.key, resident.device_prefix_len, known)
        if self._score_eviction is not None and not known.counted:
            known.counted = True
            self._score_eviction.note_request(
                resident.last_device_node, resident.device_prefix_len, match
            )
        if plan is not None:
            report.update(estimate_fields(plan.estimate))
        known.plan = plan = self._accept(plan, req, resident)
        if plan is None:
            self.runtime.prefetches.drop(req.rid)
            return resident
        promised = plan.promised
        return resident._replace(device_prefix_len=plan.stop - promised, host_hit_length=promised)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """Admit a request with its stored prefix: take its slots and open its source.

        None sends the request back to the queue; it is then matched again, without a stored prefix
        unless it waits for somebody else to bring that.
        """
        req = params.req
        assert req is not None
        known = self._known[req.rid]
        plan, known.plan = known.plan, None
        assert plan is not None and plan.promised == params.host_hit_length
        if self.runtime.bringing.serves(plan):
            self.held_back.add(req.rid)
            return None
        resident_slots = self.path_device_indices(req.last_node)[: plan.resident_len]
        report = req.customized_info[REPORT_KEY][0]
        request = self.runtime.open(req.rid, plan, resident_slots, report, self._allocate)
        if request is None:
            # Who blends says by itself whether it may do so later.
            known.declined = not isinstance(plan, BlendPlan)
            return None
        if not request.uses:
            self._private_tokens += request.k
        req.storage_hit_start = request.resident_len
        req.storage_hit_length = request.num_tokens
        return plan.promised, req.last_node

    def prefetch(self, req: Any, *, again: bool = False) -> None:
        """A request waits: note what it will use, and read it for its first layers.

        It is never held back for that: when it is admitted, it goes on with what is there. `again`:
        it has waited, and something may have changed.
        """
        runtime = self.runtime
        runtime.served.take_over()
        serves = runtime.served.in_use and serve_refusal(req) is None
        if self.disable or not (serves or runtime.queue_order):
            return
        tokens = req.full_untruncated_fill_ids or req.origin_input_ids
        if req.positional_embed_overrides is not None:
            # What SGLang matches of it, whose KVs do not follow from its tokens.
            tokens = tokens[:0]
        limit = req._compute_max_prefix_len(len(tokens))
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        resident = super().match_prefix(MatchPrefixParams(key=key))
        plan = None
        if serves:
            _, plan = self._plan(key, resident.device_prefix_len, self._known.note(req))
        plan = self._accept(plan, req, resident, measure=not again)
        if plan is None or runtime.bringing.serves(plan):
            runtime.prefetches.drop(req.rid)
        else:
            runtime.prefetches.begin(req.rid, plan)

    def prefix_device_indices(self, req: Any) -> Tensor:
        """The row of a request's prefix: zeros, resident slots, private slots.

        SGLang asks for it when it has admitted the request and locked what it uses.
        """
        self._end_waiting(req.rid)
        request = self.runtime.live.get(req.rid)
        if request is None:
            return super().prefix_device_indices(req)
        zeros = request.slots.new_zeros(request.start)
        return torch.cat([zeros, request.resident_slots, request.slots])

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert what is exact into SGLang's tree, and offer what is new to the store."""
        request = self.runtime.live.get(req.rid)
        if request is not None:
            assert request.layers_loaded == self.runtime.shape.num_layers
            # What comes after the prompt is not what a timeline is about.
            request.timeline.finish()
            if request.failed:
                return
            if request.approximate:
                if req.finished():
                    before = request.k
                    self._saves.offer_approximate(req, request, up_to)
                    # What a write holds of them is not private any more.
                    self._private_tokens -= before - request.k
                return
            if not request.adopted:
                self._adopt(req, request)
        super().checkpoint(req, up_to=up_to, **kwargs)
        self._saves.settle(req)
        self._saves.offer_exact(req, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Give back what a request held; every end of a request comes through here."""
        self._saves.abandon(req.rid)
        super().on_release(req, checkpointed=checkpointed)
        self._forget(req.rid)
        request = self.runtime.release(req.rid)
        if request is not None:
            if not request.adopted and not request.uses:
                self._private_tokens -= request.k
                self.token_to_kv_pool_allocator.free(request.slots)
            self._end_failed(req, request)
        reports = (req.customized_info or {}).get(REPORT_KEY)
        if req.finished():
            self._saves.end(req)
        if req.finished() and reports:
            self.passes.note_end(req, reports[0])

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """A request that was never admitted is gone."""
        super().release_aborted_request(handle)
        if handle.rid not in self.runtime.live:
            self._forget(handle.rid)
            self._saves.drop(handle.rid)

    def release_host_resources(self) -> None:
        """A graceful end: finish writes, and keep what the next start should know."""
        super().release_host_resources()
        self._saves.abandon_all()
        self.runtime.close()

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang's eviction, after finished writes have let go of their slots.

        When nothing else is left, writes are given up whose slots come free by that, the latest
        first; nobody waits for them.
        """
        store, held, evicted = self.runtime.served.opened, self._saves.held_tokens, 0
        if store is not None:
            store.poll()

        def freed() -> int:
            return evicted + held - self._saves.held_tokens

        def enough() -> bool:
            nonlocal evicted
            while (missing := params.num_tokens - freed()) > 0:
                part = self._residents.oldest()
                leaves = self.evictable_leaves
                if part is not None and self.awaited.part_first(part, leaves):
                    evicted += self._residents.evict(part)
                    continue
                if part is not None:
                    missing = self.awaited.tokens_before(leaves, missing)
                own = super(ImpressRadixCache, self).evict(EvictParams(num_tokens=missing))
                evicted += own.num_tokens_evicted
                if not own.num_tokens_evicted:
                    if part is None:
                        return False
                    evicted += self._residents.evict(part)
            return True

        if not enough() and store is not None and store.writes:
            store.writes.abandon(enough, self._saves.which_free())
            enough()
        return EvictResult(num_tokens_evicted=freed())

    def _delete_leaf(self, node: Any) -> None:
        super()._delete_leaf(node)
        self.awaited.move_up(node)

    def flush_pending_backups(self) -> None:
        """SGLang's tick after each batch."""
        served = self.runtime.served
        served.poll()
        if served.opened is not None:
            served.opened.ahead.top_up()
        self.runtime.tell_metrics()

    def evictable_size(self) -> int:
        """Tokens that `evict` can free: SGLang's, and those that only writes hold."""
        own = self._saves.held_tokens + self._residents.idle_tokens
        return int(super().evictable_size()) + own + self._saves.locked_tokens()

    def protected_size(self) -> int:
        """Tokens that cannot be evicted: SGLang's, and the slots only we know."""
        own = self._private_tokens + self._residents.used_tokens
        return int(super().protected_size()) + own - self._saves.locked_tokens()

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        self.runtime.served.poll()
        return {**self.runtime.summary(), "integrity": self.check.state}

    def _describe_pool(self) -> dict[str, int]:
        """What of the pool is ours."""
        return {
            "tokens": self.token_to_kv_pool_allocator.size,
            "private_tokens": self._private_tokens,
            "shared_tokens": self._residents.used_tokens,
            "shared_idle_tokens": self._residents.idle_tokens,
            "held_tokens": self._saves.held_tokens,
            "writing_tokens": self._saves.writing_tokens,
        }

    def check_integrity(self) -> None:
        """Compare our counters with the requests, and check the store, all at once.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        self._check_requests()
        if self.runtime.served.opened is not None:
            self.runtime.store.check_integrity()

    def _check_requests(self) -> None:
        """However much is stored, this takes time in the number of requests and of parts."""
        live = self.runtime.live.values()
        assert self._private_tokens == sum(r.k for r in live if not r.adopted and not r.uses)
        self._residents.check_integrity()
        self.awaited.check_integrity(self.page_size)
        assert self._saves.held_tokens <= self._saves.writing_tokens

    def _set_aside(self) -> None:
        """Weights or the pool may change. Passes end, writes are given up, plans are forgotten."""
        torch.get_device_module(self.device).synchronize()
        self._saves.revoke()
        store = self.runtime.served.opened
        if store is not None:
            store.writes.abandon()
        self.runtime.prefetches.drop_all()
        self._known.drop_plans()
        self._residents.hide_all()

    def _is_empty(self) -> bool:
        """Whether no KV is left in the pool."""
        allocator = self.token_to_kv_pool_allocator
        return bool(allocator.available_size() == allocator.size)

    def _plan(
        self, key: RadixKey, resident_len: int, known: KnownRequest
    ) -> tuple[StoredMatch, AdmissionPlan | None]:
        """What is stored of a request that may be served, and how it would be used."""
        admission = self.runtime.admission
        # A prompt is only copied where it may be found.
        if known.declined or not admission.looks_for(len(key)):
            return StoredMatch(), None
        tokens = as_tokens(key.raw_token_ids())
        wanted = self.passes.wanted_by(known.req)
        space, blending = namespace_of(key), self.runtime.blending
        match = admission.find(space, tokens, wanted)
        waiting = self.runtime.prefetches.of(known.req.rid)
        plan = admission.plan(match, tokens, resident_len, wanted, waiting)
        if blending is not None:
            plan = blending.plan(space, tokens, resident_len, plan, wanted, known.blend) or plan
        return match, plan

    def _accept(
        self, plan: AdmissionPlan | None, req: Any, resident: MatchResult, *, measure: bool = True
    ) -> AdmissionPlan | None:
        """A plan; None if its tokens are computed because that is faster.

        Notes what the request waits for. `measure`: see `Admission.accept`.
        """
        admission, order = self.runtime.admission, self.runtime.queue_order
        plan = admission.accept(plan, measure=measure)
        spans = () if plan is None else plan.spans
        self.awaited.note(req.rid, resident.last_device_node, spans)
        if order is not None:
            tokens = req.full_untruncated_fill_ids or req.origin_input_ids
            order.note(req.rid, admission.state(plan, resident.device_prefix_len, len(tokens)))
        return plan

    def _allocate(self, num_tokens: int) -> Tensor | None:
        """Slots of whole pages, in order, int64; None if there is no room."""
        assert num_tokens == self.runtime.admission.whole_pages(num_tokens)
        allocator = self.token_to_kv_pool_allocator
        missing = num_tokens - allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        slots: Tensor | None = allocator.alloc(num_tokens)
        return None if slots is None else slots.to(torch.int64)

    def _end_failed(self, req: Any, request: StoredRequest) -> None:
        """Count a failed request; one that was put back to the queue may try again."""
        if request.failed and req.finished():
            self.runtime.totals.requests_failed += 1
        elif request.failed:
            req.discard_output_reason = None

    def _adopt(self, req: Any, request: StoredRequest) -> None:
        """Hand the slots of a whole, exact prefix to SGLang's tree, like computed ones."""
        req.kv.cache_protected_len = request.resident_len
        self._private_tokens -= request.k
        request.adopt()

    def _end_waiting(self, rid: str) -> None:
        """A request is admitted, or gone."""
        self.awaited.forget(rid)
        self.runtime.end_waiting(rid)

    def _forget(self, rid: str) -> None:
        self._end_waiting(rid)
        self.runtime.prefetches.drop(rid)
        self.held_back.discard(rid)
        self._known.forget(rid)
        self._saves.forget(rid)
