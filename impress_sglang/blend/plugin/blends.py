"""Blends of one tree cache: which requests have one, and their jobs between the model's passes."""

from __future__ import annotations

import logging
from typing import Any

import torch

from impress_sglang.blend.job import BlendJob
from impress_sglang.blend.planner import BlendPlanner
from impress_sglang.blend.plugin.steps import BLOCK_TOKENS, BlendSteps
from impress_sglang.cost import RequestLengths
from impress_sglang.plugin.factory import rotation_of
from impress_sglang.plugin.known import Known, KnownRequests
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.write_back import WriteBack
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.serving.why import Detail, Reason
from impress_sglang.storage.segment import Tokens

logger = logging.getLogger(__name__)


class BlendLoads(PrefixLoads):
    """Load jobs of a server that blends, some of which blend; the scheduler's thread owns it."""

    def __init__(self, requests: KnownRequests, scheduler: Any) -> None:
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
            BLOCK_TOKENS,
            # On the loader's thread, whose read buffers these are.
            lambda spans: self._loader.measure(service.store, spans, exact=False),
        )
        pool = self._cache.token_to_kv_pool_allocator.get_kvcache()
        most = scheduler.chunked_prefill_size
        chunk = BLOCK_TOKENS if most is None or most <= 0 else min(most, BLOCK_TOKENS)
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

    def _plan_of(self, known: Known, tokens: Tokens, resident: int) -> Any:
        usual = super()._plan_of(known, tokens, resident)
        if not known.blends:
            return usual
        request = known.namespace, known.space, tokens, resident
        otherwise = usual if usual is not None and usual.loads else None
        found = self.planner.plan(*request, otherwise, known.kv_class, known.wanted.blend)
        known.why_no_blend = None if isinstance(found, BlendJob) else found
        return found if isinstance(found, BlendJob) else usual

    def poll(self, saves: WriteBack) -> None:
        """See `PrefixLoads.poll`; between two passes, a block of a blend is computed."""
        super().poll(saves)
        if self.step():
            for known in self._known.values():
                # A block was computed between the chunks of its prompt, or before its first token.
                if known.admitted and not known.req.time_stats.prefill_finished_time:
                    known.disturbed = True

    def step(self) -> bool:
        """Compute a block of the first job that is read, if there is one."""
        job = next((own for own in self.jobs.computing if not self._waits(own)), None)
        if job is None:
            return False
        assert isinstance(job, BlendJob)
        state = self._step(job)
        if state is not None:
            self.jobs.end_computing(job, state)
        return True

    def _note_end(self, job: LoadJob) -> None:
        super()._note_end(job)
        if isinstance(job, BlendJob) and job.state is JobState.LOADED and not job.revoked:
            work = RequestLengths(job.start, len(job), job.new)
            computed = job.token_layers / self._service.shape.num_layers
            self._service.estimator.note_blend(work, computed, job.seconds)

    def _decline(self, known: Known, job: LoadJob) -> None:
        if isinstance(job, BlendJob):
            _decline_blend(known, job.why or (Reason.NOT_OPENED, ""))
        else:
            super()._decline(known, job)

    def _compute_instead(self, job: LoadJob, left: float, computing: float) -> None:
        if not isinstance(job, BlendJob):
            super()._compute_instead(job, left, computing)
            return
        for known in job.waiters:
            # It may load a prefix without blending.
            _decline_blend(known, (Reason.BLEND_SLOWER, ""))
            known.planned = False
        self.jobs.give_up(job)

    def _waits(self, job: LoadJob) -> bool:
        """Whether tokens before a job may still be on their way into their slots."""
        return any(own.space == job.space for own in self._late.jobs)

    def _step(self, job: BlendJob) -> JobState | None:
        """Compute a block; returns how the job has ended, if it has."""
        most = self._service.config.blend_seconds
        try:
            if job.row is None:
                assert job.slots is not None
                path = self._cache.path_device_indices(job.hold.node)[: job.start]
                job.row = torch.cat([path.to(torch.int64), job.slots])
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


def _decline_blend(known: Known, why: Detail) -> None:
    known.blends, known.why_no_blend = False, known.why_no_blend or why


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device or the host had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # How torch says that memory ran out, where that has no class of its own.
    names = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(name in str(error) for name in names)
