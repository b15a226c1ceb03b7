"""The tree cache: SGLang's own, into which load jobs bring what is stored before a request runs.

SGLang owns slots, tree and passes. Its seams for stores, which `enable_lmcache` of the scheduler
switches on, are all that is used of it:

    _prefetch_kvcache            -> match_prefix, prefetch_from_storage: plan, begin or join a job
    get_new_batch_prefill        -> check_prefetch_progress: hold a request back; others pass
                                 -> pop_prefetch_loaded_span: what is reported as from storage
    PrefillAdder                 -> finish_storage_prefetch_admission: a request is admitted
    _process_hicache_events      -> check_hicache_events: once per pass
    is_fully_idle                -> has_pending_cache_operations: no flush while slots are filled
    _release_aborted_request     -> release_aborted_request

What a request accepts is part of its key (`serving.kv_class`), so that within a class what was
loaded and what was computed behind it are shared, evicted, locked and reported as SGLang always
does. Only the scheduler's thread calls this class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from impress_sglang.plugin.known import Brought, Known, KnownRequests
from impress_sglang.plugin.pools import Allocation, PoolLayers
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.provenance import Provenance
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.tree_nodes import Sweeps, free_leaf, is_locked, last_node
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.plugin.write_back import WriteBack
from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.service import Service


class ImpressTreeCache(UnifiedRadixCache):
    """SGLang's `UnifiedRadixCache`; what left it is brought back from the store by load jobs.

    It is SGLang's own until it is connected to a store and a scheduler is attached.
    """

    impress: ServedCache
    """What hooks, routes and orders need; there from `connect` on."""
    loads: PrefixLoads
    """The load jobs; there from `attach` on."""

    def __init__(self, params: CacheInitParams) -> None:
        self._serves = False
        # Empty as long as it does not serve.
        self._known = dict[str, Known]()
        self._released: list[Known] = []
        super().__init__(params)

    def connect(
        self,
        service: Service,
        model: Any,
        layers: PoolLayers,
        forward_stream: Any,
        read_identity: Callable[[], str],
        ranks: Ranks = ALONE,
        adapters: Any = None,
    ) -> None:
        """Connect the cache to the store of `service`, and what goes with it.

        Queries of the `model` are sampled; passes run on the `forward_stream`. `read_identity` is
        called again after each flush. `adapters`: SGLang's `LoRAManager`, if it has one.
        """
        self._service, keys = service, layers(0)[0]
        packed, states = layers.packed, layers.states is not None
        self._planner = LoadPlanner(service, self.page_size, layers.beyond, packed, states=states)
        window = packed.window if packed is not None else 0
        self._allocation = Allocation(self, window, states=states)
        self._provenance = Provenance(len(keys), keys.device)
        self._requests = KnownRequests(
            *(self, service, self._planner, self._provenance, layers, forward_stream),
            *(self._allocation, ranks, adapters, self._known),
        )
        service.live, service.describe_pool = self._known, self._describe_pool
        self._saves = saves = WriteBack(self._requests, model)
        # What is locked is not freed, and a rank does not know which of all writes are purged.
        let_go = None if ranks.alone else saves.give_all_up
        is_empty = self._allocation.is_empty
        self.impress = ServedCache(
            self._requests,
            WeightWatch(service.served, read_identity, self._set_aside, is_empty, ranks),
            Sweeps(self, partial(last_node, self), is_locked, partial(free_leaf, self), let_go),
            saves.sights,
            self._check_requests,
        )

    def attach(self, scheduler: Any) -> None:
        """Begin to serve, for a scheduler that is complete."""
        self.loads = self.impress.loads = PrefixLoads(self._requests, scheduler)
        # SGLang's seams for caches that load while requests queue.
        self._serves = scheduler.enable_lmcache = True

    # A request's way: match, plan, wait, be admitted, end.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """SGLang's, in the class of the request."""
        req = params.req
        if req is None or not self._serves or self.disable:
            return super().match_prefix(params)
        known = self._requests.note(req, self._saves.sight)
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
        if not known.admitted:
            self._requests.tell_resident(known, result.device_prefix_len)
        return result

    def is_backuped(self, node_id: Any) -> bool:
        """Whether SGLang asks for what is stored behind a node: always."""
        return self._serves or bool(super().is_backuped(node_id))

    def prefetch_from_storage(
        self, handle: CacheRequestHandle, *arguments: Any, **keywords: Any
    ) -> bool:
        """A request is queued: plan what is to be loaded for it."""
        known = self._known.get(handle.rid)
        if known is not None:
            self.loads.plan(known)
            self.loads.look_again(known.req)
        return False

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether a request may be admitted now; others pass it if not."""
        known = self._known.get(request.rid)
        return known is None or self.loads.may_run(known)

    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]:
        """How many tokens were brought for a request, and where they begin."""
        known = self._known.get(request.rid)
        if known is None or not known.brought.loaded:
            return 0, None
        return known.brought.loaded, known.brought.stop - known.brought.loaded

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """A request is admitted, and has locked what it uses."""
        known = self._known.get(request.rid)
        if known is not None and not known.admitted:
            known.admitted = True
            self._requests.explain(known)
            self._saves.expect(known)
            self.loads.end_waiting(known)

    def discard_storage_prefetch_accounting(self, request: CacheRequestHandle) -> None:
        """SGLang's counts of its own storage, which is not ours."""

    def waiting_storage_span(self, request: CacheRequestHandle) -> tuple[int, int] | None:
        """What is being brought for a waiting request."""
        known = self._known.get(request.rid)
        job = None if known is None else known.waiter.job
        return None if job is None else (job.start, job.stop)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """SGLang's, which inserts what was computed; then offer what is new to the store."""
        known = self._known.get(req.rid)
        if known is None or self.disable:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        self.loads.end_pass(known)
        before, row = req.kv.cache_protected_len, None
        if self._provenance.mixed and not known.kv_class.exact and req.session is None:
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, before:up_to].clone()
        super().checkpoint(req, up_to=up_to, **kwargs)
        if row is not None:
            path = self.path_device_indices(req.last_node)
            fresh = path[before:]
            # Tokens that others had inserted before keep their slots, and what these rest on.
            fresh = fresh[fresh == row[: len(fresh)].to(fresh.dtype)]
            self._provenance.note_computed(path[:before].long(), fresh.long())
        self._saves.offer(known, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """A request gives its row back: it is over, or SGLang put it back into the queue."""
        super().on_release(req, checkpointed=checkpointed)
        known = self._known.get(req.rid)
        if known is None:
            return
        self.loads.end_pass(known)
        self.loads.end_waiting(known)
        if req.finished():
            self._forget(known)
            return
        known.admitted = known.planned = False
        known.brought = Brought()
        if req.to_finish is not None:
            self._released.append(known)

    def _forget_ended(self) -> None:
        """Forget requests that SGLang has ended without saying so.

        It does so with a beam group, or the last request of a batch, that it cannot put back into
        the queue; others of these are in the queue, where they end.
        """
        released, self._released = self._released, []
        for known in released:
            if not self.loads.is_queued(known.req):
                self._forget(known)

    def _forget(self, known: Known) -> None:
        self._saves.end(known)
        self._requests.count(known)
        self._known.pop(known.req.rid, None)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Forget a request that ended without having been admitted."""
        super().release_aborted_request(request)
        known = self._known.get(request.rid)
        if known is not None and not known.admitted:
            self.loads.end_waiting(known)
            del self._known[request.rid]

    # Once per pass.

    def check_hicache_events(self) -> None:
        """Take in what other threads have done, and give slots to jobs."""
        if self._serves:
            self._service.served.poll()
            if self._released:
                self._forget_ended()
            self._saves.release(self.loads.agree)
            self.loads.poll()
            self._service.tell_metrics()

    def flush_pending_backups(self) -> None:
        """SGLang's call after each batch; writes need none."""

    def has_pending_cache_operations(self) -> bool:
        """Whether slots are being filled: SGLang neither flushes nor checks for leaks meanwhile."""
        return self._serves and self.loads.jobs.filling

    # Room.

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang's eviction; writes are given up if nothing else is left."""
        return self._evicting(params, super().evict(params), jobs=False)

    def evict_for_alloc(self, params: EvictParams, **keywords: Any) -> EvictResult:
        """The same, for what SGLang must allocate: then jobs give up their slots as well."""
        return self._evicting(params, super().evict_for_alloc(params, **keywords), jobs=True)

    def _evicting(self, params: EvictParams, result: EvictResult, *, jobs: bool) -> EvictResult:
        slots = params.num_tokens - result.num_tokens_evicted
        rows = params.swa_num_tokens - result.swa_num_tokens_evicted
        rows += params.mamba_num - result.mamba_num_evicted
        if max(slots, rows) <= 0 or not self._serves:
            return result
        left = max(slots, 0), max(rows, 0)
        core, free = self.tree_core, self._allocation.available
        target = [own + now for own, now in zip(left, free(), strict=True)]
        evictable = core.evictable_size, core.swa_evictable_size, core.mamba_evictable_size

        def lacking() -> list[int]:
            return [max(own - now, 0) for own, now in zip(target, free(), strict=True)]

        def missing() -> int:
            if any(lacking()) and any(size() for size in evictable):
                super(ImpressTreeCache, self).evict(self._allocation.room(*lacking()))
            return max(lacking())

        self._saves.give_up(missing)
        if jobs and missing() > 0:
            self.loads.jobs.make_room(missing)
        missing()
        slots, rows = lacking()
        result.num_tokens_evicted += left[0] - slots
        result.swa_num_tokens_evicted += (left[1] - rows) * (not params.mamba_num)
        result.mamba_num_evicted += (left[1] - rows) * bool(params.mamba_num)
        return result

    def evictable_size(self) -> int:
        """Tokens that `evict` can free: SGLang's, and those that only writes have locked."""
        return int(super().evictable_size()) + self._locked_for_writes()

    def protected_size(self) -> int:
        """Tokens that cannot be evicted: SGLang's, and the slots of jobs."""
        return int(super().protected_size()) + self._loading() - self._locked_for_writes()

    # Its tree counts the tokens of all layers, and those of layers without windows, as one.
    full_evictable_size, full_protected_size = evictable_size, protected_size

    def swa_evictable_size(self) -> int:
        """See `evictable_size`; rows of layers with windows."""
        return int(super().swa_evictable_size()) + self._locked_for_writes(rows=True)

    def swa_protected_size(self) -> int:
        """See `protected_size`; rows of layers with windows."""
        return int(super().swa_protected_size()) + self._loading_rows()

    def mamba_evictable_size(self) -> int:
        """See `evictable_size`; states."""
        return int(super().mamba_evictable_size()) + self._locked_for_writes(rows=True)

    def mamba_protected_size(self) -> int:
        """See `protected_size`; states."""
        return int(super().mamba_protected_size()) + self._loading_rows()

    def _loading(self) -> int:
        return sum(map(len, self.loads.jobs.loading)) if self._serves else 0

    def _loading_rows(self) -> int:
        jobs = self.loads.jobs.loading if self._serves else ()
        loading = sum(len(job.rows) for job in jobs if job.rows is not None)
        return loading - self._locked_for_writes(rows=True)

    def _locked_for_writes(self, *, rows: bool = False) -> int:
        if not self._serves:
            return 0
        locked = self._allocation.protected_rows if rows else self.tree_core.protected_size
        return self._saves.locked_tokens(locked)

    # The whole cache.

    def reset(self) -> None:
        """SGLang's flush, which it does when idle: drops what is resident, keeps what is stored."""
        if not self._serves:
            super().reset()
            return
        assert not self.has_pending_cache_operations(), "SGLang flushes while slots are filled"
        self._forget_ended()
        self._saves.finish()
        self.loads.drop_all()
        self._provenance.clear()
        self.impress.clear()
        super().reset()
        self.impress.weights.flushed()

    def release_host_resources(self) -> None:
        """Shut down gracefully: finish writes, and save what the next start should know."""
        super().release_host_resources()
        if self._serves:
            self._serves, self._known = False, {}
            self.loads.close()
            self._service.close()

    def _set_aside(self) -> None:
        """Prepare for new weights or a new pool: end jobs and writes, forget plans."""
        self.loads.drop_all()
        self.loads.wait_for_loader()
        self._saves.abandon()

    def _describe_pool(self) -> dict[str, int]:
        """How many tokens of the pool are ours, by what they are for."""
        return {
            "tokens": self.token_to_kv_pool_allocator.size_full,
            "loading_tokens": self._loading(),
            "writing_tokens": self._saves.writing_tokens,
        }

    def _check_requests(self) -> None:
        """Check our counters; the time grows with requests and jobs, not with what is stored."""
        if self._serves:
            self.loads.check()
