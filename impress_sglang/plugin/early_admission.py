"""Early admission: starts a pass while the last layers of its prefix are still loading.

See docs/design.md. Only an idle server starts early: other requests would wait for the drive as
well. No other request shares the slots before they are filled.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.common import release_kv_cache

from impress_sglang.plugin.job_slots import JobSlots
from impress_sglang.plugin.request_tracker import RequestTracker, TrackedRequest
from impress_sglang.serving.job_queue import ADMISSION_WINDOW, JobQueue
from impress_sglang.serving.load_jobs import LoadJob

logger = logging.getLogger(__name__)

# Polls for which a retracted request is not admitted: SGLang may process the results of its pass
# after it chose the next one.
POLLS_APART = 2


class EarlyAdmission:
    """Starts passes early, makes them wait for each layer, and retracts them if a layer fails.

    While there are `jobs` whose slots are in SGLang's tree but not filled, this object is the layer
    transfer counter of SGLang's pool, which waits for each layer before attention.
    """

    def __init__(
        self,
        requests: RequestTracker,
        scheduler: Any,
        jobs: JobQueue[TrackedRequest],
        slots: JobSlots,
    ) -> None:
        self._cache, self._tracked = requests.cache, requests.by_rid
        self._estimator = requests.service.estimator
        self._scheduler, self._queue, self._slots = scheduler, jobs, slots
        # A draft model's pass would also have to wait, and cannot be retracted. States are copied
        # before a pass waits for any layer.
        self._possible = requests.layers.packed is requests.layers.states is None
        self._num_layers = requests.service.shape.num_layers
        chunk = scheduler.chunked_prefill_size
        self._max_tokens = chunk if chunk is not None and chunk > 0 else sys.maxsize
        self._kv_pool = self._cache.token_to_kv_pool_allocator.get_kvcache()
        self.jobs: list[LoadJob] = []
        self.polls = 0

    def poll(self) -> None:
        """Called once per pass: retract requests whose pass missed a layer, and forget ended
        jobs."""
        self.polls += 1
        for job in self.jobs:
            if job.revoked:
                self.retract(job)
        for job in [job for job in self.jobs if job not in self._queue.jobs]:
            self.jobs.remove(job)
            if not self.jobs:
                self._kv_pool.register_layer_transfer_counter(None)

    def wait_until(self, layer: int) -> None:
        """Wait until the slots of a layer, counted from the first, are filled."""
        for job in self.jobs:
            if job.revoked:
                continue
            if not job.wait_for_layer(layer):
                # Other requests in this pass stop waiting as well.
                job.revoke()
                # SGLang drops the results of the pass; its users are retracted before the next one.
                for tracked in self._users_of(job):
                    tracked.req.is_retracted = True
            elif job.layer_events:
                torch.cuda.current_stream().wait_event(job.layer_events[layer])

    def may_start(self, tracked: TrackedRequest) -> bool:
        """Whether a request may be admitted although its job is not done."""
        job, req = tracked.job, tracked.req
        if (
            not self._possible
            # A prefill server sends resident KVs away before the pass.
            or self._scheduler.disaggregation_mode is DisaggregationMode.PREFILL
            # Other ranks would wait for layers that only this rank lacks.
            or self._scheduler.require_mlp_sync
            or job is None
            or job.done.is_set()
            or job.revoked
            or job.computes_after_reads
            or not tracked.started_job
        ):
            # Followers may need more than this job loads, which is planned when it is done.
            return False
        if job.inserted_early:
            return True
        now, new = time.monotonic(), len(req.origin_input_ids) - job.stop
        left = job.seconds_left(self._num_layers, now)
        # The row of a session may outlive its request, which then cannot be retracted.
        if (
            job.owned_slots is None
            or left is None
            or new > self._max_tokens
            or req.session is not None
        ):
            return False
        max_wait = self._estimator.max_layer_wait(left, job.stop, new)
        queue = itertools.islice(self._scheduler.waiting_queue, ADMISSION_WINDOW)
        others = (self._tracked.get(queued.rid) for queued in queue if queued is not req)
        # No other request may wait in its pass.
        alone = self._slots.is_idle() and all(o and self._queue.must_wait(o) for o in others)
        if max_wait is None or not alone or self._slots.lacking(job) < len(job):
            return False
        job.pass_deadline = now + max_wait
        # Passes that use these slots wait for its layers.
        self._slots.insert(job)
        job.inserted_early = True
        if not self.jobs:
            self._kv_pool.register_layer_transfer_counter(self)
        self.jobs.append(job)
        # Reads are reported once all layers are read.
        job.reads_reported, tracked.early_job = True, job
        tracked.sources = tracked.sources.before(job.start)
        tracked.sources.loaded += len(job)
        tracked.sources.stop = job.stop
        return True

    def is_blocked(self, tracked: TrackedRequest) -> bool:
        """Whether a request was retracted just now, or would share slots that are being filled."""
        if self.polls < tracked.retry_poll:
            return True
        return any(
            job is not tracked.job and tracked.begins_like(job, self._cache.page_size)
            for job in self.jobs
        )

    def retract(self, job: LoadJob) -> None:
        """Retract the users of a failed job into the queue, as if they lacked room."""
        scheduler, users = self._scheduler, self._users_of(job)
        reqs = [tracked.req for tracked in users]
        for batch in (scheduler.last_batch, scheduler.running_batch):
            if batch is not None and any(req in reqs for req in batch.reqs):
                batch.filter_batch(reqs_to_exclude=reqs)
        for tracked in users:
            req = tracked.req
            logger.warning("request %s begins again: what it used could not be loaded", req.rid)
            release_kv_cache(req, self._cache, checkpoint=False)
            req.reset_for_retract()
            if scheduler.chunked_req is req:
                scheduler.chunked_req = None
            tracked.retry_poll = self.polls + POLLS_APART
            scheduler._add_request_to_queue(req, is_retracted=True)

    def _users_of(self, job: LoadJob) -> list[TrackedRequest]:
        """Return the admitted requests that may attend to the slots of a job."""
        page, admitted = self._cache.page_size, (t for t in self._tracked.values() if t.admitted)
        return [tracked for tracked in admitted if tracked.begins_like(job, page)]
