"""The tree cache: SGLang's radix cache for resident prefixes, our store for those that left it.

A request whose stored prefix is longer than its resident one is admitted with the stored one
(docs/design.md). Only the scheduler's thread calls this class.

The k slots that belong to one live request alone are counted as protected, so that SGLang's own
accounting (available + evictable + protected + uncached == total) holds at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from impress_sglang.cost import RequestLengths
from impress_sglang.paper.runtime import ServingRuntime, StoredRequest, tokens_used
from impress_sglang.plugin.known import Known, KnownRequests, as_tokens
from impress_sglang.plugin.pools import Allocation, PoolLayers
from impress_sglang.plugin.provenance import Provenance
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.tree_nodes import Sweeps
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.plugin.write_back import WriteBack
from impress_sglang.serving.load_planner import LoadPlan, LoadPlanner
from impress_sglang.serving.report import estimate_fields
from impress_sglang.serving.why import Reason, say
from impress_sglang.storage.quality import EXACT


class ImpressRadixCache(RadixCache):
    """SGLang's `RadixCache`, extended to find evicted prefixes again on SSD."""

    def __init__(
        self,
        params: CacheInitParams,
        runtime: ServingRuntime,
        model: Any,
        layers: PoolLayers,
        forward_stream: Any,
        read_identity: Callable[[], str],
        adapters: Any = None,
    ) -> None:
        """See `ImpressTreeCache.connect`."""
        self.runtime = runtime
        """The runtime, which the attention backend uses as well."""
        self.impress: ServedCache | None = None
        """What hooks, routes and orders use."""
        super().__init__(params)
        self._planner = planner = LoadPlanner(runtime, params.page_size)
        # What is loaded never gets into SGLang's tree, unless it is exact.
        provenance = Provenance(0, torch.device("cpu"))
        self._requests = KnownRequests(
            *(self, runtime, planner, provenance, layers, forward_stream, Allocation(self, 0)),
            adapters=adapters,
        )
        self._known = self._requests.known
        self._saves = saves = WriteBack(self._requests, model)
        self._plans: dict[str, LoadPlan] = {}
        self._private_tokens = 0
        self.impress = ServedCache(
            self._requests,
            WeightWatch(runtime.served, read_identity, self._set_aside, self._is_empty),
            Sweeps(self, self._last_node, lambda node: bool(node.lock_ref), self._free_leaf),
            saves.sights,
            self._check_requests,
            runtime.reorder,
        )
        runtime.describe_pool = self._describe_pool

    def reset(self) -> None:
        """SGLang's flush, which it does when idle: drops what is resident, keeps what is stored."""
        if self.impress is None:
            super().reset()
            return
        self._saves.finish()
        assert not self.runtime.live and not self._private_tokens
        self._plans.clear()
        self.impress.clear()
        super().reset()
        self.impress.weights.flushed()

    # A request's way: match, be admitted, run, end.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match the resident prefix, extended by a stored one where that is longer."""
        resident, req = super().match_prefix(params), params.req
        if req is None or self.disable or self.impress is None:
            return resident
        known, start = self._requests.note(req, self._saves.sight), resident.device_prefix_len
        self._requests.tell_resident(known, start)
        self._plans.pop(req.rid, None)
        refused = known.declined or known.report["not_served"] is not None
        # The tokens are copied only if the prompt may be found.
        if refused or not self._planner.looks_for(len(params.key)):
            return resident
        tokens = as_tokens(params.key.raw_token_ids())
        match = self._planner.match(known.namespace, tokens, EXACT)
        plan = self.runtime.plan(match, start, len(tokens) + 1, known.wanted)
        if plan is None:
            return resident
        known.report.update(estimate_fields(plan.estimate, loads=plan.loads))
        if not plan.loads:
            return resident
        self._plans[req.rid], k = plan, tokens_used(plan)
        return resident._replace(device_prefix_len=plan.stop - k, host_hit_length=k)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """Admit a request with its stored prefix: take its slots and open its source.

        None sends the request back to the queue. It is then matched again, without a stored prefix.
        """
        req = params.req
        assert req is not None
        known, plan = self._known[req.rid], self._plans.pop(req.rid)
        resident_slots = self.path_device_indices(req.last_node)[: plan.start]
        request = self.runtime.open(req.rid, plan, resident_slots, known.report, self._allocate)
        if request is None:
            known.declined = True
            return None
        assert request.k == params.host_hit_length
        self._private_tokens += request.k
        req.storage_hit_start, req.storage_hit_length = plan.start, request.num_tokens
        return request.k, req.last_node

    def finish_storage_prefetch_admission(
        self, handle: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """A request is admitted, and has locked what it uses."""
        known, request = self._known.get(handle.rid), self.runtime.live.get(handle.rid)
        if known is not None and not known.admitted:
            known.admitted = True
            self._requests.explain(known)
            known.report["approximate"] = request is not None and request.start > 0

    def prefix_device_indices(self, req: Any) -> Tensor:
        """The row of a request's prefix: zeros, resident slots, slots of the stored prefix."""
        request = self.runtime.live.get(req.rid)
        if request is None:
            return super().prefix_device_indices(req)
        zeros = request.slots.new_zeros(request.start)
        return torch.cat([zeros, request.resident_slots, request.slots])

    def fail(self, rid: str) -> None:
        """Let SGLang end a request whose prefix cannot be loaded, and drop what its pass computes.

        SGLang does the same where an external cache could not load.
        """
        known = self._known[rid]
        known.report["why"], known.disturbed = say(Reason.DAMAGED), True
        known.req.discard_output_reason = FINISH_ABORT("its prefix cannot be loaded; ask again")

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert what is exact into SGLang's tree, and offer what is new to the store."""
        request = self.runtime.live.get(req.rid)
        if request is not None:
            assert request.layers_loaded == self.runtime.shape.num_layers
            if request.failed or request.start:
                return
            self._adopt(req, request)
        super().checkpoint(req, up_to=up_to, **kwargs)
        known = self._known.get(req.rid)
        if known is not None:
            self._saves.offer(known, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """A request gives its row back: it is over, or SGLang put it back into the queue."""
        super().on_release(req, checkpointed=checkpointed)
        request = self.runtime.release(req.rid)
        if request is not None and not request.adopted:
            self._private_tokens -= request.k
            self.token_to_kv_pool_allocator.free(request.slots)
        known = self._known.get(req.rid)
        if known is None:
            return
        known.admitted = False
        if req.finished() or req.to_finish is not None:
            self._saves.end(known)
            self._learn(known)
            del self._known[req.rid]

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """Forget a request that ended without having been admitted."""
        super().release_aborted_request(handle)
        if handle.rid not in self.runtime.live:
            self._plans.pop(handle.rid, None)
            self._known.pop(handle.rid, None)

    def release_host_resources(self) -> None:
        """Shut down gracefully: finish writes, and save what the next start should know."""
        super().release_host_resources()
        self.runtime.close()

    def flush_pending_backups(self) -> None:
        """SGLang's call after each batch: poll the store, read ahead, tell the metrics."""
        served = self.runtime.served
        served.poll()
        if served.opened is not None:
            served.opened.ahead.top_up()
        self.runtime.tell_metrics()

    # Room.

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang's eviction; writes are given up if nothing else is left."""
        allocator, store = self.token_to_kv_pool_allocator, self.runtime.served.opened
        if store is not None:
            store.poll()
        result = super().evict(params)
        left = params.num_tokens - result.num_tokens_evicted
        if left <= 0 or self.impress is None:
            return result
        target = allocator.available_size() + left

        def missing() -> int:
            lacking = target - allocator.available_size()
            if lacking > 0:
                super(ImpressRadixCache, self).evict(EvictParams(num_tokens=lacking))
            return int(target - allocator.available_size())

        self._saves.give_up(missing)
        result.num_tokens_evicted += left - max(missing(), 0)
        return result

    def evictable_size(self) -> int:
        """Tokens that `evict` can free: SGLang's, and those that only writes have locked."""
        return int(super().evictable_size()) + self._saves.locked_tokens(self.locked_size)

    def protected_size(self) -> int:
        """Tokens that cannot be evicted: SGLang's, and those in private slots."""
        own = self._private_tokens - self._saves.locked_tokens(self.locked_size)
        return self.locked_size() + own

    def locked_size(self) -> int:
        """Tokens that requests or writes have locked in SGLang's tree."""
        return int(super().protected_size())

    def _allocate(self, num_tokens: int) -> Tensor | None:
        """Allocate slots, int64, evicting if need be; None without room."""
        allocator = self.token_to_kv_pool_allocator
        missing = num_tokens - allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        slots: Tensor | None = allocator.alloc(num_tokens)
        return None if slots is None else slots.to(torch.int64)

    def _adopt(self, req: Any, request: StoredRequest) -> None:
        """Hand the slots of a whole, exact prefix to SGLang's tree, like computed ones."""
        if not request.adopted:
            req.kv.cache_protected_len = len(request.resident_slots)
            self._private_tokens -= request.k
            request.adopted = True

    def _learn(self, known: Known) -> None:
        """Count a request that has ended, and learn what it took."""
        report, times = known.report, known.req.time_stats
        prefill = max(times.prefill_finished_time - times.forward_entry_time, 0.0)
        known.gated = min((report["load_ms"] + report["probe_ms"]) / 1e3, prefill)
        self._requests.count(known)
        new = len(known.req.origin_input_ids) - report["prefix_tokens"]
        loaded = report["loaded_tokens"]
        odd = known.disturbed or known.req.retraction_count
        if loaded and new > 0 and prefill > known.gated and not odd:
            work = RequestLengths(report["resident_tokens"], report["stored_tokens"], new)
            took = known.gated - report["wait_ms"] / 1e3
            self.runtime.estimator.note_load(work, took, whole=loaded == work.stored)

    # The whole cache.

    def _describe_pool(self) -> dict[str, int]:
        """How many tokens of the pool are ours, by what they are for."""
        return {
            "tokens": self.token_to_kv_pool_allocator.size,
            "private_tokens": self._private_tokens,
            "writing_tokens": self._saves.writing_tokens,
        }

    def _check_requests(self) -> None:
        """Check counters; the time grows with requests, not with what is stored."""
        live = self.runtime.live.values()
        assert self._private_tokens == sum(request.k for request in live if not request.adopted)

    def _set_aside(self) -> None:
        """Prepare for new weights or a new pool: end passes, give up writes, forget plans."""
        torch.get_device_module(self.device).synchronize()
        self._saves.abandon()
        self._plans.clear()

    def _is_empty(self) -> bool:
        """Whether no KV is left in the pool."""
        allocator = self.token_to_kv_pool_allocator
        return bool(allocator.available_size() == allocator.size)

    def _last_node(self, key: RadixKey) -> tuple[Any, int]:
        match = super().match_prefix(MatchPrefixParams(key=key))
        return match.last_device_node, match.device_prefix_len

    def _free_leaf(self, node: Any) -> int:
        self.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        self._delete_leaf(node)
        self.kv_events.record_remove(node)
        return len(node.value)
