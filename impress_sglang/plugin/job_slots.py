"""Gives load jobs slots of SGLang's pool and nodes of its tree (`serving.job_queue`).

Sizes are in tokens. A request is admitted if it needs less than the room, and the ones after it if
they need less than what remains.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from impress_sglang.plugin.request_tracker import RequestTracker, TrackedRequest, key_of
from impress_sglang.plugin.tree_nodes import drop_below, match_resident
from impress_sglang.serving.load_jobs import LoadJob


class JobSlots:
    """Slots of SGLang's pool for jobs. Thread: scheduler."""

    def __init__(
        self, requests: RequestTracker, scheduler: Any, retract: Callable[[LoadJob], None]
    ) -> None:
        """`retract` retracts the users of a job into the queue."""
        self._cache = requests.cache
        self._provenance = requests.provenance
        self._scheduler, self._retract = scheduler, retract
        self._allocation = requests.allocation
        self.windows = self._allocation.has_aux
        """Whether layers with windows have rows of their own, which `room` does not count."""

    def room(self) -> int:
        """Return the tokens that could be allocated, with eviction, beyond what running requests
        need."""
        free, _ = self._allocation.available()
        # SGLang reserves the rest of the prompts, and the answers, of admitted requests.
        scheduler = self._scheduler
        requests = {id(req): req for req in scheduler.running_batch.reqs}
        if scheduler.last_batch is not None:
            requests |= {id(req): req for req in scheduler.last_batch.reqs}
        tokens, chunked = 0, scheduler.chunked_req
        if chunked is not None:
            requests[id(chunked)] = chunked
            tokens = len(chunked.full_untruncated_fill_ids) - chunked.extend_end
        ratio, page = scheduler.new_token_ratio_tracker.current, self._cache.page_size
        for req in requests.values():
            if not req.finished():
                # Rounded up as SGLang does, and the page that the next token may need.
                fraction = 1.0 if req.sampling_params.ignore_eos else ratio
                tokens += int(_new_tokens(req) * fraction) + page
        return free + int(self._cache.evictable_size()) - max(tokens, 0)

    def need(self, tracked: TrackedRequest, counted: set[object]) -> int:
        """Return the room that admitting a request takes, including its job's slots if it waits.

        `counted` holds what earlier requests have in common with it, and is updated.
        """
        req, job = tracked.req, tracked.job
        total = len(req.full_untruncated_fill_ids) + _new_tokens(req) + self._cache.page_size
        if job is not None and (job.owned_slots is not None or job in counted):
            return total - tracked.common_tokens
        match = match_resident(self._cache, key_of(req))
        node, length = match.last_device_node, match.device_prefix_len
        if job is not None:
            counted.add(job)
            # The job may load more than the request can use.
            total += job.stop - tracked.common_tokens
        if node in counted:
            return total - length
        counted.add(node)
        # Locking tokens that are not locked yet takes them from the room.
        before = self._cache.tree_core.protected_size()
        lock = self._cache.lock(node)
        after = self._cache.tree_core.protected_size()
        self._cache.unlock(lock)
        return total - length + int(after - before)

    def is_idle(self) -> bool:
        """Whether no request is running or being sent to another server."""
        scheduler, last = self._scheduler, self._scheduler.last_batch
        # In a pipeline, `running_batch` and `last_batch` are of this pass only. All stages get the
        # results of other batches at the same fixed pass, so all return the same.
        others = *getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ())
        batches = [batch for batch in (last, *others) if batch is not None]
        ended = all(req.finished() for batch in batches for req in batch.reqs)
        # KVs that a prefill server is sending have slots that will be freed.
        sends = bool(getattr(scheduler, "disagg_prefill_inflight_queue", None))
        runs = scheduler.chunked_req is not None or not scheduler.running_batch.is_empty()
        return ended and not runs and not sends

    def lacking(self, job: LoadJob) -> int:
        """Count the tokens of a job that are not resident now."""
        return job.stop - int(match_resident(self._cache, self._key(job)).device_prefix_len)

    def take(self, job: LoadJob) -> bool:
        """Allocate the slots of a job, with eviction, and lock the resident tokens before them.

        The job begins after the resident tokens. Returns False, with nothing allocated, without
        room.
        """
        cache = self._cache
        match = match_resident(cache, self._key(job))
        start, lock = match.device_prefix_len, cache.lock(match.last_device_node)
        taken = self._allocation.alloc(job.stop - start)
        if taken is None:
            cache.unlock(lock)
            return False
        job.set_start(start)
        job.lock = lock
        job.owned_slots, job.aux_slots = taken
        job.target_slots = job.owned_slots
        if job.owned_slots.is_cuda:
            # A pass in flight may still use them.
            job.writable_event = self._scheduler.forward_stream.record_event()
        return True

    def free(self, job: LoadJob) -> None:
        """Free the slots of a job, which must not be written any more, and release its lock."""
        assert job.owned_slots is not None and job.aux_slots is not None
        self._allocation.free(job.owned_slots, job.aux_slots)
        job.owned_slots = None
        self._cache.unlock(job.lock)

    def insert(self, job: LoadJob) -> None:
        """Insert the slots of a job into the tree, and extend its lock to all of them.

        SGLang frees slots of tokens that were computed meanwhile.
        """
        cache, slots = self._cache, job.owned_slots
        assert slots is not None and job.aux_slots is not None
        path = cache.path_device_indices(job.lock.node)[: job.start].to(torch.int64)
        # Provenance of its KVs, which follow those in the slots of `path`.
        provenance, stored = self._provenance, job.match.quality
        kept, *_ = job.tokens_by_origin(job.stop)
        depth = stored.depth + (not job.kv_class.exact)
        provenance.mark(slots[:kept], depth, blended=stored.blended)
        if kept < len(slots):
            depth = max(depth, provenance.depth(path))
            provenance.mark(slots[kept:], depth, loaded=False, blended=True)
        params = InsertParams(
            key=self._key(job),
            value=torch.cat([path, slots]),
            prev_prefix_len=job.start,
            inserted_len=job.start,
        )
        if self._allocation.window:
            params.set_evicted_seqlen(ComponentType.SWA, job.stop - len(job.aux_slots))
        elif len(job.aux_slots):
            params.mamba_value = job.aux_slots
        result = cache.insert(params)
        if result.mamba_exist:
            self._allocation.free_aux(job.aux_slots)
        job.owned_slots = None
        lock = cache.lock(result.last_device_node)
        cache.unlock(job.lock)
        job.lock = lock

    def discard(self, job: LoadJob) -> None:
        """Remove a failed job that was inserted from the tree, and retract all requests that use
        it.

        They return to the queue as if there were no room for them.
        """
        self._retract(job)
        self._cache.unlock(job.lock)
        drop_below(self._cache, self._key(job), job.start)

    def lock_for(self, tracked: TrackedRequest) -> Any:
        """Lock the resident prefix of a request, and nothing else, until `release`."""
        match = match_resident(self._cache, key_of(tracked.req))
        return self._cache.lock(match.last_device_node)

    def release(self, hold: Any) -> None:
        self._cache.unlock(hold)

    def _key(self, job: LoadJob) -> RadixKey:
        extra_key, salt = job.key_scope
        return RadixKey(array("q", job.tokens.astype("q").tobytes()), extra_key, cache_salt=salt)


def _new_tokens(req: Any) -> int:
    """Count the tokens that a request may still generate, as SGLang reserves room for them."""
    num_left = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(min(num_left, CLIP_MAX_NEW_TOKENS), 0)
