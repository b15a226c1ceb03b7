"""SGLang's scheduler around a job queue, as far as slots and order are concerned.

What it admits, allocates, evicts, retracts and puts back follows SGLang 0.5.23 (`PrefillAdder`,
`retract_decode`); what it asks of the queue follows `plugin.tree_cache`. A page has one token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from impress_sglang.serving.job_queue import JobQueue, Waiter
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
    """`plugin.slot_pool.TreeSlots` of a model of SGLang."""

    def __init__(self, model: SGLangModel) -> None:
        super().__init__(model.tree)
        self.model = model
        self.put_back = model.put_back

    def room(self) -> int:
        return self.model.available - self.model.promised(self.model.ratio)

    def need(self, waiter: Waiter, counted: set[object]) -> int:
        request = self.model.requests[waiter.rid]
        self.prompts[waiter.rid], self.new_tokens[waiter.rid] = request.tokens, request.left
        return super().need(waiter, counted)

    def hold_for(self, waiter: Waiter) -> Hold:
        self.prompts[waiter.rid] = self.model.requests[waiter.rid].tokens
        return super().hold_for(waiter)

    def is_idle(self) -> bool:
        return not any(own.admitted for own in self.model.requests.values())


class SGLangModel:
    """One scheduler; `ratio`: which share of their answers it reserves for running requests."""

    def __init__(self, ratio: float, rng: random.Random) -> None:
        self.ratio, self.rng = ratio, rng
        self.clock = Clock()
        self.tree = Tree(NUM_SLOTS)
        self.loader = StepLoader(self.tree, self._tick)
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

    def make_jobs(self, clock: Callable[[], float]) -> JobQueue:
        return JobQueue(self.pool, self.loader, self._note_end, self._after_job, LEAST, clock)

    def _tick(self) -> None:
        self.clock.now += STEP_SECONDS

    # Requests.

    def ask(self, prompt: Path, most: int, stops: int, patience: float | None) -> None:
        assert len(prompt) + most + 2 <= NUM_SLOTS and 1 <= stops <= most
        rid = f"r{self.count}"
        self.count += 1
        request = Request(rid, prompt, most, stops, Waiter(rid, patience))
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
        self.jobs.leave(request.waiter)

    def _requeue(self, request: Request) -> None:
        self._release(request)
        self._take_out(request, State.QUEUED)
        request.planned = False
        self.queue.append(request)
        self.full = False

    # Steps.

    def step(self) -> None:
        """One turn of the scheduler: a prefill if there is one, else a decode."""
        self._tick()
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
        for own in self.requests.values():
            own.planned = False
        self.jobs.drop_all()
        if self.jobs.wait_for_loader(self.rng.choice([0.0, 1.0])):
            assert all(job.done.is_set() for job in self.jobs.jobs)

    def _poll(self) -> None:
        """`check_hicache_events`."""
        self.polls += 1
        self.jobs.poll((own.waiter for own in self.queue), self._ended())
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
        return tokens + sum(int(own.left * ratio) + spare for own in requests)

    def _admit(self) -> list[tuple[Request, int]]:
        """Which requests compute how many tokens of their prompts now."""
        self.full = self.full and bool(self.running)
        if (self.full or not self.queue) and self.chunked is None:
            return []
        offset = sum(own.left * self.ratio for own in self.running)
        chunk_left, batch = CHUNK, []
        if self.chunked is not None:
            own = self.chunked
            most = min(chunk_left, int(self.available - offset))
            rest = len(own.tokens) - own.computed
            count = min(rest, most if most > 0 else chunk_left)
            batch.append((own, count))
            offset += count + 1 + (own.left if count == rest else 0)
            chunk_left -= count
        for own in list(self.queue):
            if chunk_left <= 0:
                break
            if len(self.running) + len(batch) >= MOST_RUNNING:
                self.full = True
                break
            if not self._may_start(own):
                continue
            path = self.tree.match(own.tokens[:-1])
            extend, lock = len(own.tokens) - len(path), self.tree.lock(path)
            if extend + own.left + 1 >= self.available - offset:
                self.tree.unlock(lock)
                self.full = bool(batch or self.running)
                break
            count = min(extend, chunk_left)
            batch.append((own, count))
            offset += count + 1 + (own.left if count == extend else 0)
            chunk_left -= count
            own.lock = lock
            self.queue.remove(own)
            if count < extend:
                own.state, self.chunked = State.CHUNKED, own
            else:
                own.state = State.RUNNING
            self.jobs.leave(own.waiter)
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
        for own, count in batch:
            slots = self._allocate(count)
            assert slots is not None, "SGLang ends: there is no room for what it has admitted"
            own.slots += slots
        self._wait_at_gate()
        for own, _ in batch:
            if own.state is State.BROKEN:
                continue
            self._attend(own)
            self._checkpoint(own, own.computed)
            if own.computed < len(own.tokens):
                continue
            if own is self.chunked:
                self.chunked = None
            own.state = State.RUNNING
            self.running.append(own)
            self._generate(own)

    def _decode(self) -> None:
        self._retract()
        self._wait_at_gate()
        for own in list(self.running):
            slots = self.tree.take(1)
            assert slots is not None
            own.slots += slots
            self._attend(own)
            self._generate(own)

    def _retract(self) -> None:
        """Put requests back until a token of each fits, with the shortest answers first."""
        while (slots := self._allocate(len(self.running))) is None:
            last = min(self.running, key=lambda own: len(own.output))
            alone = len(self.running) == 1
            self._requeue(last)
            if alone:
                # SGLang aborts it. That may be only for want of what others have.
                others = self.chunked is not None or any(
                    own.admitted for own in self.requests.values()
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
            for own in self._users_of(job):
                self._take_out(own, State.BROKEN)

    def _attend(self, own: Request) -> None:
        """Its pass: everything before its new tokens must be what it should be."""
        assert own.lock is not None
        start = len(own.lock.path)
        assert self.tree.written(own.lock.path), "it attends to what is not there"
        for stop, slot in enumerate(own.slots, start + 1):
            self.tree.contents[slot] = [own.tokens[:stop]] * LAYERS

    def _checkpoint(self, own: Request, stop: int) -> None:
        assert own.lock is not None
        path = own.tokens[:stop]
        self.tree.insert(path, len(own.lock.path), own.slots)
        own.slots = []
        lock = self.tree.lock(path)
        self.tree.unlock(own.lock)
        own.lock = lock

    def _generate(self, own: Request) -> None:
        own.output += (10_000 + 100 * int(own.rid[1:]) + len(own.output),)
        if len(own.output) >= own.stops:
            self._checkpoint(own, own.computed)
            self._release(own)
            self._end(own)

    # What the tree cache does.

    def _may_start(self, own: Request) -> bool:
        if own.waiter.job is None and (not own.planned or self._has_lost(own)):
            self.plan(own)
        if self.polls < own.not_before or self._is_blocked(own):
            return False
        return not self.jobs.waits(own.waiter) or self._starts_early(own)

    def plan(self, own: Request) -> None:
        own.planned = True
        stop = self._stored(own.tokens[:-1])
        resident = len(self.tree.match(own.tokens[:-1]))
        if own.waiter.tries >= MOST_TRIES or stop - resident < LEAST:
            return
        job = new_job(own.tokens[:stop], resident)
        self.jobs.join(own.waiter, job)

    def _stored(self, tokens: Path) -> int:
        return max((_common(tokens, own) for own in self.stored), default=0)

    def _has_lost(self, own: Request) -> bool:
        if not own.loaded_stop or own.waiter.hold is not None:
            return False
        if len(self.tree.match(own.tokens[:-1])) >= own.loaded_stop:
            return False
        own.loaded_stop = 0
        return True

    def _note_end(self, job: LoadJob) -> None:
        self.num_loaded += job.state is JobState.LOADED
        if job.state is JobState.FAILED and self.reports:
            lost = {p for p in self.loader.corrupt if tuple(job.tokens[: len(p)].tolist()) == p}
            self.stored = {own for own in self.stored if not any(own[: len(p)] == p for p in lost)}

    def _after_job(self, waiter: Waiter, job: LoadJob) -> None:
        own = self.requests[waiter.rid]
        assert own.state is State.QUEUED
        if job.state is JobState.LOADED and not job.revoked:
            assert self.tree.written(waiter.hold.path)
            assert waiter.hold.path == own.tokens[: len(waiter.hold.path)], "it is its own"
            assert len(waiter.hold.path) >= _common(own.tokens[:-1], tuple(job.tokens.tolist()))
            own.loaded_stop = job.stop
        self.plan(own)

    def _starts_early(self, own: Request) -> bool:
        job = own.waiter.job
        if job is None or job.done.is_set() or job.revoked:
            return False
        if job.early:
            return True
        if not self.early or job.slots is None or not job.layers:
            return False
        if len(own.tokens) - job.stop > CHUNK or self.pool.lacking(job) < len(job):
            return False
        self.pool.insert(job)
        job.early = True
        self.gate.append(job)
        self.num_early += 1
        return True

    def _is_blocked(self, own: Request) -> bool:
        return any(job is not own.waiter.job and self._shares(own, job) for job in self.gate)

    def _shares(self, own: Request, job: LoadJob) -> bool:
        stop = job.start + 1
        return own.tokens[:stop] == tuple(job.tokens[:stop].tolist())

    def _users_of(self, job: LoadJob) -> list[Request]:
        return [own for own in self.requests.values() if own.admitted and self._shares(own, job)]

    def put_back(self, job: LoadJob) -> None:
        for own in self._users_of(job):
            own.not_before = self.polls + 2
            self._requeue(own)

    # What always holds.

    def check(self) -> None:
        tree, jobs = self.tree, self.jobs
        check_queue(jobs, tree)
        owned = [*tree.free, *(node.slot for node in tree.nodes.values())]
        for own in self.requests.values():
            owned += own.slots
        for job in jobs.loading:
            assert job.slots is not None
            owned += job.slots.tolist()
        assert sorted(owned) == list(range(NUM_SLOTS)), "every slot has one owner"
        assert all(path[:-1] in tree.nodes for path in tree.nodes if len(path) > 1)

        holds = [own.lock for own in self.requests.values() if own.lock is not None]
        holds += self.other_holds()
        holds += [waiter.hold for waiter in jobs.waiters.values() if waiter.hold is not None]
        holds += [job.hold for job in jobs.jobs if job.early or job.slots is not None]
        assert sorted(map(id, holds)) == sorted(map(id, tree.holds)), "locks end with their owners"
        for rid in jobs.waiters:
            assert self.requests[rid].state is State.QUEUED, "nobody else waits"
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
        paths = [own.lock.path for own in self.requests.values() if own.lock is not None]
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
