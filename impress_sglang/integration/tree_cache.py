"""The tree cache: SGLang's own, into which load jobs bring what is stored before a request runs.

SGLang owns slots, tree and passes. Its seams for stores, which `enable_lmcache` of the scheduler
switches on, are all that is used of it:

    _prefetch_kvcache            -> match_prefix, prefetch_from_storage: plan, begin or join a job
    get_new_batch_prefill        -> check_prefetch_progress: hold a request back; others pass
                                 -> pop_prefetch_loaded_span: what is reported as from storage
    PrefillAdder                 -> finish_storage_prefetch_admission: a request is admitted
    _process_hicache_events      -> check_hicache_events: once per pass
    is_fully_idle                -> has_pending_cache_operations: no flush while jobs run
    _release_aborted_request     -> release_aborted_request

What a request accepts is part of its key (`serving.kv_class`), so that within a class what was
loaded and what was computed behind it are shared, evicted, locked and reported as SGLang always
does. Only the scheduler's thread calls this class.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.integration.blends import Blends
from impress_sglang.integration.checking import IntegrityCheck
from impress_sglang.integration.eligibility import serve_refusal, store_refusal
from impress_sglang.integration.keys import as_tokens
from impress_sglang.integration.layer_gate import LayerGate
from impress_sglang.integration.provenance import Provenance
from impress_sglang.integration.query_sampling import QuerySampler
from impress_sglang.integration.served_tree import ServedTree
from impress_sglang.integration.slot_pool import TreeSlots
from impress_sglang.integration.weights import WeightWatch
from impress_sglang.integration.write_back import WriteBack
from impress_sglang.management.digests import namespace_text
from impress_sglang.management.policies import LoadOptions
from impress_sglang.options import BITS, OFF
from impress_sglang.serving.blend_job import BlendJob
from impress_sglang.serving.blend_plan import BlendNotes, BlendPlan
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.estimate import RequestLengths, pairs_of
from impress_sglang.serving.job_queue import JobQueue, Waiter, overlapping
from impress_sglang.serving.kv_class import KVClass, marked
from impress_sglang.serving.load_jobs import JobLoader, JobState, LoadJob, PoolLayers
from impress_sglang.serving.load_planner import LoadPlan, LoadPlanner
from impress_sglang.serving.report import estimate_fields, new_report, split_again
from impress_sglang.serving.scheduling import CacheState
from impress_sglang.serving.service import Service
from impress_sglang.serving.truncation import truncated_tokens_of
from impress_sglang.serving.why import Asked
from impress_sglang.storage.segment import Tokens
from impress_sglang.timeline import TimelineWriter

logger = logging.getLogger(__name__)

REPORT_KEY = "impress"
# A request plans at most so many jobs that end without having brought anything.
MOST_TRIES = 3
# A pass waits for layers so many times as long as it was expected to take.
MOST_LATE = 4.0
# While all requests wait for jobs, the scheduler looks after so many seconds at the latest.
IDLE_SECONDS = 0.002


@dataclasses.dataclass(eq=False, slots=True)
class Known:
    """A request of SGLang's, from its first match to its end.

    Attributes:
        extra_key: as it came.
        worth: how many of its first tokens are worth storing; None before it was counted.
        seen: how many of them were asked for often enough.
        refused: whether it was refused for want of space or of write budget.
        planned: whether what is to be loaded for it is known.
        admitted: whether it runs.
        declined: whether something that was to be loaded could not be read now.
        loaded, shared: tokens that were brought for it, and by jobs that others tell of.
        loaded_stop: where these end.
        not_before: the poll before which it is not admitted again.
        io: seconds that reading what is stored of it takes.
        early: the job whose last layers its pass waits for.
        disturbed: whether the time of its pass says nothing of what computing takes.
        blend: what is known of its blending.
        blended, computed: tokens of what was brought for it that were blended, or computed.
    """

    req: Any
    extra_key: str | None
    wanted: LoadOptions
    kv_class: KVClass
    report: dict[str, Any]
    namespace: str
    waiter: Waiter
    worth: int | None = None
    seen: int | None = None
    refused: bool = False
    planned: bool = False
    admitted: bool = False
    declined: bool = False
    loaded: int = 0
    shared: int = 0
    loaded_stop: int = 0
    not_before: int = 0
    io: float = 0.0
    early: LoadJob | None = None
    disturbed: bool = False
    blend: BlendNotes = dataclasses.field(default_factory=BlendNotes)
    blended: int = 0
    computed: int = 0


class ImpressTreeCache(UnifiedRadixCache):
    """SGLang's `UnifiedRadixCache`; what left it is brought back from the store by load jobs."""

    def __init__(self, params: CacheInitParams) -> None:
        self.impress: ServedTree | None = None
        """What hooks, routes and orders need; None before it is connected."""
        self.jobs: JobQueue | None = None
        self.blends: Blends | None = None
        """Reuses text that is no prefix; None unless this server does."""
        self._known: dict[str, Known] = {}
        self._polls = 0
        self._connected = False
        super().__init__(params)

    def connect(
        self,
        service: Service,
        model: Any,
        forward_stream: Any,
        read_identity: Callable[[], str],
    ) -> None:
        """Connect the cache to its store; until then it is SGLang's.

        Args:
            service: the store, and what goes with it.
            model: whose queries are sampled.
            forward_stream: SGLang's, on which passes run.
            read_identity: returns the model identity; called again after each flush.
        """
        self.service = service
        self.planner = LoadPlanner(service, self.page_size)
        allocator = self.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        keys = pool._get_key_buffer(pool.start_layer)
        self.provenance = Provenance(len(keys), keys.device)
        trace = service.config.trace_path
        timelines = TimelineWriter(trace) if trace else None
        self.loader = JobLoader(service.shape, keys.device, PoolLayers(pool), timelines)
        self.gate = LayerGate(pool, self._note_broken)
        self.saves = WriteBack(self, QuerySampler(model), forward_stream)
        self.weights = WeightWatch(service.served, read_identity, self._set_aside, self._is_empty)
        check = IntegrityCheck(service.served, self._check_requests)
        self.impress = ServedTree(self, check, self.weights)
        if service.config.blend != OFF:
            self.blends = Blends(self, model, forward_stream)
        service.describe_pool = self._describe_pool

    def attach(self, scheduler: Any) -> None:
        """Begin to serve, for a scheduler that is complete."""
        self._scheduler = scheduler
        least = self.service.config.min_prefix_tokens
        self.slots = TreeSlots(self, scheduler)
        self.jobs = JobQueue(self.slots, self.loader, self._note_end, self._after_job, least)
        chunk = scheduler.chunked_prefill_size
        self._chunk_tokens = chunk if chunk is not None and chunk > 0 else sys.maxsize
        if self.blends is not None:
            self.blends.attach(chunk if chunk is not None and chunk > 0 else None)
        # SGLang's seams for caches that load while requests queue.
        scheduler.enable_lmcache = True
        self._connected = True

    # A request's way: match, plan, wait, be admitted, end.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """SGLang's, in the class of the request."""
        req = params.req
        if req is None or not self._connected or self.disable:
            return super().match_prefix(params)
        known = self._note(req)
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
            self._tell_resident(known, result.device_prefix_len)
        return result

    def match_resident(self, key: RadixKey) -> MatchResult:
        """What is resident of a key, in the terms of SGLang's tree."""
        return self._match_tree(MatchPrefixParams(key=key))

    def is_backuped(self, node_id: Any) -> bool:
        """Whether SGLang asks for what is stored behind a node: always."""
        return True if self._connected else bool(super().is_backuped(node_id))

    def prefetch_from_storage(
        self, handle: CacheRequestHandle, *arguments: Any, **keywords: Any
    ) -> bool:
        """A request is queued: plan what is to be loaded for it."""
        known = self._known.get(handle.rid)
        if known is not None:
            self._plan(known)
            self.note_state(handle.rid)
        return False

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether a request may be admitted now; others pass it if not."""
        known = self._known.get(request.rid)
        if known is None or self.jobs is None:
            return True
        waiter = known.waiter
        if waiter.job is None and (not known.planned or self._has_lost(known)):
            self._plan(known)
        if self._polls < known.not_before or self._is_blocked(known):
            return False
        return not self.jobs.waits(request.rid) or self._starts_early(waiter)

    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]:
        """How many tokens were brought for a request, and where they begin."""
        known = self._known.get(request.rid)
        if known is None or not known.loaded:
            return 0, None
        return known.loaded, known.loaded_stop - known.loaded

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """A request is admitted, and has locked what it uses."""
        known = self._known.get(request.rid)
        if known is not None and not known.admitted:
            known.admitted = True
            self._explain(known)
            self._end_waiting(known)

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
        self._end_early(known)
        marks = self.provenance.mixed and known.kv_class != KVClass()
        before, row = req.kv.cache_protected_len, None
        if marks:
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, before:up_to].clone()
        super().checkpoint(req, up_to=up_to, **kwargs)
        if row is not None and req.session is None:
            path = self.path_device_indices(req.last_node)
            fresh = path[before:]
            # Tokens that others had inserted before keep their slots, and what these rest on.
            fresh = fresh[fresh == row[: len(fresh)].to(fresh.dtype)]
            self.provenance.note_computed(path[:before].long(), fresh.long())
        self.saves.offer(known, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """A request gives its row back: it is over, or SGLang put it back into the queue."""
        super().on_release(req, checkpointed=checkpointed)
        known = self._known.get(req.rid)
        if known is None:
            return
        self._end_early(known)
        self._end_waiting(known)
        if req.finished():
            self.saves.end(known)
            self._count(known)
            self._forget(req.rid)
        else:
            known.admitted = known.planned = False
            known.loaded = known.shared = known.blended = known.computed = 0

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Forget a request that ended without having been admitted."""
        super().release_aborted_request(request)
        known = self._known.get(request.rid)
        if known is not None and not known.admitted:
            self._end_waiting(known)
            self._forget(request.rid)

    # Once per pass, and when there is none.

    def check_hicache_events(self) -> None:
        """Take in what other threads have done, and give slots to jobs."""
        if self.jobs is None:
            return
        self._polls += 1
        self.service.served.poll()
        if self.jobs.active:
            # Also without jobs: what they brought may be held.
            self.jobs.poll(req.rid for req in self._scheduler.waiting_queue)
            self._give_up_slow()
        if self.blends is not None:
            self.blends.step()
        for job in [own for own in self.gate.jobs if own not in self.jobs.jobs]:
            self.gate.remove(job)
        self.service.tell_metrics()

    def rest(self) -> None:
        """Wait for jobs, before a scheduler that has nothing else to do looks again."""
        if self.jobs is not None and self.jobs.computing:
            return
        if self.has_pending_cache_operations():
            self.loader.wake.wait(IDLE_SECONDS)
        else:
            self.service.tell_metrics(idle=True)

    def flush_pending_backups(self) -> None:
        """SGLang's call after each batch; writes need none."""

    def has_pending_cache_operations(self) -> bool:
        """Whether slots are being filled: SGLang neither flushes nor checks for leaks meanwhile."""
        return self.jobs is not None and bool(self.jobs.jobs)

    # Room.

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang's eviction; writes are given up if nothing else is left."""
        return self._evicting(params, super().evict(params), jobs=False)

    def evict_for_alloc(self, params: EvictParams, **keywords: Any) -> EvictResult:
        """The same, for what SGLang must allocate: then jobs give up their slots as well."""
        return self._evicting(params, super().evict_for_alloc(params, **keywords), jobs=True)

    def _evicting(self, params: EvictParams, result: EvictResult, *, jobs: bool) -> EvictResult:
        left = params.num_tokens - result.num_tokens_evicted
        if left <= 0 or self.jobs is None:
            return result
        allocator = self.token_to_kv_pool_allocator
        target = allocator.available_size() + left

        def missing() -> int:
            lacking = target - allocator.available_size()
            if lacking > 0 and self.tree_core.evictable_size():
                super(ImpressTreeCache, self).evict(EvictParams(num_tokens=lacking))
                lacking = target - allocator.available_size()
            return int(lacking)

        self.saves.give_up(missing)
        if jobs and missing() > 0:
            self.jobs.make_room(missing)
        result.num_tokens_evicted += left - max(missing(), 0)
        return result

    def evictable_size(self) -> int:
        """Tokens that `evict` can free: SGLang's, and those that only writes have locked."""
        return int(super().evictable_size()) + self._locked_for_writes()

    def full_evictable_size(self) -> int:
        """See `evictable_size`."""
        return int(super().full_evictable_size()) + self._locked_for_writes()

    def protected_size(self) -> int:
        """Tokens that cannot be evicted: SGLang's, and the slots of jobs."""
        return int(super().protected_size()) + self._loading() - self._locked_for_writes()

    def full_protected_size(self) -> int:
        """See `protected_size`."""
        return int(super().full_protected_size()) + self._loading() - self._locked_for_writes()

    def _loading(self) -> int:
        return 0 if self.jobs is None else self.jobs.loading_tokens

    def _locked_for_writes(self) -> int:
        return self.saves.locked_tokens() if self._connected else 0

    # The whole cache.

    def reset(self) -> None:
        """SGLang's flush, which it does when idle: drops what is resident, keeps what is stored."""
        if not self._connected:
            super().reset()
            return
        assert self.jobs is not None
        assert not self.jobs.jobs, "SGLang flushes while slots are filled"
        store = self.service.served.opened
        if store is not None:
            # Accepted writes read slots that are about to be given away.
            store.writes.drain()
            # Other weights may follow, and with them another store.
            self.service.tell_metrics(now=True)
        self.jobs.drop_all(0.0)
        for known in self._known.values():
            known.planned = False
        self.provenance.clear()
        assert self.impress is not None
        self.impress.clear()
        super().reset()
        self.weights.flushed()

    def release_host_resources(self) -> None:
        """Shut down gracefully: finish writes, and save what the next start should know."""
        super().release_host_resources()
        if self._connected and self.jobs is not None:
            seconds = self.service.config.io_timeout
            self.jobs.drop_all(seconds)
            self.loader.close(seconds)
            self._connected = False
            self.service.close()

    def request(self, rid: str) -> Any:
        """SGLang's request of this id; None if it is not known."""
        known = self._known.get(rid)
        return None if known is None else known.req

    def key_of(self, req: Any) -> RadixKey:
        """The key of a request's prompt, as far as a prefix may reach."""
        tokens = req.full_untruncated_fill_ids or req.origin_input_ids
        if req.positional_embed_overrides is not None:
            # SGLang matches none of it either: its KVs do not follow from its tokens.
            tokens = tokens[:0]
        limit = req._compute_max_prefix_len(len(tokens))
        return RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)

    def _note(self, req: Any) -> Known:
        """Note a request; at its first match it gets its class, and its key the mark of that."""
        known = self._known.get(req.rid)
        if known is not None and known.req is req:
            return known
        service, extra_key = self.service, req.extra_key
        wanted = load_options_of(req.sampling_params, service.config)
        report = new_report(service.policy.name, 0, len(req.origin_input_ids))
        refusal = serve_refusal(req)
        report.update(
            not_served=refusal,
            not_stored=store_refusal(req),
            truncated_tokens=truncated_tokens_of(req.sampling_params),
        )
        # What cannot be served from the store shares nothing that may come from it.
        own = KVClass() if refusal is not None else service.class_of(wanted)
        namespace = namespace_text(extra_key, req.cache_salt)
        known = Known(req, extra_key, wanted, own, report, namespace, Waiter(req.rid))
        if report["not_stored"] is None and self.saves.sight(known):
            known.wanted, known.kv_class = LoadOptions(), KVClass()
        elif wanted.auto_bits and refusal is None and not own.exact:
            known.kv_class = self._choose(known)
        req.extra_key = marked(extra_key, known.kv_class, service.usual)
        self._known[req.rid] = known
        self.service.num_live = len(self._known)
        req.customized_info = {REPORT_KEY: [report]}
        return known

    def _choose(self, known: Known) -> KVClass:
        """The class of a request that leaves it to the server."""
        service, req = self.service, known.req
        key = self.key_of(req)
        if not self.planner.looks_for(len(key)):
            return known.kv_class
        resident = {}
        share = known.kv_class.share
        for own in (KVClass(), *(KVClass(bits, share) for bits in BITS)):
            extra_key = marked(known.extra_key, own, service.usual)
            own_key = RadixKey(key.token_ids, extra_key, limit=key.limit, cache_salt=key.cache_salt)
            resident[own] = self.match_resident(own_key).device_prefix_len
        tokens = as_tokens(key.raw_token_ids())
        return self.planner.choose(known.namespace, tokens, resident, known.kv_class)

    def _plan(self, known: Known) -> None:
        """Plan what is to be loaded for a queued request; join or begin a job for it."""
        assert self.jobs is not None
        known.planned = True
        waiter, req = known.waiter, known.req
        if self.disable or waiter.tries >= MOST_TRIES:
            return
        if known.report["not_served"] is not None:
            return
        key = self.key_of(req)
        if not self.planner.looks_for(len(key)):
            return
        resident = self.match_resident(key).device_prefix_len
        tokens = as_tokens(key.raw_token_ids())
        plan: LoadPlan | BlendPlan | None
        plan = usual = self.planner.plan(known.namespace, tokens, resident, known.kv_class)
        if self.blends is not None:
            plan = self.blends.plan(known, tokens, resident, usual) or usual
        if plan is None:
            return
        known.report.update(estimate_fields(plan.estimate, loads=plan.loads))
        if not plan.loads:
            # Otherwise what is not loaded because reads were slow would never be loaded again.
            self.loader.measure(self.service.store, plan.spans[:1], known.kv_class.planes)
            return
        self.service.store.tree.touch(plan.match)
        self.service.lookahead.wait(req.rid, plan.spans)
        waiter.patience = self.planner.computing_seconds(resident, len(tokens) - resident)
        known.io = plan.estimate.io
        self.jobs.join(waiter, self._job(known, plan, tokens))

    def _job(self, known: Known, plan: LoadPlan | BlendPlan, tokens: Tokens) -> LoadJob:
        assert self.jobs is not None
        if isinstance(plan, BlendPlan):
            assert self.blends is not None
            job: LoadJob = self.blends.job(known, plan)
        else:
            space = known.extra_key, known.req.cache_salt
            store, own = self.service.store, known.kv_class
            job = LoadJob(store, own, space, tokens[: plan.stop], plan.match, plan.start)
        least = self.service.config.min_prefix_tokens
        return overlapping(self.jobs.jobs, job, least) or job

    def _note_end(self, job: LoadJob) -> None:
        """A job has ended: the store hears of what could not be read."""
        if isinstance(job.error, PrefixUnreadable) and self.service.served.opened is job.store:
            logger.warning("a stored prefix is computed: %s", job.error)
            job.store.report(job.error)
        if self.blends is not None:
            self.blends.note_end(job)

    def _after_job(self, waiter: Waiter, job: LoadJob) -> None:
        """A job for a request has ended: note what it brought, and plan what it did not."""
        known = self._known[waiter.rid]
        if isinstance(job, BlendJob):
            assert self.blends is not None
            # Of a blend, its own notes say whether it may be tried again.
            self.blends.settle(known, job)
        elif job.state is JobState.FAILED and not isinstance(job.error, SegmentUnreadable):
            # What is damaged the store itself knows.
            known.declined = True
        if job.state is JobState.LOADED and not job.revoked:
            self._tell_loaded(known, job)
        self._plan(known)

    def note_state(self, rid: str) -> None:
        """Note what is cached of a waiting request, for the order of the queue."""
        known, order = (
            self._known.get(rid),
            None if self.impress is None else self.impress.queue_order,
        )
        if known is None or order is None:
            return
        total = len(known.req.full_untruncated_fill_ids)
        length = known.report["prefix_tokens"]
        job = known.waiter.job
        stored = 0 if job is None else len(job)
        cached = length + stored >= self.service.config.min_prefix_tokens
        work = RequestLengths(length, stored, total - length - stored)
        order.note(rid, CacheState(cached, self.service.estimator.estimate(work, 1.0, known.io)))

    def unread(self, rid: str) -> float:
        """The share of a waiting request's reads that is left to do."""
        known = self._known.get(rid)
        job = None if known is None else known.waiter.job
        return 0.0 if job is None else job.unread(self.service.shape.num_layers)

    def _has_lost(self, known: Known) -> bool:
        """Whether what was brought for a request was evicted before it was admitted."""
        if not known.loaded_stop or known.waiter.hold is not None:
            return False
        resident = self.match_resident(self.key_of(known.req)).device_prefix_len
        if resident >= known.loaded_stop:
            return False
        known.loaded_stop = known.loaded = known.shared = known.blended = known.computed = 0
        return True

    # Late start: a pass begins while the last layers are on their way.

    def _starts_early(self, waiter: Waiter) -> bool:
        """Whether a request may be admitted although its job is not done.

        What is left takes no longer than its own pass, which then waits for each layer. Nobody else
        shares the slots before they are filled.
        """
        job = waiter.job
        if job is None or self.jobs is None or job.done.is_set() or job.revoked or job.computes:
            return False
        if job.early:
            return True
        known, now = self._known[waiter.rid], time.monotonic()
        new = len(known.req.origin_input_ids) - job.stop
        left = job.seconds_left(self.service.shape.num_layers, now)
        if job.slots is None or left is None or new > self._chunk_tokens:
            return False
        if known.req.session is not None:
            # Its row may outlive it, so that it could not be put back.
            return False
        own = self.planner.computing_seconds(job.stop, new)
        if own is None or left > own or self.slots.lacking(job) < len(job):
            return False
        job.deadline = now + MOST_LATE * own
        self.jobs.start_early(job)
        self.gate.add(job)
        # What was read is told when all of it was.
        job.told, known.early = True, job
        known.loaded += len(job)
        known.loaded_stop = job.stop
        return True

    def _note_broken(self, job: LoadJob) -> None:
        """A pass has attended to a layer that is not there: its results are dropped.

        The job is discarded, and its users put back, when it has ended.
        """
        for req in self.users_of(job):
            req.is_retracted = True

    def _is_blocked(self, known: Known) -> bool:
        """Whether a request would share slots that are being filled."""
        return any(
            job is not known.waiter.job and self._shares(known, job) for job in self.gate.jobs
        )

    def _shares(self, known: Known, job: LoadJob) -> bool:
        """Whether a request begins like the tokens of a job, and with some of them."""
        if known.kv_class != job.kv_class or (known.extra_key, known.req.cache_salt) != job.space:
            return False
        page = self.page_size
        tokens = as_tokens(known.req.full_untruncated_fill_ids[: job.start + page])
        return np.array_equal(tokens, job.tokens[: job.start + page])

    def users_of(self, job: LoadJob) -> list[Any]:
        """The admitted requests that may attend to the slots of a job."""
        return [
            known.req
            for known in self._known.values()
            if known.admitted and self._shares(known, job)
        ]

    def put_back(self, requests: list[Any]) -> None:
        """Put requests of the last pass back into the queue, as SGLang does without room."""
        scheduler = self._scheduler
        if scheduler.last_batch is not None and requests:
            scheduler.last_batch.filter_batch(reqs_to_exclude=requests)
        for req in requests:
            logger.warning("request %s begins again: what it used could not be loaded", req.rid)
            release_kv_cache(req, self, checkpoint=False)
            req.reset_for_retract()
            if scheduler.chunked_req is req:
                scheduler.chunked_req = None
            self._known[req.rid].not_before = self._polls + 2
            scheduler._add_request_to_queue(req, is_retracted=True)

    def _give_up_slow(self) -> None:
        """Let requests compute what would take longer to load, by the progress of their jobs."""
        assert self.jobs is not None
        if self.service.config.load == "always":
            return
        now = time.monotonic()
        for job in list(self.jobs.loading):
            left = job.seconds_left(self.service.shape.num_layers, now)
            if left is None:
                left = now - job.began_at if job.began_at else 0.0
            computing = self.planner.computing_seconds(job.start, len(job))
            if computing is not None and left > computing:
                logger.info("loading %d tokens is slower than computing them", len(job))
                for rid in job.waiters:
                    self._decline(self._known[rid], job)
                self.jobs.give_up(job)

    def _decline(self, known: Known, job: LoadJob) -> None:
        """Let a request compute what a job would bring, which is slower."""
        if isinstance(job, BlendJob):
            assert self.blends is not None
            self.blends.too_slow(known)
            known.planned = False
        else:
            known.report["decision"] = "recompute"
            known.waiter.tries = MOST_TRIES

    def _end_waiting(self, known: Known) -> None:
        """Note that a request was admitted, or is gone."""
        assert self.jobs is not None
        self.jobs.leave(known.req.rid)
        if self.impress is not None and self.impress.queue_order is not None:
            self.impress.queue_order.forget(known.req.rid)
        self.service.lookahead.stop_waiting(known.req.rid)
        if not self.service.lookahead.awaits:
            self.service.lookahead.tell()

    def _forget(self, rid: str) -> None:
        self._known.pop(rid, None)
        self.service.num_live = len(self._known)

    # What clients are told.

    def _tell_resident(self, known: Known, length: int) -> None:
        report = known.report
        brought = min(known.loaded + known.shared, length)
        resident = length - brought
        loaded = min(known.loaded, length)
        report.update(
            path="ssd" if known.loaded else "device" if length else "computed",
            prefix_tokens=length,
            used_tokens=length,
            resident_tokens=resident,
            stored_tokens=brought,
            loaded_tokens=loaded,
            blended_tokens=known.blended,
            shared_tokens=min(known.shared, length),
            tokens=split_again(
                report,
                resident=resident,
                shared=min(known.shared, length),
                loaded=max(loaded - known.blended - known.computed, 0),
                blended=known.blended,
            ),
        )

    def _tell_loaded(self, known: Known, job: LoadJob) -> None:
        """Note what a job brought; the first who waited for it tells of its reads."""
        known.loaded_stop = job.stop
        if job.told:
            known.shared += len(job)
            return
        job.told = True
        known.loaded += len(job)
        if isinstance(job, BlendJob):
            known.blended += job.reused
            known.computed += job.computed
        self._tell_reads(known, job)

    def _end_early(self, known: Known) -> None:
        """Tell of the reads of a job that a request did not wait for; its pass is over."""
        job, known.early = known.early, None
        if job is not None:
            known.disturbed = True
            job.done.wait(IDLE_SECONDS)
            self._tell_reads(known, job)

    def _tell_reads(self, known: Known, job: LoadJob) -> None:
        report, reads = known.report, job.reads.as_dict()
        for name, count in reads.items():
            report[name] = report.get(name, 0) + count
        report.update(
            bits=job.plan.estimate.bits if isinstance(job, BlendJob) else known.kv_class.bits,
            bits_mean=round(job.fills.mean_bits, 3),
            load_ms=round(report["load_ms"] + job.fills.seconds * 1e3 - job.reads.wait_ms, 3),
            layers_whole=self.service.shape.num_layers,
            prefetched=True,
        )

    def _explain(self, known: Known) -> None:
        tokens = as_tokens(self.key_of(known.req).raw_token_ids())
        asked = Asked(
            known.report,
            known.namespace,
            tokens,
            known.wanted,
            seen=None if self.saves.sights is None else known.seen or 0,
            opened=not known.declined,
            blend=known.blend.why,
        )
        known.report["why"] = self.service.explainer.explain(asked)
        length = known.report["prefix_tokens"]
        if self.provenance.mixed and length and not known.kv_class.exact:
            path = self.path_device_indices(known.req.last_node)[:length]
            known.report["approximate"] = self.provenance.depth(path.long()) > 0
        self.saves.expect(known)

    def _count(self, known: Known) -> None:
        """Count a request that has ended, and learn how long computing takes."""
        req, times = known.req, known.req.time_stats
        self.service.count(known.report)
        waited = times.queue_duration_s
        prefill = max(times.prefill_finished_time - times.forward_entry_time, 0.0)
        store = self.service.served.opened
        namespace = "" if store is None else store.namespace(known.namespace)
        self.service.recent.note(
            req.rid, namespace, req.origin_input_ids, known.report, waited=waited, prefill=prefill
        )
        before = known.report["prefix_tokens"]
        new = len(req.origin_input_ids) - before
        if new > 0 and prefill > 0 and not (known.disturbed or req.retraction_count):
            self.service.estimator.note_forward(new, pairs_of(before, new), prefill)

    def _describe_pool(self) -> dict[str, int]:
        """How many tokens of the pool are ours, by what they are for."""
        return {
            "tokens": self.token_to_kv_pool_allocator.size,
            "loading_tokens": self._loading(),
            "writing_tokens": self.saves.writing_tokens,
        }

    # Weights, and checks.

    def _set_aside(self) -> None:
        """Prepare for new weights or a new pool: end jobs and writes, forget plans."""
        assert self.jobs is not None
        self.jobs.drop_all(self.service.config.io_timeout)
        self.saves.revoke()
        store = self.service.served.opened
        if store is not None:
            store.writes.abandon()
        for known in self._known.values():
            known.planned = False
            # What was found in a store ends with it.
            known.blend = BlendNotes()

    def _is_empty(self) -> bool:
        """Whether no KV is left in the pool."""
        allocator = self.token_to_kv_pool_allocator
        return bool(allocator.available_size() == allocator.size)

    def _check_requests(self) -> None:
        """Check our counters; the time grows with requests and jobs, not with what is stored."""
        assert self.jobs is not None
        for rid, waiter in self.jobs.waiters.items():
            assert rid in self._known and self._known[rid].waiter is waiter
        for job in self.jobs.jobs:
            assert all(self.jobs.waiters[rid].job is job for rid in job.waiters)
            assert (job.slots is not None) == (job.hold is not None) or job.revoked
