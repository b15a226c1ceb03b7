"""SGLang's scheduler around a job queue, as far as slots and order are concerned.

What it admits, allocates, evicts, retracts and puts back follows SGLang 0.5.23 (`PrefillAdder`,
`retract_decode`); what it asks of the queue follows `plugin.tree_cache`. A page has one token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from impress_sglang.serving.job_queue import JobQueue
from impress_sglang.serving.load_jobs import JobState, LoadJob
from tests.unit.job_world import (
    LAYERS,
    Hold,
    Path,
    Pool,
    Request,
    State,
    StepLoader,
    Tree,
    check_queue,
    new_job,
)
from tests.unit.waiting import Clock

NUM_SLOTS = 24
CHUNK = 6
LEAST = 2
MOST_RUNNING = 3
MOST_TRIES = 3
STEP_SECONDS = 0.25


class ModelPool(Pool):
    """`plugin.job_slots.JobSlots` of a model of SGLang."""

    def __init__(self, model: SGLangModel) -> None:
        super().__init__(model.tree)
        self.model, self.retract = model, model.retract

    def room(self) -> int:
        return self.model.available - self.model.promised(self.model.ratio)

    def is_idle(self) -> bool:
        return not any(request.admitted for request in self.model.requests.values())


class SGLangModel:
    """One scheduler; `ratio`: which share of their answers it reserves for running requests."""

    alone = True

    def __init__(self, ratio: float, rng: random.Random) -> None:
        self.ratio, self.rng = ratio, rng
        self.clock = Clock()
        self.tree = Tree(NUM_SLOTS)
        self.loader = StepLoader(self.tree, self.clock)
        self.requests: dict[str, Request] = {}
        """Those that have not ended."""
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.gate: list[LoadJob] = []
        self.stored: set[Path] = set()
        self.reports = True
        """Whether the store learns what cannot be read."""
        self.early = False
        """Whether requests may be admitted before their jobs are done."""
        self.num_early = self.num_loaded = 0
        self.full = False
        self.polls = self.count = 0
        self.pool = ModelPool(self)
        self.jobs = self.make_jobs(self.clock)

    def make_jobs(self, clock: Callable[[], float]) -> JobQueue[Request]:
        return JobQueue(self.pool, self.loader, self._note_end, self._after_job, LEAST, clock)

    # Requests.

    def ask(self, prompt: Path, max_tokens: int, stops: int, patience: float | None) -> None:
        assert len(prompt) + max_tokens + 2 <= NUM_SLOTS and 1 <= stops <= max_tokens
        rid = f"r{self.count}"
        self.count += 1
        request = Request(rid, patience, prompt=prompt, max_tokens=max_tokens, stops=stops)
        self.requests[rid] = request
        self.queue.append(request)
        self.plan(request)

    def abort(self, request: Request) -> None:
        """As a client does, at any time; one that is to be put back ends when it is."""
        if request.state is State.BROKEN:
            return
        if request.state is State.QUEUED:
            self.queue.remove(request)
        self._release(request)
        self._end(request)

    def _take_out(self, request: Request, state: State) -> None:
        """It is in no pass any more."""
        if request in self.running:
            self.running.remove(request)
        if request is self.chunked:
            self.chunked = None
        request.state = state

    def _end(self, request: Request) -> None:
        self._take_out(request, State.ENDED)
        del self.requests[request.rid]
        self.full = False

    def _release(self, request: Request) -> None:
        """Give back what it has, without inserting it."""
        self.tree.give(request.slots)
        request.slots = []
        if request.lock is not None:
            self.tree.unlock(request.lock)
            request.lock = None
        self.jobs.leave(request)

    def _requeue(self, request: Request) -> None:
        self._release(request)
        self._take_out(request, State.QUEUED)
        request.planned = False
        self.queue.append(request)
        self.full = False

    # Steps.

    def step(self) -> None:
        """One turn of the scheduler: a prefill if there is one, else a decode."""
        self.clock.now += STEP_SECONDS
        self._poll()
        self.check()
        batch = self._admit()
        self.check()
        if batch:
            self._prefill(batch)
        elif self.running:
            self._decode()
        self.check()

    @property
    def is_done(self) -> bool:
        return not (self.requests or self.jobs or self.other_holds())

    def drop_all(self) -> None:
        """Before other weights; each waits for its own loader."""
        for request in self.requests.values():
            request.planned = False
        self.jobs.drop_all()
        if self.jobs.wait_for_loader(self.rng.choice([0.0, 1.0]), alone=self.alone):
            assert all(job.done.is_set() for job in self.jobs.jobs)
            assert not (self.alone and self.jobs), "SGLang may flush"

    def _poll(self) -> None:
        """`check_hicache_events`."""
        self.polls += 1
        self.jobs.poll(self.queue, self._ended())
        self.gate = [job for job in self.gate if job in self.jobs.jobs]

    def _ended(self) -> Sequence[LoadJob]:
        return [job for job in self.jobs.begun if job.done.is_set()]

    @property
    def available(self) -> int:
        return len(self.tree.free) + self.tree.evictable

    def promised(self, ratio: float, spare: int = 1) -> int:
        """What it counts on: the rest of a prompt, and answers."""
        tokens, requests = 0, list(self.running)
        if self.chunked is not None:
            requests.append(self.chunked)
            tokens = len(self.chunked.tokens) - self.chunked.computed
        return tokens + sum(int(request.left * ratio) + spare for request in requests)

    def _admit(self) -> list[tuple[Request, int]]:
        """Which requests compute how many tokens of their prompts now."""
        self.full = self.full and bool(self.running)
        if (self.full or not self.queue) and self.chunked is None:
            return []
        offset = sum(request.left * self.ratio for request in self.running)
        chunk_left, batch = CHUNK, []
        if self.chunked is not None:
            request = self.chunked
            max_count = min(chunk_left, int(self.available - offset))
            rest = len(request.tokens) - request.computed
            count = min(rest, max_count if max_count > 0 else chunk_left)
            batch.append((request, count))
            offset += count + 1 + (request.left if count == rest else 0)
            chunk_left -= count
        for request in list(self.queue):
            if chunk_left <= 0:
                break
            if len(self.running) + len(batch) >= MOST_RUNNING:
                self.full = True
                break
            if not self._may_start(request):
                continue
            path = self.tree.match(request.tokens[:-1])
            extend, lock = len(request.tokens) - len(path), self.tree.lock(path)
            if extend + request.left + 1 >= self.available - offset:
                self.tree.unlock(lock)
                self.full = bool(batch or self.running)
                break
            count = min(extend, chunk_left)
            batch.append((request, count))
            offset += count + 1 + (request.left if count == extend else 0)
            chunk_left -= count
            request.lock = lock
            self.queue.remove(request)
            if count < extend:
                request.state, self.chunked = State.CHUNKED, request
            else:
                request.state = State.RUNNING
            self.jobs.leave(request)
            if self.available - offset <= 0:
                self.full = True
                break
        return batch

    def _allocate(self, count: int) -> list[int] | None:
        """`evict_for_alloc`, and then the slots."""

        def missing() -> int:
            self.tree.evict(count - len(self.tree.free))
            return count - len(self.tree.free)

        if missing() > 0:
            self.jobs.make_room(missing)
        return self.tree.take(count)

    def _prefill(self, batch: list[tuple[Request, int]]) -> None:
        for request, count in batch:
            slots = self._allocate(count)
            assert slots is not None, "SGLang ends: there is no room for what it has admitted"
            request.slots += slots
        self._wait_at_gate()
        for request, _ in batch:
            if request.state is State.BROKEN:
                continue
            self._attend(request)
            self._checkpoint(request, request.computed)
            if request.computed < len(request.tokens):
                continue
            if request is self.chunked:
                self.chunked = None
            request.state = State.RUNNING
            self.running.append(request)
            self._generate(request)

    def _decode(self) -> None:
        self._retract()
        self._wait_at_gate()
        for request in list(self.running):
            slots = self.tree.take(1)
            assert slots is not None
            request.slots += slots
            self._attend(request)
            self._generate(request)

    def _retract(self) -> None:
        """Put requests back until a token of each fits, with the shortest answers first."""
        while (slots := self._allocate(len(self.running))) is None:
            last = min(self.running, key=lambda request: len(request.output))
            alone = len(self.running) == 1
            self._requeue(last)
            if alone:
                # SGLang aborts it. That may be only for want of what others have.
                others = self.chunked is not None or any(
                    request.admitted for request in self.requests.values()
                )
                assert others or self.gate, "the last request is aborted"
                return
        self.tree.give(slots)

    def _wait_at_gate(self) -> None:
        """A pass waits for the layers of early jobs, but not for ever."""
        for job in self.gate:
            if job.revoked:
                continue
            if not self.loader.stalls:
                self.loader.run(LAYERS * (1 + len(self.loader.begun)))
            if job.layers == LAYERS:
                continue
            job.revoke()
            for request in self._users_of(job):
                self._take_out(request, State.BROKEN)

    def _attend(self, request: Request) -> None:
        """Its pass: everything before its new tokens must be what it should be."""
        assert request.lock is not None
        start = len(request.lock.path)
        assert self.tree.written(request.lock.path), "it attends to what is not there"
        for stop, slot in enumerate(request.slots, start + 1):
            self.tree.contents[slot] = [request.tokens[:stop]] * LAYERS

    def _checkpoint(self, request: Request, stop: int) -> None:
        assert request.lock is not None
        path = request.tokens[:stop]
        self.tree.insert(path, len(request.lock.path), request.slots)
        request.slots = []
        lock = self.tree.lock(path)
        self.tree.unlock(request.lock)
        request.lock = lock

    def _generate(self, request: Request) -> None:
        request.output += (10_000 + 100 * int(request.rid[1:]) + len(request.output),)
        if len(request.output) >= request.stops:
            self._checkpoint(request, request.computed)
            self._release(request)
            self._end(request)

    # What the tree cache does.

    def _may_start(self, request: Request) -> bool:
        if request.job is None and (not request.planned or self._has_lost(request)):
            self.plan(request)
        if self.polls < request.retry_poll or self._is_blocked(request):
            return False
        return not self.jobs.waits(request) or self._starts_early(request)

    def plan(self, request: Request) -> None:
        request.planned = True
        stop = self._stored(request.tokens[:-1])
        resident = len(self.tree.match(request.tokens[:-1]))
        if request.tries >= MOST_TRIES or stop - resident < LEAST:
            return
        self.jobs.join(request, new_job(request.tokens[:stop], resident))

    def _stored(self, tokens: Path) -> int:
        return max((_common(tokens, path) for path in self.stored), default=0)

    def _has_lost(self, request: Request) -> bool:
        if not request.loaded_stop or request.hold is not None:
            return False
        if len(self.tree.match(request.tokens[:-1])) >= request.loaded_stop:
            return False
        request.loaded_stop = 0
        return True

    def _note_end(self, job: LoadJob) -> None:
        self.num_loaded += job.state is JobState.LOADED
        if job.state is JobState.FAILED and self.reports:
            lost = {p for p in self.loader.corrupt if tuple(job.tokens[: len(p)].tolist()) == p}
            self.stored = {s for s in self.stored if not any(s[: len(p)] == p for p in lost)}

    def _after_job(self, request: Request, job: LoadJob) -> None:
        assert request.state is State.QUEUED
        if job.state is JobState.LOADED and not job.revoked:
            assert self.tree.written(request.hold.path)
            assert request.hold.path == request.tokens[: len(request.hold.path)], "it is its own"
            assert len(request.hold.path) >= _common(
                request.tokens[:-1], tuple(job.tokens.tolist())
            )
            request.loaded_stop = job.stop
        self.plan(request)

    def _starts_early(self, request: Request) -> bool:
        job = request.job
        if job is None or job.done.is_set() or job.revoked:
            return False
        if job.early:
            return True
        if not self.early or job.slots is None or not job.layers:
            return False
        if len(request.tokens) - job.stop > CHUNK or self.pool.lacking(job) < len(job):
            return False
        self.pool.insert(job)
        job.early = True
        self.gate.append(job)
        self.num_early += 1
        return True

    def _is_blocked(self, request: Request) -> bool:
        return any(j is not request.job and self._shares(request, j) for j in self.gate)

    def _shares(self, request: Request, job: LoadJob) -> bool:
        stop = job.start + 1
        return request.tokens[:stop] == tuple(job.tokens[:stop].tolist())

    def _users_of(self, job: LoadJob) -> list[Request]:
        return [r for r in self.requests.values() if r.admitted and self._shares(r, job)]

    def retract(self, job: LoadJob) -> None:
        for request in self._users_of(job):
            request.retry_poll = self.polls + 2
            self._requeue(request)

    # What always holds.

    def check(self) -> None:
        tree, jobs = self.tree, self.jobs
        check_queue(jobs)
        owned = [*tree.free, *(node.slot for node in tree.nodes.values())]
        for request in self.requests.values():
            owned += request.slots
        for job in jobs.loading:
            assert job.slots is not None
            owned += job.slots.tolist()
        assert sorted(owned) == list(range(NUM_SLOTS)), "every slot has one owner"
        assert all(path[:-1] in tree.nodes for path in tree.nodes if len(path) > 1)

        holds = [request.lock for request in self.requests.values() if request.lock is not None]
        holds += self.other_holds()
        holds += [request.hold for request in jobs.waiters.values() if request.hold is not None]
        holds += [job.hold for job in jobs.jobs if job.early or job.slots is not None]
        assert sorted(map(id, holds)) == sorted(map(id, tree.holds)), "locks end with their owners"
        for request in jobs.waiters.values():
            assert request.state is State.QUEUED, "nobody else waits"
        self._check_promises()

    def other_holds(self) -> list[Hold]:
        """Locks that are neither of requests nor of jobs."""
        return []

    def _check_promises(self) -> None:
        if self.ratio == 1.0:
            assert self.available >= self.promised(1.0, 0), "room that was promised is taken"
        if self.chunked is None:
            return
        rest = len(self.chunked.tokens) - self.chunked.computed
        paths = [r.lock.path for r in self.requests.values() if r.lock is not None]
        paths += [job.hold.path for job in self.jobs.jobs if job.early]
        kept = {path[:stop] for path in paths for stop in range(1, len(path) + 1)}
        after = (
            len(self.tree.free)
            + len(self.tree.nodes)
            - len(kept)
            + sum(map(len, self.jobs.loading))
        )
        assert after >= rest, "what was promised cannot be had"


def _common(one: Path, other: Path) -> int:
    same = itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    return len([*same])
