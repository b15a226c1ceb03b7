"""Blends of one tree cache: which requests have one, and their jobs between the model's passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from impress_sglang.blend.job import BlendJob, BlendNotes
from impress_sglang.blend.planner import BlendPlanner
from impress_sglang.blend.plugin.steps import BLOCK_TOKENS, BlendSteps, check_blended
from impress_sglang.cost import RequestLengths
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.plugin.factory import rotation_of
from impress_sglang.plugin.known import Known
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.serving.job_queue import JobQueue
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.serving.load_planner import LoadPlan
from impress_sglang.serving.service import Service
from impress_sglang.serving.why import Reason
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.stored import StoredSpan

logger = logging.getLogger(__name__)


class Blends:
    """Plans blends, and carries out their jobs; the scheduler's thread owns it."""

    def __init__(
        self,
        cache: UnifiedRadixCache,
        scheduler: Any,
        service: Service,
        jobs: JobQueue[Known],
        gated: Sequence[LoadJob],
        measure: Callable[[Sequence[StoredSpan]], None],
    ) -> None:
        """Begin with no blends, for a scheduler that is complete; `measure`: see `BlendPlanner`.

        `gated`: the jobs of which layers are on their way while passes run (`LateStart`).

        Raises:
            UnsupportedError: the model cannot be blended.
        """
        self._cache = cache
        self._service = service
        self._jobs = jobs
        self._gated = gated
        runner = scheduler.tp_worker.model_runner
        rotation = rotation_of(runner.model, "--impress-blend")
        self.planner = BlendPlanner(service, rotation, cache.page_size, BLOCK_TOKENS, measure)
        pool = cache.token_to_kv_pool_allocator.get_kvcache()
        most = scheduler.chunked_prefill_size
        chunk = BLOCK_TOKENS if most is None or most <= 0 else min(most, BLOCK_TOKENS)
        layers, start = PoolLayers(pool), pool.start_layer
        self._steps = BlendSteps(
            runner.model,
            pool,
            lambda layer: layers(layer - start),
            service.shape.num_layers,
            scheduler.forward_stream,
            chunk,
            lambda before: service.estimator.computing_seconds(before, chunk),
        )

    check = staticmethod(check_blended)

    def plan(
        self, known: Known, tokens: Tokens, resident: int, usual: LoadPlan | None
    ) -> BlendJob | None:
        """A job that blends for a request; `usual`: what it may load otherwise. None: none."""
        if usual is not None and not usual.loads:
            usual = None
        notes = known.blend = known.blend or BlendNotes()
        if notes.declined:
            return None
        request = known.namespace, known.space, tokens, resident
        found = self.planner.plan(*request, usual, known.kv_class, known.wanted.blend)
        job = found if isinstance(found, BlendJob) else None
        notes.why = None if isinstance(found, BlendJob) else found
        return job

    def step(self) -> bool:
        """Between two passes: compute a block of the first job that is read, if there is one."""
        jobs = self._jobs
        job = next((own for own in jobs.computing if not self._waits(own)), None)
        if job is None:
            return False
        assert isinstance(job, BlendJob)
        state = self._step(job)
        if state is not None:
            jobs.end_computing(job, state)
        return True

    def note_end(self, job: LoadJob) -> None:
        """A job has ended: learn from it."""
        if isinstance(job, BlendJob) and job.state is JobState.LOADED and not job.revoked:
            work = RequestLengths(job.start, len(job), job.new)
            computed = job.token_layers / self._service.shape.num_layers
            self._service.estimator.note_blend(work, computed, job.seconds)

    def settle(self, known: Known, job: BlendJob) -> None:
        """A job for a request has ended: note if it goes on without a blend.

        If a segment was unreadable, it is planned again without that.
        """
        if job.state is JobState.FAILED and not isinstance(job.error, SegmentUnreadable):
            known.blend.decline(job.why or (Reason.NOT_OPENED, ""))

    def too_slow(self, known: Known) -> None:
        """Let a request go on without its blend, which takes longer than computing."""
        known.blend.decline((Reason.BLEND_SLOWER, ""))

    def _waits(self, job: LoadJob) -> bool:
        """Whether tokens before a job may still be on their way into their slots."""
        same = (own.kv_class == job.kv_class and own.space == job.space for own in self._gated)
        return any(same)

    def _step(self, job: BlendJob) -> JobState | None:
        """Compute a block; returns how the job has ended, if it has."""
        most = self._service.config.blend_seconds
        try:
            if job.row is None:
                path = self._cache.path_device_indices(job.hold.node)[: job.start]
                job.begin_computing(path.to(torch.int64))
            if self._steps.step(job):
                return JobState.LOADED
        except Exception as error:
            if not is_out_of_memory(error):
                # Answers are right without a blend; it is not tried again.
                logger.exception("a prefix could not be blended")
                self.planner.refusal = str(error) or type(error).__name__
                job.why = Reason.BLEND_UNSUPPORTED, self.planner.refusal
            return JobState.FAILED
        if job.spent > most:
            job.why = Reason.BLEND_TOO_LONG, f"{job.spent:.1f} of {most:g} s"
            return JobState.FAILED
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device or the host had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # How torch says that memory ran out, where that has no class of its own.
    names = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(name in str(error) for name in names)
