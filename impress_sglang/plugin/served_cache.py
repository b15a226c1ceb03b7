"""SGLang's tree cache with a store: what both ways of loading have in common.

A request's way is matched, admitted, computed and offered to the store here. How stored KVs get
into slots is a subclass's: `plugin.tree_cache` loads before a request runs, `paper.plugin` within
its passes. The hooks, routes and admin requests use this class. Only the scheduler's thread does.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
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
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.tree_nodes import Sweeps
from impress_sglang.plugin.weights import WeightWatch, watch_messages
from impress_sglang.plugin.write_back import WriteBack
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.report import new_report
from impress_sglang.serving.service import Service
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions

logger = logging.getLogger(__name__)

UNCHECKED, RUNNING, OK, FAILED = "unchecked", "running", "ok", "failed"
# Seconds after which a step of a check looks at nothing further.
STEP_S = 0.001


class ServedCache(UnifiedRadixCache):
    """SGLang's `UnifiedRadixCache` with a store; SGLang's own until it serves."""

    loads: PrefixLoads | None = None
    """The load jobs; None where prefixes are loaded within passes, and before it serves."""

    _serves = False

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

        Queries of the `model` are sampled; passes run on the `forward_stream`. `read_identity` is
        called again after each flush. `adapters`: SGLang's `LoRAManager`, if it has one.
        """
        super().__init__(params)
        self._requests = own = KnownRequests(
            *(self, service, layers, forward_stream, ranks, adapters)
        )
        self.service, self.ranks, self.planner = service, ranks, own.planner
        self._known, self._provenance, self._allocation = own.known, own.provenance, own.allocation
        self._released: list[Known] = []
        service.describe_pool = self._describe_pool
        self._saves = saves = WriteBack(own, model)
        self.sights = saves.sights
        self.weights = WeightWatch(
            *(service, read_identity, self._set_aside, own.allocation.is_empty, ranks)
        )
        # What is locked is not freed, and a rank does not know which of all writes are purged.
        self.sweeps = Sweeps(self, None if ranks.alone else saves.give_all_up)
        self.integrity = UNCHECKED
        """The result of the last check, or that one is running."""
        self._steps: Iterator[None] = iter(())

    def attach(self, scheduler: Any) -> None:
        """Begin to serve, for a scheduler that is complete."""
        self._scheduler, self._serves = scheduler, True

    # A request's way: match, be admitted, be computed, end.

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

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """A request is admitted, and has locked what it uses."""
        known = self._known.get(request.rid)
        if known is not None and not known.admitted:
            known.admitted = True
            self._requests.explain(known)
            self._saves.expect(known)
            self._note_admitted(known)

    def _note_admitted(self, known: Known) -> None:
        """A request is admitted."""

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """SGLang's, which inserts what was computed; then offer what is new to the store."""
        known = self._known.get(req.rid)
        if known is None or self.disable:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
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
        if req.finished():
            self._forget(known)
            return
        known.admitted = known.planned = False
        known.brought = Brought()
        if req.to_finish is not None:
            self._released.append(known)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Forget a request that ended without having been admitted."""
        super().release_aborted_request(request)
        known = self._known.get(request.rid)
        if known is not None and not known.admitted:
            del self._known[request.rid]

    def _forget_ended(self) -> None:
        """Forget requests that SGLang has ended without saying so.

        It does so with a beam group, or the last request of a batch, that it cannot put back into
        the queue; others of these are in the queue, where they end.
        """
        released, self._released = self._released, []
        for known in released:
            if not any(own is known.req for own in self._scheduler.waiting_queue):
                self._forget(known)

    def _forget(self, known: Known) -> None:
        self._saves.end(known)
        self._requests.count(known)
        # Another request may have its name by now.
        if self._known.get(known.req.rid) is known:
            del self._known[known.req.rid]

    # Room.

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang's eviction; writes are given up if nothing else is left."""
        return self._evicting(params, super().evict(params))

    def evict_for_alloc(self, params: EvictParams, **keywords: Any) -> EvictResult:
        """The same, for what SGLang must allocate: then loads give up their slots as well."""
        result = super().evict_for_alloc(params, **keywords)
        return self._evicting(params, result, self._give_up_loads)

    def _give_up_loads(self, missing: Callable[[], int]) -> None:
        """Free slots outside of SGLang's tree, until nothing is `missing`, if that may be."""

    def _evicting(
        self,
        params: EvictParams,
        result: EvictResult,
        give_up_loads: Callable[[Callable[[], int]], None] = lambda missing: None,
    ) -> EvictResult:
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
                super(ServedCache, self).evict(self._allocation.room(*lacking()))
            return max(lacking())

        self._saves.give_up(missing)
        give_up_loads(missing)
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
        """Tokens that cannot be evicted: SGLang's, and slots outside of its tree."""
        return int(super().protected_size()) + self._private()[0] - self._locked_for_writes()

    # Its tree counts the tokens of all layers, and those of layers without windows, as one.
    full_evictable_size, full_protected_size = evictable_size, protected_size

    def swa_evictable_size(self) -> int:
        """See `evictable_size`; rows of layers with windows."""
        return int(super().swa_evictable_size()) + self._locked_for_writes(rows=True)

    def swa_protected_size(self) -> int:
        """See `protected_size`; rows of layers with windows."""
        return int(super().swa_protected_size()) + self._private_rows()

    def mamba_evictable_size(self) -> int:
        """See `evictable_size`; states."""
        return int(super().mamba_evictable_size()) + self._locked_for_writes(rows=True)

    def mamba_protected_size(self) -> int:
        """See `protected_size`; states."""
        return int(super().mamba_protected_size()) + self._private_rows()

    def _private(self) -> tuple[int, int]:
        """How many slots, and rows, are ours and not in SGLang's tree."""
        return 0, 0

    def _private_rows(self) -> int:
        return self._private()[1] - self._locked_for_writes(rows=True)

    def _locked_for_writes(self, *, rows: bool = False) -> int:
        if not self._serves:
            return 0
        locked = self._allocation.protected_rows if rows else self.tree_core.protected_size
        return self._saves.locked_tokens(locked)

    def _describe_pool(self) -> dict[str, int]:
        """How many tokens of the pool are ours, by what they are for."""
        return {
            "tokens": self.token_to_kv_pool_allocator.size_full,
            "writing_tokens": self._saves.writing_tokens,
        }

    # The whole cache.

    def reset(self) -> None:
        """SGLang's flush, which it does when idle: drops what is resident, keeps what is stored."""
        if not self._serves:
            super().reset()
            return
        self._forget_ended()
        self._saves.finish()
        self._drop_plans()
        self._provenance.clear()
        self.sweeps.clear()
        super().reset()
        self.weights.flushed()

    def _drop_plans(self) -> None:
        """Forget what is to be loaded."""

    def rest(self) -> None:
        """SGLang is idle: forget what it has ended, and tell the metrics."""
        self._forget_ended()
        self.service.tell_metrics(idle=True)

    def release_host_resources(self) -> None:
        """Shut down gracefully: finish writes, and save what the next start should know."""
        super().release_host_resources()
        if self._serves:
            self._serves = False
            self._known.clear()
            self.service.close()

    def _set_aside(self) -> None:
        """Prepare for new weights or a new pool: end loads and writes, forget plans."""
        self._drop_plans()
        self._saves.abandon()

    # What routes and admin requests ask for.

    def check(self, *, begin: bool) -> str:
        """Continue the integrity check for a moment, or `begin` one if none is running.

        Requests are served between two moments: there may be much to compare. Returns the worst
        state on any rank, which is running until it has ended on all.
        """
        if begin and self.integrity != RUNNING:
            self.integrity, self._steps = RUNNING, self._check_steps()
        if self.integrity == RUNNING:
            self._go_on()
        if self.ranks.alone:
            return self.integrity
        states = (FAILED, RUNNING, UNCHECKED, OK)
        worst = states[self.ranks.least([states.index(self.integrity)])[0]]
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
        # Another store may have taken its place meanwhile, and is checked as well.
        while service.opened is not store:
            store = service.opened
            for _ in () if store is None else store.check_steps():
                yield
                if service.opened is not store:
                    break

    def _check_requests(self) -> None:
        """Check our counters; the time grows with requests and jobs, not with what is stored."""

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        live = {"requests_live": len(self._known), "integrity": self.integrity}
        return self.service.summary() | live

    def foretell(self, namespace: str, tokens: Tokens, *, exactly: bool = False) -> dict[str, Any]:
        """What is stored of a prompt that is not being served, and why no more of it.

        `exactly`: of what was computed so.
        """
        service, sights = self.service, self.sights
        wanted = LoadOptions() if exactly else load_options_of(None, service.config)
        least = EXACT if exactly else service.least(wanted)
        stored = self.planner.match(namespace, tokens, least).num_tokens
        report = new_report(service.policy.name, stored, len(tokens))
        seen = None if sights is None else sights.note(namespace, tokens, count=False)
        why = self.planner.explain(report, namespace, tokens, wanted, seen, admitted=False)
        return {"tokens": len(tokens), "stored_tokens": stored, "why": why}


def served_cache_of(tree_cache: Any) -> ServedCache | None:
    """A tree cache of SGLang's that serves from our store; None if it is not ours."""
    return tree_cache if isinstance(tree_cache, ServedCache) else None


# Hooks of the scheduler.


def connect(scheduler: Any) -> None:
    """Connect the tree cache to its scheduler, which is complete."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.attach(scheduler)
        watch_messages(scheduler, cache.weights)
        if cache.ranks.batches > 1:
            scheduler.get_next_batch_to_run = functools.partial(
                around_next_batch, scheduler.get_next_batch_to_run, cache.ranks
            )


def around_next_batch(
    original: Callable[..., Any], ranks: Ranks, running_batch: Any, last_batch: Any
) -> Any:
    """Let no batch begin in a pipeline until all its stages have done what they do together."""
    from sglang.srt.managers.scheduler import NextBatchPlan

    if ranks.holds():
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(running_batch=running_batch, last_batch=last_batch)


def around_policy(
    original: Callable[..., None], policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any
) -> None:
    """Let SGLang order the waiting queue, then reorder its head and note the final order."""
    cache = served_cache_of(policy.tree_cache)
    order = None if cache is None or cache.loads is None else cache.loads.order
    original(policy, waiting_queue, *args, **kwargs)
    if order is not None:
        order.arrange(waiting_queue)
    if cache is not None and cache.service.lookahead.awaits:
        # What earlier requests use is evicted last.
        cache.service.lookahead.order([req.rid for req in waiting_queue])


def before_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Nothing else may happen for a long time."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.rest()


def after_cached_details(result: Any, streamer: Any, *_: Any, **__: Any) -> Any:
    """Where SGLang reports tokens from a storage, say that the storage is ours."""
    if "storage" in (result or ()) and served_cache_of(streamer.tree_cache) is not None:
        result["storage_backend"] = "impress"
    return result
