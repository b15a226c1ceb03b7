"""Plans what to load for queued requests, and makes them wait for it."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from impress_sglang.config import OFF
from impress_sglang.cost import RequestLengths
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.plugin.early_admission import EarlyAdmission
from impress_sglang.plugin.job_slots import JobSlots
from impress_sglang.plugin.prefix_saves import PrefixSaves
from impress_sglang.plugin.request_tracker import (
    PrefixSources,
    RequestTracker,
    TrackedRequest,
    as_tokens,
    key_of,
)
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.serving.job_queue import JobQueue
from impress_sglang.serving.load_jobs import JobLoader, JobState, LoadJob
from impress_sglang.serving.ranks import Agreement, LoadProposal
from impress_sglang.serving.report import estimate_fields
from impress_sglang.serving.scheduling import QueueOrder, Serving
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.miss_log import MissCause

logger = logging.getLogger(__name__)

# Most jobs per request that may end without having loaded anything.
MAX_FAILURES = 3
# Longest sleep of the scheduler while all requests wait for jobs.
IDLE_SECONDS = 0.002
# While a batch runs, ranks vote on saves alone every so many passes: a vote takes 0.2 ms.
SAVES_EVERY = 8


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """This rank's plan for a request, before all ranks have agreed."""

    tracked: TrackedRequest
    job: LoadJob | None
    proposal: LoadProposal


class PrefixLoads:
    """Load jobs of one tree cache, and the requests that wait for them."""

    def __init__(self, requests: RequestTracker, scheduler: Any) -> None:
        """Start without jobs, for a complete scheduler of SGLang's."""
        self._cache, self._planner = requests.cache, requests.planner
        self._service = service = requests.service
        self._tracked, self._ranks = requests.by_rid, requests.ranks
        self._alone = requests.ranks.alone
        self._scheduler, self._requests = scheduler, requests
        self._passes = 0
        # Plans that ranks have not agreed on yet, by request id.
        self._planned: dict[str, _Planned] = {}
        layers = requests.layers
        self._loader = JobLoader(layers(0)[0].device, layers, service.codec)
        slots = JobSlots(requests, scheduler, lambda job: self._early_admission.retract(job))
        self._min_tokens = service.config.min_prefix_tokens
        self._agreement = Agreement(requests.ranks)
        self.jobs: JobQueue[TrackedRequest] = JobQueue(
            *(slots, self._loader, self._on_job_end, self._replan),
            *(self._min_tokens, self._agreement.now),
        )
        self._early_admission = EarlyAdmission(requests, scheduler, self.jobs, slots)
        schedule = service.config.schedule
        self.queue_order = None if schedule == OFF else QueueOrder(schedule, self._serving)
        """None if the queue is not reordered."""

    def plan(self, tracked: TrackedRequest) -> None:
        """Plan what to load for a queued request; join or begin a job for it."""
        tracked.planned = True
        # The prefix of the class that it was moved to may be evicted.
        self._requests.lower_bits(tracked)
        req, key, not_served = tracked.req, key_of(tracked.req), tracked.report["not_served"]
        if (
            tracked.num_failures >= MAX_FAILURES
            or not_served is not None
            or len(key) < self._min_tokens
        ):
            return
        if self._alone and not self._planner.looks_up(len(key)):
            return
        tracked.planned_resident = resident = match_resident(self._cache, key).device_prefix_len
        tokens = as_tokens(key.raw_token_ids())
        job, proposal = self._plan_of(tracked, tokens, resident), LoadProposal()
        num_missing = len(tokens) - resident
        if job is not None:
            patience = self._service.estimator.computing_seconds(resident, num_missing)
            proposal = LoadProposal(job.stop, job.worthwhile, patience)
        planned = _Planned(tracked, job, proposal)
        if self._alone:
            self._begin(planned, proposal)
        elif num_missing >= self._min_tokens:
            self._planned[req.rid] = planned

    def _plan_of(self, tracked: TrackedRequest, tokens: Tokens, resident: int) -> LoadJob | None:
        kv_class = tracked.kv_class
        return self._planner.plan(tracked.namespace, tracked.key_scope, tokens, resident, kv_class)

    def _begin(self, planned: _Planned, proposal: LoadProposal) -> None:
        """Carry out a plan as far as all ranks propose it: join or begin a job."""
        tracked, job = planned.tracked, planned.job
        if job is None or proposal.stop - job.start < self._min_tokens:
            return
        tracked.report.update(estimate_fields(job.estimate, loads=proposal.worthwhile))
        if not proposal.worthwhile:
            # Without measuring, slow reads would keep prefixes from ever being loaded again.
            self._loader.measure(job.store, job.spans, exact=tracked.kv_class.exact)
            return
        if proposal.stop < job.stop:
            job = self._planner.shorten(job, proposal.stop)
        job.store.tree.touch(job.match)
        self._service.lookahead.set_expected(tracked.rid, (*job.spans, *job.state_spans))
        tracked.compute_seconds = proposal.compute_seconds
        tracked.stored_tokens, tracked.read_seconds = job.stop, job.estimate.io
        self.jobs.join(tracked, job)

    def poll(self, saves: PrefixSaves) -> None:
        """Called once per pass: carry out what all ranks agree on, and give slots to jobs."""
        if self._votes(saves):
            self._loader.wake.clear()
            slow = self._slow_jobs()
            proposals = {planned: planned.proposal for planned in self._planned.values()}
            agreed = self._agreement.agree(proposals, self.jobs.started, slow, saves.ended())
            saves.release(agreed.ended_saves)
            for job in agreed.slow:
                if job.owned_slots is not None:
                    # If only another rank finds computing faster, this rank has no estimate.
                    self._compute_instead(job, *slow.get(job, (0.0, 0.0)))
            for planned, proposal in agreed.proposals.items():
                # In a pipeline it may have been planned again since, or have ended.
                rid = planned.tracked.rid
                if self._planned.get(rid) is planned:
                    self._begin(self._planned.pop(rid), proposal)
            # Needed without jobs as well: loaded tokens may still be locked.
            queue = (self._tracked.get(req.rid) for req in self._scheduler.waiting_queue)
            self.jobs.poll((tracked for tracked in queue if tracked is not None), agreed.ended)
            self._raise_bits()
        self._early_admission.poll()

    def _votes(self, saves: PrefixSaves) -> bool:
        """Whether ranks vote in this pass; the result must be the same on all of them."""
        if self._agreement.is_open or self._planned or self.jobs.active:
            return True
        busy = not self._scheduler.running_batch.is_empty()
        self._passes = (self._passes + 1) % SAVES_EVERY if saves and busy else 0
        return bool(saves) and not self._passes

    def may_run(self, tracked: TrackedRequest) -> bool:
        """Whether a request may be admitted now; plan again if its planned tokens are gone."""
        if tracked.job is None and not tracked.planned:
            self.plan(tracked)
        if self._early_admission.is_blocked(tracked):
            return False
        if not self.jobs.must_wait(tracked) and self._has_lost(tracked):
            self.plan(tracked)
        if tracked.rid in self._planned:
            return False
        # With several ranks, a pass would have to fail on all of them.
        return not self.jobs.must_wait(tracked) or (
            self._alone and self._early_admission.may_start(tracked)
        )

    def end_waiting(self, tracked: TrackedRequest) -> None:
        """Stop the wait of a request that was admitted, aborted or released."""
        rid = tracked.rid
        self._planned.pop(rid, None)
        self.jobs.leave(tracked)
        if self.queue_order is not None:
            self.queue_order.forget(rid)
        self._service.lookahead.stop_waiting(rid)
        if self._service.in_use and not self._service.lookahead.has_waiting:
            # Chunks of its last layers may be placed during its pass, by their scores.
            self._service.store.readers.update_expected()

    def end_pass(self, tracked: TrackedRequest) -> None:
        """Report the reads of the job that overlapped with a request's pass, which is over."""
        job, tracked.early_job = tracked.early_job, None
        if job is not None:
            job.done.wait(IDLE_SECONDS)
            tracked.layer_wait_seconds += job.pass_wait_seconds
            # On an accelerator, the stream waits, and the time includes that.
            tracked.timing_invalid = tracked.timing_invalid or bool(job.layer_events)
            self._requests.report_reads(tracked, job)

    def wait_briefly(self) -> bool:
        """Wait briefly for jobs, if there are any; return whether there are."""
        if self.jobs.jobs and not self.jobs.computing:
            self._loader.wake.wait(IDLE_SECONDS)
        return bool(self.jobs.jobs)

    def drop_all(self) -> None:
        for tracked in self._tracked.values():
            tracked.planned = False
            # The reason applied to the store that was open.
            tracked.why_no_blend, tracked.blends = None, True
        self._planned.clear()
        self.jobs.drop_all()

    def wait_for_loader(self) -> None:
        """Wait until the loader has stopped reading for dropped jobs, for at most `io_timeout`."""
        self.jobs.wait_for_loader(self._service.config.io_timeout, alone=self._alone)
        # Requests whose pass used a failed job are in the queue again, and may have new plans.
        self.drop_all()

    def close(self) -> None:
        self.drop_all()
        self._loader.close(self._service.config.io_timeout)

    def _serving(self, rid: str) -> Serving | None:
        """Estimate the cost of serving a waiting request, for the queue order."""
        tracked = self._tracked.get(rid)
        if tracked is None:
            return None
        total, job = len(tracked.req.full_untruncated_fill_ids), tracked.job
        length, stored = tracked.report["prefix_tokens"], 0 if job is None else len(job)
        work = RequestLengths(length, stored, total - length - stored)
        return Serving(
            self._service.estimator.estimate(work, tracked.read_seconds),
            length + stored >= self._min_tokens,
            0.0 if job is None else job.unread_fraction(self._service.shape.num_layers),
        )

    def check(self) -> None:
        """Check that jobs and the requests that wait for them agree."""
        for rid, tracked in self.jobs.waiters.items():
            assert self._tracked[rid] is tracked
        for job in self.jobs.jobs:
            assert all(tracked.job is job for tracked in job.waiters)

    def _has_lost(self, tracked: TrackedRequest) -> bool:
        # Resident tokens may be evicted before the request is admitted.
        expected = max(tracked.sources.stop, tracked.planned_resident)
        if not expected or tracked.lock is not None:
            return False
        resident = match_resident(self._cache, key_of(tracked.req)).device_prefix_len
        if resident >= expected:
            return False
        if resident < tracked.sources.stop:
            tracked.sources = PrefixSources()
        return True

    def _on_job_end(self, job: LoadJob) -> None:
        if isinstance(job.error, PrefixUnreadable) and self._service.opened is job.store:
            logger.warning("a stored prefix is computed: %s", job.error)
            job.store.report(job.error)
        elif job.state is JobState.FAILED and job.error is None and self._ranks.head_replicas > 1:
            # Another rank that failed to read these segments may never try them again.
            spans, tree = job.match.slice(job.start, job.stop), job.store.tree
            segments = dict.fromkeys(span.segment for span in reversed(spans))
            lost = [segment for segment in segments if tree.get(segment.segment_id) is segment]
            job.store.writes.discard(lost, MissCause.DAMAGED)

    def _replan(self, tracked: TrackedRequest, job: LoadJob) -> None:
        if job.state is JobState.FAILED and not isinstance(job.error, SegmentUnreadable):
            # Damaged segments are already reported to the store.
            self._decline(tracked, job)
        if job.state is JobState.LOADED and not job.revoked:
            self._requests.report_load(tracked, job)
        self.plan(tracked)

    def _decline(self, tracked: TrackedRequest, job: LoadJob) -> None:
        """Handle a load that failed although its segments may be intact."""
        tracked.load_failed = True

    def _raise_bits(self) -> None:
        # A job without room would load another copy of tokens that are resident in another class.
        blocked = self.jobs.blocked
        # Requests that keep a prefix resident, collected once: the queue may be long.
        candidates = self._tracked.values() if blocked else ()
        users = [other for other in candidates if other.admitted or other.lock is not None]
        for tracked in blocked:
            blends = tracked.job is not None and tracked.job.computes_after_reads
            if blends or tracked.kv_class.exact or tracked.req.session is not None:
                continue
            if self._requests.raise_bits(tracked, users):
                self.jobs.leave(tracked)

    def _slow_jobs(self) -> dict[LoadJob, tuple[float, float]]:
        """Return jobs slower than computing: seconds left to load, and seconds to compute."""
        slow, now = dict[LoadJob, tuple[float, float]](), time.monotonic()
        for job in self.jobs.loading if self._service.config.load != "always" else ():
            seconds_left = job.seconds_left(self._service.shape.num_layers, now)
            if seconds_left is None:
                seconds_left = now - job.started_at if job.started_at else 0.0
            took = self._service.estimator.faster_computing_seconds(
                seconds_left, job.start, len(job)
            )
            if took is not None:
                slow[job] = seconds_left, took
        return slow

    def _compute_instead(self, job: LoadJob, seconds_left: float, computing: float) -> None:
        """Drop a job with `seconds_left` to load, and compute its tokens in `computing` seconds."""
        logger.info("loading %d tokens is slower than computing them", len(job))
        for tracked in job.waiters:
            tracked.report.update(
                decision="recompute",
                estimated_load_ms=round(seconds_left * 1e3, 3),
                estimated_recompute_ms=round(computing * 1e3, 3),
            )
            tracked.num_failures = MAX_FAILURES
        self.jobs.give_up(job)
