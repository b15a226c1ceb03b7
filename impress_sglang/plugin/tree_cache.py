"""SGLang's tree cache with a store: evicted prefixes are loaded before a request runs.

SGLang owns slots, tree and passes. Only its hooks for stores are used, which `enable_lmcache` of
the scheduler enables:

    _prefetch_kvcache            -> match_prefix, prefetch_from_storage: plan, begin or join a job
    get_new_batch_prefill        -> check_prefetch_progress: hold a request back; others pass
                                 -> pop_prefetch_loaded_span: tokens reported as from storage
    PrefillAdder                 -> finish_storage_prefetch_admission: a request is admitted
    _process_hicache_events      -> check_hicache_events: once per pass
    is_fully_idle                -> has_pending_cache_operations: no flush while slots are filled
    _release_aborted_request     -> release_aborted_request

The KVs that a request accepts are part of its key (`serving.kv_class`). So SGLang shares, evicts,
locks and reports loaded tokens, and tokens computed after them, within a class as it always does.
Thread: scheduler.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.prefix_saves import PrefixSaves
from impress_sglang.plugin.request_tracker import PrefixSources, RequestTracker, TrackedRequest
from impress_sglang.plugin.tree_nodes import Sweeps
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.service import Service

logger = logging.getLogger(__name__)

UNCHECKED, RUNNING, OK, FAILED = "unchecked", "running", "ok", "failed"
# Seconds after which a step of a check ends.
STEP_S = 0.001


class ImpressTreeCache(UnifiedRadixCache):
    """SGLang's `UnifiedRadixCache` with a store; plain SGLang until it is attached.

    Where prefixes are loaded within passes (`paper.plugin`), `loads` has no jobs.
    """

    loads: PrefixLoads
    loads_class: type[PrefixLoads] = PrefixLoads
    _serves = False
    # Slots, and rows, that only writes have locked; None if locks have changed since.
    _locked_by_writes: tuple[int, int] | None = None

    def __init__(
        self,
        params: CacheInitParams,
        service: Service,
        model: Any,
        layers: PoolLayers,
        forward_stream: Any,
        read_identity: Callable[[], str],
        ranks: Ranks = ALONE,
        adapters: Any = None,
    ) -> None:
        """Make a tree cache with the store of `service`.

        Queries of `model` are sampled; passes run on `forward_stream`. `read_identity` is called
        again after each flush. `adapters`: SGLang's `LoRAManager`, if it has one.
        """
        super().__init__(params)
        self._requests = requests = RequestTracker(
            *(self, service, layers, forward_stream, ranks, adapters)
        )
        self.service, self.ranks, self.planner = service, ranks, requests.planner
        self._tracked, self._provenance = requests.by_rid, requests.provenance
        self._allocation = requests.allocation
        self._released: list[TrackedRequest] = []
        service.describe_pool = self._describe_pool
        self._saves = saves = PrefixSaves(requests, model)
        self.frequency = saves.frequency
        self.weights = WeightWatch(
            *(service, read_identity, self._set_aside, requests.allocation.is_empty, ranks)
        )
        # Locked nodes are not freed, and ranks do not know which writes are purged.
        self.sweeps = Sweeps(self, None if ranks.alone else saves.give_all_up)
        self.integrity = UNCHECKED
        """Result of the last check, or `RUNNING`."""
        self._steps: Iterator[None] = iter(())

    def attach(self, scheduler: Any) -> None:
        """Start using the store, with a complete scheduler."""
        self._scheduler, self._serves = scheduler, True
        self.loads = self.loads_class(self._requests, scheduler)
        # Enables SGLang's hooks for caches that load while requests queue.
        scheduler.enable_lmcache = True

    # Steps of a request: match, plan, wait, admission, pass, end.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match as SGLang does, in the class of the request."""
        req = params.req
        if req is None or not self._serves:
            return super().match_prefix(params)
        tracked = self._requests.register(req, self._saves.count_prompt)
        key = params.key
        if key.extra_key != req.extra_key:
            # Its first match: SGLang made the key before the request had a class.
            key = RadixKey(
                key.token_ids,
                req.extra_key,
                is_bigram=key.is_bigram,
                limit=key.limit,
                cache_salt=key.cache_salt,
            )
            params = dataclasses.replace(params, key=key)
        result = super().match_prefix(params)
        if not tracked.admitted:
            self._requests.report_resident(tracked, result.device_prefix_len)
        return result

    def is_backuped(self, node_id: Any) -> bool:
        """Whether SGLang looks for stored tokens after a node: always."""
        return True

    def prefetch_from_storage(
        self, handle: CacheRequestHandle, *arguments: Any, **keywords: Any
    ) -> bool:
        """Plan the load of a request that was queued."""
        tracked = self._tracked.get(handle.rid)
        if tracked is not None:
            self.loads.plan(tracked)
        return False

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether a request may be admitted now; if not, others pass it."""
        tracked = self._tracked.get(request.rid)
        return tracked is None or self.loads.may_run(tracked)

    def waiting_storage_span(self, request: CacheRequestHandle) -> tuple[int, int] | None:
        """Return the token range that is being loaded for a waiting request."""
        tracked = self._tracked.get(request.rid)
        job = None if tracked is None else tracked.job
        return None if job is None else (job.start, job.stop)

    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]:
        """Return how many tokens were loaded for a request, and where they begin."""
        tracked = self._tracked.get(request.rid)
        if tracked is None or not tracked.sources.loaded:
            return 0, None
        return tracked.sources.loaded, tracked.sources.stop - tracked.sources.loaded

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """Stop the wait of a request that was admitted, and has locked its prefix."""
        tracked = self._tracked.get(request.rid)
        if tracked is not None and not tracked.admitted:
            tracked.admitted = True
            self._requests.explain(tracked)
            self._saves.expect(tracked)
            self.loads.end_waiting(tracked)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert what a pass computed, as SGLang does; then offer new tokens to the store."""
        tracked = self._tracked.get(req.rid)
        if tracked is None:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        self.loads.end_pass(tracked)
        before, row = req.kv.cache_protected_len, None
        if self._provenance.mixed and not tracked.kv_class.exact:
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, before:up_to].clone()
        super().checkpoint(req, up_to=up_to, **kwargs)
        if row is not None:
            path = self.path_device_indices(req.last_node)
            fresh = path[before:]
            # Tokens that other requests had inserted keep their slots and provenance.
            fresh = fresh[fresh == row[: len(fresh)].to(fresh.dtype)]
            self._provenance.mark_computed(path[:before].long(), fresh.long())
        self._saves.offer(tracked, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Handle a request that frees its row: it has ended, or SGLang retracted it."""
        super().on_release(req, checkpointed=checkpointed)
        tracked = self._tracked.get(req.rid)
        if tracked is None:
            return
        self.loads.end_pass(tracked)
        self.loads.end_waiting(tracked)
        if req.finished():
            self._forget(tracked)
            return
        tracked.admitted = tracked.planned = False
        tracked.sources = PrefixSources()
        if req.to_finish is not None:
            self._released.append(tracked)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Forget a request that ended before it was admitted."""
        super().release_aborted_request(request)
        tracked = self._tracked.get(request.rid)
        if tracked is not None and not tracked.admitted:
            del self._tracked[request.rid]
            self.loads.end_waiting(tracked)
            # It may have run before, until SGLang retracted it.
            self._saves.end(tracked)

    def _forget_ended(self) -> None:
        """Forget requests that SGLang ended without a call.

        This happens to a beam group, or the last request of a batch, that SGLang cannot retract.
        Other retracted requests are in the queue, and end there.
        """
        released, self._released = self._released, []
        for tracked in released:
            if not any(req is tracked.req for req in self._scheduler.waiting_queue):
                self._forget(tracked)

    def _forget(self, tracked: TrackedRequest) -> None:
        self._saves.end(tracked)
        self._requests.count(tracked)
        # Another request may have its id by now.
        if self._tracked.get(tracked.req.rid) is tracked:
            del self._tracked[tracked.req.rid]

    # Once per pass.

    def check_hicache_events(self) -> None:
        """Called once per pass: collect results of other threads, and give slots to jobs."""
        if self._serves:
            # SGLang may release locks of windows without `dec_lock_ref`.
            self._locked_by_writes = None
            self.service.poll()
            self._forget_ended()
            self.loads.poll(self._saves)
            self.service.publish_metrics()

    def on_idle(self) -> None:
        """While SGLang is idle: wait briefly for jobs, or export metrics if there are none."""
        if not self.loads.wait_briefly():
            self._forget_ended()
            self.service.publish_metrics(idle=True)

    def has_pending_cache_operations(self) -> bool:
        """Whether slots are being filled: SGLang then neither flushes nor checks for leaks."""
        return self._serves and self.loads.jobs.filling

    # Room.

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict as SGLang does, after giving up writes if too little is evictable."""
        if self._serves:
            self._saves.give_up(self._missing(params))
        return super().evict(params)

    def evict_for_alloc(self, params: EvictParams, **keywords: Any) -> EvictResult:
        """Evict for an allocation of SGLang's, for which loads give up their slots as well."""
        if self._serves:
            missing = self._missing(params)
            self._saves.give_up(missing)
            self.loads.jobs.make_room(missing)
        return super().evict_for_alloc(params, **keywords)

    def _missing(self, params: EvictParams) -> Callable[[], int]:
        """Return a function: tokens requested, minus those evictable and those freed since now."""
        core, before = self.tree_core, self._allocation.available()

        def missing() -> int:
            slots, rows = (
                now - then for now, then in zip(self._allocation.available(), before, strict=True)
            )
            slots += core.evictable_size()
            rows += core.swa_evictable_size() + core.mamba_evictable_size()
            return max(params.num_tokens - slots, params.swa_num_tokens + params.mamba_num - rows)

        return missing

    def evictable_size(self) -> int:
        """SGLang's evictable tokens, plus those that only writes have locked."""
        return int(super().evictable_size()) + self._locked_for_writes()

    def protected_size(self) -> int:
        """SGLang's protected tokens, plus slots outside its tree."""
        ours, _ = self._private()
        return int(super().protected_size()) + ours - self._locked_for_writes()

    # SGLang's tree counts tokens of all layers and of layers without windows alike.
    full_evictable_size, full_protected_size = evictable_size, protected_size

    def swa_evictable_size(self) -> int:
        return int(super().swa_evictable_size()) + self._locked_for_writes(rows=True)

    def swa_protected_size(self) -> int:
        return int(super().swa_protected_size()) + self._private_rows()

    def mamba_evictable_size(self) -> int:
        return int(super().mamba_evictable_size()) + self._locked_for_writes(rows=True)

    def mamba_protected_size(self) -> int:
        return int(super().mamba_protected_size()) + self._private_rows()

    def _private(self) -> tuple[int, int]:
        """Count the slots, and rows, of ours that are not in SGLang's tree."""
        slots = rows = 0
        for job in self.loads.jobs.loading if self._serves else ():
            slots += len(job)
            rows += 0 if job.aux_slots is None else len(job.aux_slots)
        return slots, rows

    def _private_rows(self) -> int:
        return self._private()[1] - self._locked_for_writes(rows=True)

    def _locked_for_writes(self, *, rows: bool = False) -> int:
        if not self._serves:
            return 0
        if self._locked_by_writes is None:
            self._locked_by_writes = self._saves.locked_tokens()
        return self._locked_by_writes[rows]

    # SGLang asks for sizes at each queued request, and saves may be many.

    def inc_lock_ref(self, *args: Any, **keywords: Any) -> IncLockRefResult:
        self._locked_by_writes = None
        return super().inc_lock_ref(*args, **keywords)

    def dec_lock_ref(self, *args: Any, **keywords: Any) -> DecLockRefResult:
        self._locked_by_writes = None
        return super().dec_lock_ref(*args, **keywords)

    def _describe_pool(self) -> dict[str, int]:
        """Count our tokens of the pool, by their use."""
        return {
            "tokens": self.token_to_kv_pool_allocator.size_full,
            "writing_tokens": self._saves.writing_tokens,
            "loading_tokens": sum(map(len, self.loads.jobs.loading)),
        }

    # The whole cache.

    def reset(self) -> None:
        """Flush as SGLang does when idle: drops resident tokens, keeps stored ones."""
        if not self._serves:
            super().reset()
            return
        assert not self.has_pending_cache_operations(), "SGLang flushes while slots are filled"
        self._forget_ended()
        self._saves.finish()
        self.loads.drop_all()
        self._provenance.clear()
        self.sweeps.clear()
        super().reset()
        self.weights.flushed()

    def release_host_resources(self) -> None:
        """Shut down gracefully: finish writes, and save state for the next start."""
        super().release_host_resources()
        if self._serves:
            # First, as nothing may read from a closed store.
            self.loads.close()
            self._serves = False
            self._tracked.clear()
            self.service.close()

    def _set_aside(self) -> None:
        """Prepare for new weights or a new pool: end loads and writes, forget plans."""
        self.loads.drop_all()
        self.loads.wait_for_loader()
        self._saves.abandon()

    # Routes and admin requests.

    def check(self, *, begin: bool) -> str:
        """Continue the integrity check for one step; `begin` starts one if none is running.

        Requests are served between steps. Returns the worst state of any rank, which is running
        until the check has ended on all.
        """
        if begin and self.integrity != RUNNING:
            self.integrity, self._steps = RUNNING, self._check_steps()
        if self.integrity == RUNNING:
            self._go_on()
        if self.ranks.alone:
            return self.integrity
        states = (FAILED, RUNNING, UNCHECKED, OK)
        worst = states[self.ranks.all_reduce_min([states.index(self.integrity)])[0]]
        if worst != RUNNING:
            self.integrity = worst
        return worst

    def _go_on(self) -> None:
        end = time.perf_counter() + STEP_S
        try:
            for _ in self._steps:
                if time.perf_counter() >= end:
                    return
        except Exception:
            logger.exception("the integrity check of IMPRESS failed")
            self.integrity = FAILED
        else:
            self.integrity = OK

    def _check_steps(self) -> Iterator[None]:
        self._check_requests()
        yield
        service, store = self.service, None
        # Another store may have replaced it meanwhile, and is checked as well.
        while service.opened is not store:
            store = service.opened
            for _ in () if store is None else store.check_steps():
                yield
                if service.opened is not store:
                    break

    def _check_requests(self) -> None:
        """Check our counters; the time grows with requests and jobs, not with the store."""
        if self._serves:
            self.loads.check()

    def summary(self) -> dict[str, Any]:
        """Return the content of `GET /impress/stats`."""
        live = {"requests_live": len(self._tracked), "integrity": self.integrity}
        return self.service.summary() | live
