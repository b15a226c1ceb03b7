"""The tree cache: SGLang's radix cache for resident prefixes, our store for those that left it.

Translates SGLang's calls into those of `serving/`, which plans, opens and saves. A request whose
stored prefix is longer than its resident one is admitted with the stored one (docs/design.md). Only
the scheduler's thread calls this class.

Slots that SGLang's tree does not know are counted here, so that SGLang's own accounting
(available + evictable + protected + uncached == total) holds at every step:
  * private: the k slots that belong to one live request, counted as protected;
  * held: slots of approximate KVs that a write still reads, counted as evictable.
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

from impress_sglang.paper.admission import AdmissionPlan
from impress_sglang.paper.plugin.eviction import Awaited, ScoreEviction
from impress_sglang.paper.plugin.passes import KnownRequest, KnownRequests, Passes
from impress_sglang.paper.plugin.prompt_saves import PromptSaves
from impress_sglang.paper.plugin.retries import Retries
from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.runtime import ServingRuntime
from impress_sglang.plugin.checking import IntegrityCheck
from impress_sglang.plugin.eligibility import serve_refusal, store_refusal
from impress_sglang.plugin.keys import as_tokens, namespace_of
from impress_sglang.plugin.reports import attach, report_of
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.sweeps import Sweeps
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.serving.report import estimate_fields, new_report
from impress_sglang.serving.truncation import truncated_tokens_of
from impress_sglang.store.stored import StoredMatch


class ImpressRadixCache(RadixCache):
    """SGLang's `RadixCache`, extended to find evicted prefixes again on SSD."""

    def __init__(
        self,
        params: CacheInitParams,
        runtime: ServingRuntime,
        read_identity: Callable[[], str],
        forward_stream: Any,
    ) -> None:
        """`read_identity` returns the model identity; it is called again after each flush."""
        self.runtime = runtime
        """The runtime, which the attention backend uses as well."""
        self._saves = PromptSaves(self, runtime, forward_stream)
        self._known = KnownRequests()
        self.passes = Passes(runtime, self._known, self._saves)
        """Told of forward passes by the attention backend."""
        self.weights = WeightWatch(runtime.served, read_identity, self._set_aside, self._is_empty)
        """Told of new weights by the hooks around SGLang's handlers."""
        self.retries = Retries()
        """Queues requests again whose stored prefix failed in a pass."""
        self.sweeps = Sweeps(
            self, self._last_node, lambda node: bool(node.lock_ref), self._free_leaf
        )
        """Frees the slots of what is purged."""
        self._private_tokens = 0
        self.awaited = Awaited(runtime.lookahead)
        self.check = IntegrityCheck(runtime.served, self._check_requests)
        """The integrity check that an operator may order, and its outcome."""
        self._started = False
        super().__init__(params)
        self.impress: ServedCache = ServedCache(
            runtime,
            self.check,
            self.weights,
            self.sweeps,
            params.page_size,
            self.passes.sights,
            runtime.queue_order,
            attach=self.retries.attach,
            prefetch=self.prefetch,
            note_queue=runtime.note_queue,
            rest=self.retries.rest,
            find=lambda *prompt: runtime.admission.find(*prompt[:-1]),
            reorder=runtime.reorder,
        )
        """What hooks, routes and orders use."""
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
        """SGLang's flush, which it does when idle: drops what is resident, keeps what is stored."""
        store = self.runtime.served.opened
        if self._started and store is not None:
            # Accepted writes read slots that are about to be given away.
            store.writes.drain()
            # Other weights may follow, and with them another store.
            self.runtime.tell_metrics(now=True)
        assert not self.runtime.live and not self._private_tokens
        assert not self._saves.held_tokens
        self.awaited.clear()
        self.sweeps.clear()
        if self.runtime.queue_order is not None:
            self.runtime.queue_order.forget_states()
        self._saves.forget_all()
        self._known.start_again()
        super().reset()
        if self._started:
            self.weights.flushed()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match the resident prefix, extended by a stored one where that is longer."""
        resident = super().match_prefix(params)
        req = params.req
        if req is None or self.disable:
            return resident
        known = self._known.note(req)
        length = len(req.origin_input_ids)
        report = new_report(self.runtime.policy.name, resident.device_prefix_len, length)
        refusal = serve_refusal(req)
        report.update(
            not_served=refusal,
            not_stored=store_refusal(req),
            truncated_tokens=truncated_tokens_of(req.sampling_params),
            recomputed=known.failed,
        )
        if report["not_stored"] is None:
            self._saves.sight(req)
        attach(req, report)
        match, plan = StoredMatch(), None
        if refusal is None:
            match, plan = self._plan(params.key, resident.device_prefix_len, known)
        if self._score_eviction is not None and not known.counted:
            known.counted = True
            self._score_eviction.note_request(
                resident.last_device_node, resident.device_prefix_len, match
            )
        known.plan = accepted = self._accept(plan, req, resident)
        if plan is not None:
            report.update(estimate_fields(plan.estimate, loads=accepted is not None))
        if accepted is None:
            return resident
        start = accepted.stop - accepted.k
        return resident._replace(device_prefix_len=start, host_hit_length=accepted.k)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """Admit a request with its stored prefix: take its slots and open its source.

        None sends the request back to the queue. It is then matched again, without a stored prefix.
        """
        req = params.req
        assert req is not None
        known = self._known[req.rid]
        plan, known.plan = known.plan, None
        assert plan is not None and plan.k == params.host_hit_length
        resident_slots = self.path_device_indices(req.last_node)[: plan.resident_len]
        report = report_of(req)
        assert report is not None
        request = self.runtime.open(req.rid, plan, resident_slots, report, self._allocate)
        if request is None:
            known.declined = True
            return None
        self._private_tokens += request.k
        req.storage_hit_start = request.resident_len
        req.storage_hit_length = request.num_tokens
        return plan.k, req.last_node

    def prefetch(self, req: Any, *, again: bool = False) -> None:
        """Note what a waiting request will use.

        `again`: it has waited since an earlier call, and what is cached of it may have changed.
        """
        runtime = self.runtime
        runtime.served.take_over()
        serves = runtime.served.in_use and serve_refusal(req) is None
        if self.disable or not (serves or runtime.queue_order):
            return
        tokens = req.full_untruncated_fill_ids or req.origin_input_ids
        if req.positional_embed_overrides is not None:
            # SGLang matches none of it either: its KVs do not follow from its tokens.
            tokens = tokens[:0]
        limit = req._compute_max_prefix_len(len(tokens))
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        resident = super().match_prefix(MatchPrefixParams(key=key))
        plan = None
        if serves:
            _, plan = self._plan(key, resident.device_prefix_len, self._known.note(req))
        self._accept(plan, req, resident, measure=not again)

    def prefix_device_indices(self, req: Any) -> Tensor:
        """The row of a request's prefix: zeros, resident slots, slots of the stored prefix.

        SGLang asks for it after it has admitted the request and locked what the request uses.
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
            if request.failed:
                return
            if request.approximate:
                if req.finished():
                    self._saves.offer_approximate(req, request, up_to)
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
            if not request.adopted:
                self._private_tokens -= request.k
                self.token_to_kv_pool_allocator.free(request.slots)
            if request.failed:
                self._begin_again(req)
                return
        report = report_of(req)
        if req.finished():
            self._saves.end(req)
        if req.finished() and report is not None:
            self.passes.note_end(req, report)

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """Forget a request that ended without having been admitted."""
        super().release_aborted_request(handle)
        if handle.rid not in self.runtime.live:
            self._forget(handle.rid)
            self._saves.drop(handle.rid)

    def release_host_resources(self) -> None:
        """Shut down gracefully: finish writes, and save what the next start should know."""
        super().release_host_resources()
        self._saves.abandon_all()
        self.runtime.close()

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang's eviction, after finished writes have let go of their slots.

        When nothing else is left, writes are given up if that frees their slots, the latest write
        first; none of them is waited for.
        """
        store, held, evicted = self.runtime.served.opened, self._saves.held_tokens, 0
        if store is not None:
            store.poll()

        def freed() -> int:
            return evicted + held - self._saves.held_tokens

        def enough() -> bool:
            nonlocal evicted
            if (missing := params.num_tokens - freed()) > 0:
                own = super(ImpressRadixCache, self).evict(EvictParams(num_tokens=missing))
                evicted += own.num_tokens_evicted
            return freed() >= params.num_tokens

        if not enough() and store is not None and store.writes:
            store.writes.abandon(enough, self._saves.which_free())
            enough()
        return EvictResult(num_tokens_evicted=freed())

    def _delete_leaf(self, node: Any) -> None:
        super()._delete_leaf(node)
        self.awaited.move_up(node)

    def flush_pending_backups(self) -> None:
        """SGLang's call after each batch: poll the store, read ahead, tell the metrics."""
        served = self.runtime.served
        served.poll()
        if served.opened is not None:
            served.opened.ahead.top_up()
        self.runtime.tell_metrics()
        self.retries.poll()

    def evictable_size(self) -> int:
        """Tokens that `evict` can free: SGLang's, and those that only writes hold."""
        own = self._saves.held_tokens + self._saves.locked_tokens()
        return int(super().evictable_size()) + own

    def protected_size(self) -> int:
        """Tokens that cannot be evicted: SGLang's, and those in private slots."""
        own = self._private_tokens - self._saves.locked_tokens()
        return int(super().protected_size()) + own

    def _last_node(self, key: RadixKey) -> tuple[Any, int]:
        match = super().match_prefix(MatchPrefixParams(key=key))
        return match.last_device_node, match.device_prefix_len

    def _free_leaf(self, node: Any) -> int:
        self.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        self._delete_leaf(node)
        self.kv_events.record_remove(node)
        return len(node.value)

    def _describe_pool(self) -> dict[str, int]:
        """How many tokens of the pool are ours, by what they are for."""
        return {
            "tokens": self.token_to_kv_pool_allocator.size,
            "private_tokens": self._private_tokens,
            "held_tokens": self._saves.held_tokens,
            "writing_tokens": self._saves.writing_tokens,
        }

    def check_integrity(self) -> None:
        """Compare our counters with the live requests, and check the whole store.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        self._check_requests()
        if self.runtime.served.opened is not None:
            self.runtime.store.check_integrity()

    def _check_requests(self) -> None:
        """Check counters; the time grows with requests, not with what is stored."""
        live = self.runtime.live.values()
        assert self._private_tokens == sum(request.k for request in live if not request.adopted)
        self.awaited.check_integrity(self.page_size)
        assert self._saves.held_tokens <= self._saves.writing_tokens

    def _set_aside(self) -> None:
        """Prepare for new weights or a new pool: end passes, give up writes, forget plans."""
        torch.get_device_module(self.device).synchronize()
        self._saves.revoke()
        store = self.runtime.served.opened
        if store is not None:
            store.writes.abandon()
        self._known.drop_plans()

    def _is_empty(self) -> bool:
        """Whether no KV is left in the pool."""
        allocator = self.token_to_kv_pool_allocator
        return bool(allocator.available_size() == allocator.size)

    def _plan(
        self, key: RadixKey, resident_len: int, known: KnownRequest
    ) -> tuple[StoredMatch, AdmissionPlan | None]:
        """Match a request with the store, and plan how it would use what was found."""
        admission = self.runtime.admission
        # The tokens are copied only if the prompt may be found.
        if known.declined or known.failed or not admission.looks_for(len(key)):
            return StoredMatch(), None
        tokens = as_tokens(key.raw_token_ids())
        wanted = self.passes.wanted_by(known.req)
        match = admission.find(namespace_of(key), tokens, wanted)
        return match, admission.plan(match, tokens, resident_len, wanted)

    def _accept(
        self, plan: AdmissionPlan | None, req: Any, resident: MatchResult, *, measure: bool = True
    ) -> AdmissionPlan | None:
        """Return the plan, or None if computing its tokens is faster.

        Also notes what the request waits for. `measure`: see `Admission.accept`.
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
        """Allocate slots, int64, evicting if need be; None without room."""
        allocator = self.token_to_kv_pool_allocator
        missing = num_tokens - allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        slots: Tensor | None = allocator.alloc(num_tokens)
        return None if slots is None else slots.to(torch.int64)

    def _begin_again(self, req: Any) -> None:
        """Let a request whose loading failed begin again without a stored prefix.

        If it is not finished, SGLang has put it back by itself. One that was aborted stays
        ended.
        """
        reason, req.discard_output_reason = req.discard_output_reason, None
        if req.finished() and req.finished_reason is not reason:
            return
        self._known.note(req).failed = True
        if req.finished():
            self.retries.add(req)

    def _adopt(self, req: Any, request: StoredRequest) -> None:
        """Hand the slots of a whole, exact prefix to SGLang's tree, like computed ones."""
        req.kv.cache_protected_len = request.resident_len
        self._private_tokens -= request.k
        request.adopted = True

    def _end_waiting(self, rid: str) -> None:
        """Note that a request was admitted or is gone, and no longer waits."""
        self.awaited.forget(rid)
        self.runtime.end_waiting(rid)

    def _forget(self, rid: str) -> None:
        self._end_waiting(rid)
        self._known.forget(rid)
        self._saves.forget(rid)
