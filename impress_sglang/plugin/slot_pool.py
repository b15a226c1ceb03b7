"""SGLang's pool and tree as load jobs need them (`serving.job_queue`); sizes in tokens.

A request is admitted if it needs less than the room, and those behind it if they need less than
what is left.
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

from impress_sglang.plugin.known import Known, KnownRequests, key_of
from impress_sglang.plugin.tree_nodes import drop_below, match_resident
from impress_sglang.serving.load_jobs import LoadJob


class TreeSlots:
    """Slots of SGLang's pool for jobs; the scheduler's thread owns them."""

    def __init__(
        self, requests: KnownRequests, scheduler: Any, put_back: Callable[[LoadJob], None]
    ) -> None:
        """`put_back` puts the users of a job back into the queue."""
        self._cache = requests.cache
        self._provenance = requests.provenance
        self._scheduler, self._put_back = scheduler, put_back
        self._allocation = requests.allocation
        self.windows = self._allocation.has_rows
        """Whether layers with windows have rows of their own, of which `room` tells nothing."""

    def room(self) -> int:
        """What could be allocated, by evicting if need be, without what running requests need."""
        free, _ = self._allocation.available()
        # SGLang counts on the rest of a prompt, and answers, of what it has admitted.
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

    def need(self, tracked: Known, counted: set[object]) -> int:
        """What admitting a request would take of the room, its job's slots included if it waits.

        What requests before it have in common with it is in `counted`, and is added there.
        """
        req, job = tracked.req, tracked.job
        total = len(req.full_untruncated_fill_ids) + _new_tokens(req) + self._cache.page_size
        if job is not None and (job.slots is not None or job in counted):
            return total - tracked.common
        match = match_resident(self._cache, key_of(req))
        node, length = match.last_device_node, match.device_prefix_len
        if job is not None:
            counted.add(job)
            # It may bring more than the request can use.
            total += job.stop - tracked.common
        if node in counted:
            return total - length
        counted.add(node)
        # Locking tokens that nobody has locked takes them from the room.
        before = self._cache.tree_core.protected_size()
        lock = self._cache.lock(node)
        after = self._cache.tree_core.protected_size()
        self._cache.unlock(lock)
        return total - length + int(after - before)

    def is_idle(self) -> bool:
        """Whether no request is running, or sent to another server."""
        scheduler, last = self._scheduler, self._scheduler.last_batch
        # In a pipeline, `running_batch` and `last_batch` are those of this pass alone. Of others a
        # stage hears the result at a fixed pass, as the others do: so all stages say the same.
        others = *getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ())
        batches = [batch for batch in (last, *others) if batch is not None]
        ended = all(req.finished() for batch in batches for req in batch.reqs)
        # What a prefill server sends has slots that come back.
        sends = bool(getattr(scheduler, "disagg_prefill_inflight_queue", None))
        runs = scheduler.chunked_req is not None or not scheduler.running_batch.is_empty()
        return ended and not runs and not sends

    def lacking(self, job: LoadJob) -> int:
        """How many tokens of a job are not resident now."""
        return job.stop - int(match_resident(self._cache, self._key(job)).device_prefix_len)

    def take(self, job: LoadJob) -> bool:
        """Give a job its slots, evicting if need be, and hold what is resident before them.

        It begins behind what is resident now. Returns False, with nothing taken, without room.
        """
        cache = self._cache
        match = match_resident(cache, self._key(job))
        start, lock = match.device_prefix_len, cache.lock(match.last_device_node)
        taken = self._allocation.take(job.stop - start)
        if taken is None:
            cache.unlock(lock)
            return False
        job.begin_at(start)
        job.hold = lock
        job.slots, job.rows = taken
        job.target = job.slots
        if job.slots.is_cuda:
            # A pass in flight may still use them.
            job.after = self._scheduler.forward_stream.record_event()
        return True

    def give_back(self, job: LoadJob) -> None:
        """Free the slots of a job, to which nothing is written any more, and end its hold."""
        assert job.slots is not None and job.rows is not None
        self._allocation.give_back(job.slots, job.rows)
        job.slots = None
        self._cache.unlock(job.hold)

    def insert(self, job: LoadJob) -> None:
        """Insert the slots of a job into the tree, and let its hold cover all of it.

        SGLang frees slots of tokens that were computed meanwhile.
        """
        cache, slots = self._cache, job.slots
        assert slots is not None and job.rows is not None
        path = cache.path_device_indices(job.hold.node)[: job.start].to(torch.int64)
        # On what its KVs rest, behind those in the slots of `path`.
        provenance, stored, kept = self._provenance, job.match.quality, job.parts[0]
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
            params.set_evicted_seqlen(ComponentType.SWA, job.stop - len(job.rows))
        elif len(job.rows):
            params.mamba_value = job.rows
        # SGLang frees slots of tokens that were computed meanwhile.
        result = cache.insert(params)
        if result.mamba_exist:
            self._allocation.give_rows_back(job.rows)
        job.slots = None
        lock = cache.lock(result.last_device_node)
        cache.unlock(job.hold)
        job.hold = lock

    def discard(self, job: LoadJob) -> None:
        """Remove an inserted job that failed from the tree, and put all that use it back.

        SGLang puts them back as if there were no room for them.
        """
        self._put_back(job)
        self._cache.unlock(job.hold)
        drop_below(self._cache, self._key(job), job.start)

    def hold_for(self, tracked: Known) -> Any:
        """Hold what is resident of a request, and nothing else; `release` ends that."""
        match = match_resident(self._cache, key_of(tracked.req))
        return self._cache.lock(match.last_device_node)

    def release(self, hold: Any) -> None:
        """End a hold."""
        self._cache.unlock(hold)

    def _key(self, job: LoadJob) -> RadixKey:
        extra_key, salt = job.space
        return RadixKey(array("q", job.tokens.tolist()), extra_key, cache_salt=salt)


def _new_tokens(req: Any) -> int:
    """Tokens that a request may still generate, as far as SGLang reserves room for them."""
    num_left = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(min(num_left, CLIP_MAX_NEW_TOKENS), 0)
