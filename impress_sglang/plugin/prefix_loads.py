"""Plans what is loaded for queued requests, and lets them wait for it."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from impress_sglang.config import OFF
from impress_sglang.cost import RequestLengths
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.plugin.known import Brought, Known, KnownRequests, as_tokens, key_of
from impress_sglang.plugin.late_start import LateStart
from impress_sglang.plugin.slot_pool import TreeSlots
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.plugin.write_back import WriteBack
from impress_sglang.serving.job_queue import JobQueue
from impress_sglang.serving.load_jobs import JobLoader, JobState, LoadJob
from impress_sglang.serving.ranks import Agreement, Wish
from impress_sglang.serving.report import estimate_fields
from impress_sglang.serving.scheduling import QueueOrder, Serving
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.losses import Cause

logger = logging.getLogger(__name__)

# A request plans at most so many jobs that end without having brought anything.
MAX_TRIES = 3
# While all requests wait for jobs, the scheduler looks after so many seconds at the latest.
IDLE_SECONDS = 0.002
# While a batch runs, ranks agree on saves alone in one of so many passes: a vote takes 0.2 ms.
SAVES_EVERY = 8


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """What this rank would load for a request."""

    tracked: Known
    job: LoadJob | None
    proposal: Wish


class PrefixLoads:
    """The load jobs of one tree cache, and the requests that wait for them."""

    def __init__(self, requests: KnownRequests, scheduler: Any) -> None:
        """Begin without jobs, for a scheduler of SGLang's that is complete."""
        self._cache, self._planner = requests.cache, requests.planner
        self._service = service = requests.service
        self._tracked, self._ranks, self._alone = (
            requests.by_rid,
            requests.ranks,
            requests.ranks.alone,
        )
        self._scheduler, self._requests = scheduler, requests
        self._passes = 0
        # What was planned and is not agreed on, by request.
        self._planned: dict[str, _Planned] = {}
        layers = requests.layers
        self._loader = JobLoader(layers(0)[0].device, layers, service.codec)
        slots = TreeSlots(requests, scheduler, lambda job: self._early_admission.put_back(job))
        self._min_tokens = service.config.min_prefix_tokens
        self._agreement = Agreement(requests.ranks)
        self.jobs: JobQueue[Known] = JobQueue(
            *(slots, self._loader, self._note_end, self._after_job),
            *(self._min_tokens, self._agreement.now),
        )
        self._early_admission = LateStart(requests, scheduler, self.jobs, slots)
        schedule = service.config.schedule
        self.order = None if schedule == OFF else QueueOrder(schedule, self._serving)
        """None if the queue is not reordered."""

    def plan(self, tracked: Known) -> None:
        """Plan what is to be loaded for a queued request; join or begin a job for it."""
        tracked.planned = True
        # What it used instead may be gone.
        self._requests.lower_bits(tracked)
        req, key, not_served = tracked.req, key_of(tracked.req), tracked.report["not_served"]
        if tracked.tries >= MAX_TRIES or not_served is not None or len(key) < self._min_tokens:
            return
        if self._alone and not self._planner.looks_for(len(key)):
            return
        tracked.found = resident = match_resident(self._cache, key).device_prefix_len
        tokens = as_tokens(key.raw_token_ids())
        job, proposal, num_missing = (
            self._plan_of(tracked, tokens, resident),
            Wish(),
            len(tokens) - resident,
        )
        if job is not None:
            patience = self._service.estimator.computing_seconds(resident, num_missing)
            proposal = Wish(job.stop, job.loads, patience)
        planned = _Planned(tracked, job, proposal)
        if self._alone:
            self._begin(planned, proposal)
        elif num_missing >= self._min_tokens:
            self._planned[req.rid] = planned

    def _plan_of(self, tracked: Known, tokens: Tokens, resident: int) -> LoadJob | None:
        kv_class = tracked.kv_class
        return self._planner.plan(tracked.namespace, tracked.space, tokens, resident, kv_class)

    def _begin(self, planned: _Planned, proposal: Wish) -> None:
        """Do what was planned, as far as all ranks wish it: join or begin a job."""
        tracked, job = planned.tracked, planned.job
        if job is None or proposal.stop - job.start < self._min_tokens:
            return
        tracked.report.update(estimate_fields(job.estimate, loads=proposal.loads))
        if not proposal.loads:
            # Otherwise what is not loaded because reads were slow would never be loaded again.
            self._loader.measure(job.store, job.spans[:1], exact=tracked.kv_class.exact)
            return
        if proposal.stop < job.stop:
            job = self._planner.cut(job, proposal.stop)
        job.store.tree.touch(job.match)
        self._service.lookahead.wait(tracked.rid, (*job.spans, *job.behind))
        tracked.patience = proposal.patience
        tracked.stored_tokens, tracked.read_seconds = job.stop, job.estimate.io
        self.jobs.join(tracked, job)

    def poll(self, saves: WriteBack) -> None:
        """Once per pass: do what all ranks agree on, and give slots to jobs."""
        if self._votes(saves):
            self._loader.wake.clear()
            slow, wishes = (
                self._slow(),
                {planned: planned.proposal for planned in self._planned.values()},
            )
            agreed = self._agreement.agree(wishes, self.jobs.begun, slow, saves.over())
            saves.release(agreed.saves)
            for job in agreed.slow:
                if job.slots is not None:
                    # Where another rank finds computing faster, nothing is known of it.
                    self._compute_instead(job, *slow.get(job, (0.0, 0.0)))
            for planned, proposal in agreed.wishes.items():
                # In a pipeline it may have been planned again since, or be gone.
                rid = planned.tracked.rid
                if self._planned.get(rid) is planned:
                    self._begin(self._planned.pop(rid), proposal)
            # Also without jobs: what they brought may be held.
            queue = (self._tracked.get(req.rid) for req in self._scheduler.waiting_queue)
            self.jobs.poll((tracked for tracked in queue if tracked is not None), agreed.ended)
            self._raise_bits()
        self._early_admission.poll()

    def _votes(self, saves: WriteBack) -> bool:
        """Whether ranks vote in this pass, as they must; that is the same on all of them."""
        if self._agreement.is_open or self._planned or self.jobs.active:
            return True
        busy = not self._scheduler.running_batch.is_empty()
        self._passes = (self._passes + 1) % SAVES_EVERY if saves and busy else 0
        return bool(saves) and not self._passes

    def may_run(self, tracked: Known) -> bool:
        """Whether a request may be admitted now; plans it again if what was planned is gone."""
        if tracked.job is None and not tracked.planned:
            self.plan(tracked)
        if self._early_admission.is_blocked(tracked):
            return False
        if not self.jobs.waits(tracked) and self._has_lost(tracked):
            self.plan(tracked)
        if tracked.rid in self._planned:
            return False
        # On several ranks a pass would have to fail on all of them.
        return not self.jobs.waits(tracked) or (
            self._alone and self._early_admission.may_start(tracked)
        )

    def end_waiting(self, tracked: Known) -> None:
        """Note that a request was admitted, or is gone."""
        rid = tracked.rid
        self._planned.pop(rid, None)
        self.jobs.leave(tracked)
        if self.order is not None:
            self.order.forget(rid)
        self._service.lookahead.stop_waiting(rid)

    def end_pass(self, tracked: Known) -> None:
        """Tell of the reads of a job that a request did not wait for; its pass is over."""
        job, tracked.early_job = tracked.early_job, None
        if job is not None:
            job.done.wait(IDLE_SECONDS)
            tracked.layer_wait_seconds += job.gated
            # On an accelerator, passes wait on its stream.
            tracked.timing_invalid = tracked.timing_invalid or bool(job.events)
            self._requests.report_reads(tracked, job)

    def rest(self) -> bool:
        """Wait a little for jobs, if there are any; returns whether there are."""
        if self.jobs.jobs and not self.jobs.computing:
            self._loader.wake.wait(IDLE_SECONDS)
        return bool(self.jobs.jobs)

    def drop_all(self) -> None:
        """Drop all jobs and plans."""
        for tracked in self._tracked.values():
            tracked.planned = False
            # What was found in a store ends with it.
            tracked.why_no_blend, tracked.blends = None, True
        self._planned.clear()
        self.jobs.drop_all()

    def wait_for_loader(self) -> None:
        """Wait until nothing is read for dropped jobs, unless the disk does not answer."""
        self.jobs.wait_for_loader(self._service.config.io_timeout)

    def close(self) -> None:
        """Drop all jobs, and end the loader's thread."""
        self.drop_all()
        self._loader.close(self._service.config.io_timeout)

    def _serving(self, rid: str) -> Serving | None:
        """What serving a waiting request takes, for the order of the queue."""
        tracked = self._tracked.get(rid)
        if tracked is None:
            return None
        total, job = len(tracked.req.full_untruncated_fill_ids), tracked.job
        length, stored = tracked.report["prefix_tokens"], 0 if job is None else len(job)
        work = RequestLengths(length, stored, total - length - stored)
        return Serving(
            self._service.estimator.estimate(work, tracked.read_seconds),
            length + stored >= self._min_tokens,
            0.0 if job is None else job.unread(self._service.shape.num_layers),
        )

    def check(self) -> None:
        """Check that jobs, and the requests that wait for them, agree."""
        for rid, tracked in self.jobs.waiters.items():
            assert self._tracked[rid] is tracked
        for job in self.jobs.jobs:
            assert all(tracked.job is job for tracked in job.waiters)

    def _has_lost(self, tracked: Known) -> bool:
        # What was resident may be evicted before the request is admitted.
        expected = max(tracked.brought.stop, tracked.found)
        if not expected or tracked.hold is not None:
            return False
        resident = match_resident(self._cache, key_of(tracked.req)).device_prefix_len
        if resident >= expected:
            return False
        if resident < tracked.brought.stop:
            tracked.brought = Brought()
        return True

    def _note_end(self, job: LoadJob) -> None:
        if isinstance(job.error, PrefixUnreadable) and self._service.opened is job.store:
            logger.warning("a stored prefix is computed: %s", job.error)
            job.store.report(job.error)
        elif job.state is JobState.FAILED and job.error is None and self._ranks.copies > 1:
            # A rank that could not read what this one wrote may never try it again.
            spans, tree = job.match.slice(job.start, job.stop), job.store.tree
            segments = dict.fromkeys(span.segment for span in reversed(spans))
            lost = [segment for segment in segments if tree.get(segment.segment_id) is segment]
            job.store.writes.discard(lost, Cause.DAMAGED)

    def _after_job(self, tracked: Known, job: LoadJob) -> None:
        if job.state is JobState.FAILED and not isinstance(job.error, SegmentUnreadable):
            # What is damaged the store itself knows.
            self._decline(tracked, job)
        if job.state is JobState.LOADED and not job.revoked:
            self._requests.report_load(tracked, job)
        self.plan(tracked)

    def _decline(self, tracked: Known, job: LoadJob) -> None:
        """Note that what was to be loaded could not be read now."""
        tracked.load_failed = True

    def _raise_bits(self) -> None:
        # What requests whose jobs have no room ask for would be another copy of what is resident.
        blocked = self.jobs.blocked
        # Those for which a prefix is kept resident, looked for once: the queue may be long.
        candidates = self._tracked.values() if blocked else ()
        users = [other for other in candidates if other.admitted or other.hold is not None]
        for tracked in blocked:
            blends = tracked.job is not None and tracked.job.computes
            if blends or tracked.kv_class.exact or tracked.req.session is not None:
                continue
            if self._requests.raise_bits(tracked, users):
                self.jobs.leave(tracked)

    def _slow(self) -> dict[LoadJob, tuple[float, float]]:
        """Jobs that take longer than computing: what each still takes, and what that takes."""
        slow, now = dict[LoadJob, tuple[float, float]](), time.monotonic()
        for job in self.jobs.loading if self._service.config.load != "always" else ():
            seconds_left = job.seconds_left(self._service.shape.num_layers, now)
            if seconds_left is None:
                seconds_left = now - job.began_at if job.began_at else 0.0
            took = self._service.estimator.faster_seconds(seconds_left, job.start, len(job))
            if took is not None:
                slow[job] = seconds_left, took
        return slow

    def _compute_instead(self, job: LoadJob, seconds_left: float, computing: float) -> None:
        """Let requests compute in `computing` seconds what a job would bring in `left` more."""
        logger.info("loading %d tokens is slower than computing them", len(job))
        for tracked in job.waiters:
            tracked.report.update(
                decision="recompute",
                estimated_load_ms=round(seconds_left * 1e3, 3),
                estimated_recompute_ms=round(computing * 1e3, 3),
            )
            tracked.tries = MAX_TRIES
        self.jobs.give_up(job)
