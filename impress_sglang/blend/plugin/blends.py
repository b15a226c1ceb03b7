"""Blends of one tree cache: which requests blend, and how their jobs run between passes."""

from __future__ import annotations

import logging
from typing import Any

import torch

from impress_sglang.blend.job import BlendJob
from impress_sglang.blend.planner import BlendPlanner
from impress_sglang.blend.plugin.steps import STEP_TOKENS, BlendSteps
from impress_sglang.cost import RequestLengths
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.prefix_saves import PrefixSaves
from impress_sglang.plugin.request_tracker import RequestTracker, TrackedRequest
from impress_sglang.plugin.rotation import rotation_of
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.serving.why import Detail, Reason
from impress_sglang.storage.segment import Tokens

logger = logging.getLogger(__name__)


class BlendLoads(PrefixLoads):
    """Load jobs of a server that blends, some of which are blend jobs. Thread: scheduler."""

    def __init__(self, requests: RequestTracker, scheduler: Any) -> None:
        """See `PrefixLoads`.

        Raises:
            UnsupportedError: the model cannot be blended.
        """
        super().__init__(requests, scheduler)
        service, model = self._service, scheduler.tp_worker.model_runner.model
        self.planner = BlendPlanner(
            service,
            rotation_of(model, "--impress-blend"),
            self._cache.page_size,
            STEP_TOKENS,
            # On the loader thread, which owns the read buffers.
            lambda spans: self._loader.measure(service.store, spans, exact=False),
        )
        pool = self._cache.token_to_kv_pool_allocator.get_kvcache()
        chunk = scheduler.chunked_prefill_size
        chunk = STEP_TOKENS if chunk is None or chunk <= 0 else min(chunk, STEP_TOKENS)
        layers, start = PoolLayers(pool), pool.start_layer
        self._steps = BlendSteps(
            model,
            pool,
            lambda layer: layers(layer - start),
            service.shape.num_layers,
            scheduler.forward_stream,
            chunk,
            lambda before: service.estimator.computing_seconds(before, chunk),
        )

    def _plan_of(self, tracked: TrackedRequest, tokens: Tokens, resident: int) -> Any:
        plain_job = super()._plan_of(tracked, tokens, resident)
        if not tracked.blends:
            return plain_job
        request = tracked.namespace, tracked.key_scope, tokens, resident
        alternative = plain_job if plain_job is not None and plain_job.worthwhile else None
        blend = self.planner.plan(*request, alternative, tracked.kv_class, tracked.options.blend)
        tracked.why_no_blend = None if isinstance(blend, BlendJob) else blend
        return blend if isinstance(blend, BlendJob) else plain_job

    def poll(self, saves: PrefixSaves) -> None:
        """See `PrefixLoads.poll`; between two passes, one block of a blend is computed."""
        super().poll(saves)
        if self.step():
            for tracked in self._tracked.values():
                # A block was computed between the chunks of its prompt, or before its first token.
                if tracked.admitted and not tracked.req.time_stats.prefill_finished_time:
                    tracked.timing_invalid = True

    def step(self) -> bool:
        """Compute a block of the first job that has been read, if there is one."""
        job = next((job for job in self.jobs.computing if not self._must_wait(job)), None)
        if job is None:
            return False
        assert isinstance(job, BlendJob)
        state = self._step(job)
        if state is not None:
            self.jobs.end_computing(job, state)
        return True

    def _on_job_end(self, job: LoadJob) -> None:
        super()._on_job_end(job)
        if isinstance(job, BlendJob) and job.state is JobState.LOADED and not job.revoked:
            work = RequestLengths(job.start, len(job), job.num_new)
            computed = job.token_layers / self._service.shape.num_layers
            self._service.estimator.observe_blend(work, computed, job.seconds)

    def _decline(self, tracked: TrackedRequest, job: LoadJob) -> None:
        if isinstance(job, BlendJob):
            _decline_blend(tracked, job.why or (Reason.NOT_OPENED, ""))
        else:
            super()._decline(tracked, job)

    def _compute_instead(self, job: LoadJob, seconds_left: float, computing: float) -> None:
        if not isinstance(job, BlendJob):
            super()._compute_instead(job, seconds_left, computing)
            return
        for tracked in job.waiters:
            # It may load a prefix without blending.
            _decline_blend(tracked, (Reason.BLEND_SLOWER, ""))
            tracked.planned = False
        self.jobs.give_up(job)

    def _must_wait(self, job: LoadJob) -> bool:
        """Whether tokens before a job may still be loading into their slots."""
        return any(other.key_scope == job.key_scope for other in self._early_admission.jobs)

    def _step(self, job: BlendJob) -> JobState | None:
        """Compute a block; return the final state of the job, if it has ended."""
        max_seconds = self._service.config.blend_seconds
        try:
            if job.row is None:
                assert job.owned_slots is not None
                path = self._cache.path_device_indices(job.lock.node)[: job.start]
                job.row = torch.cat([path.to(torch.int64), job.owned_slots])
            if self._steps.step(job):
                return JobState.LOADED
        except Exception as error:
            if not is_out_of_memory(error):
                # Answers are right without a blend; it is not tried again.
                logger.exception("a prefix could not be blended")
                self.planner.refusal = str(error) or type(error).__name__
                job.why = Reason.BLEND_UNSUPPORTED, self.planner.refusal
            return JobState.FAILED
        if job.spent > max_seconds:
            job.why = Reason.BLEND_TOO_LONG, f"{job.spent:.1f} of {max_seconds:g} s"
            return JobState.FAILED
        return None


def _decline_blend(tracked: TrackedRequest, why: Detail) -> None:
    tracked.blends, tracked.why_no_blend = False, tracked.why_no_blend or why


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that the device or the host ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # Torch's messages where it has no exception class for this.
    names = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(name in str(error) for name in names)
