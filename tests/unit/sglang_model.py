"""SGLang's scheduler around a job queue, as far as slots and order are concerned.

What it admits, allocates, evicts, retracts and puts back follows SGLang 0.5.23 (`PrefillAdder`,
`retract_decode`); what it asks of the queue, and writes, follows `plugin.prefix_loads` and
`plugin.prefix_saves`, on one of several ranks or alone. A page has one token.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

from impress_sglang.serving.job_queue import JobQueue
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.serving.ranks import Agreement, LoadProposal, Ranks
from tests.unit import job_world
from tests.unit.job_world import LAYERS, Hold, Path, Pool, Request, State, StepLoader, Tree, new_job
from tests.unit.waiting import Clock

NUM_SLOTS = 24
CHUNK = 6
LEAST = 2
MOST_RUNNING = 3
MOST_TRIES = 3
STEP_SECONDS = 0.25


@dataclasses.dataclass(eq=False)
class Save:
    """Slots of a path that are locked until no rank writes them."""

    path: Path
    hold: Hold
    steps: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a rank would do for a request, as often as it is planned."""

    request: Request
    wish: LoadProposal


class ModelPool(Pool):
    """`plugin.job_slots.JobSlots` of a model of SGLang."""

    def __init__(self, model: SGLangModel) -> None:
        super().__init__(model.tree)
        self.model = model

    def room(self) -> int:
        return self.model.available - self.model.promised(self.model.ratio)

    def is_idle(self) -> bool:
        return not any(request.admitted for request in self.model.requests.values())


class SGLangModel:
    """One scheduler; `ratio`: which share of their answers it reserves for running requests."""

    def __init__(self, ratio: float, rng: random.Random, ranks: Ranks) -> None:
        self.ratio, self.rng, self.ranks = ratio, rng, ranks
        self.clock, self.tree = Clock(), Tree(NUM_SLOTS)
        self.loader = StepLoader(self.tree, self.clock)
        self.requests: dict[str, Request] = {}
        """Those that have not ended."""
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.stored: set[Path] = set()
        self.reports = rng.random() < 0.7
        """Whether the store learns what cannot be read."""
        self.planned: dict[str, Plan] = {}
        self.saves: list[Save] = []
        self.num_loaded = self.count = 0
        self.full = False
        self.agreement = Agreement(ranks, self.clock)
        self.jobs: JobQueue[Request] = JobQueue(
            *(ModelPool(self), self.loader, self._note_end, self._after_job),
            *(LEAST, self.agreement.now),
        )

    # Requests.

    def ask(self, prompt: Path, max_tokens: int, stops: int) -> None:
        assert len(prompt) + max_tokens + 2 <= NUM_SLOTS and 1 <= stops <= max_tokens
        rid = f"r{self.count}"
        self.count += 1
        request = Request(rid, prompt=prompt, max_tokens=max_tokens, stops=stops)
        self.requests[rid] = request
        self.queue.append(request)
        self.plan(request)

    def abort(self, request: Request) -> None:
        """As a client does, at any time."""
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
        if request.run_lock is not None:
            self.tree.unlock(request.run_lock)
            request.run_lock = None
        self.planned.pop(request.rid, None)
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
        return not (self.requests or self.jobs or self.saves)

    def drop_all(self) -> None:
        """Before other weights; each waits for its own loader."""
        for request in self.requests.values():
            request.planned = False
        self.planned.clear()
        self.jobs.drop_all()
        alone = self.ranks.alone
        if self.jobs.wait_for_loader(self.rng.choice([0.0, 1.0]), alone=alone):
            assert all(job.done.is_set() for job in self.jobs.jobs)
            assert not (alone and self.jobs), "SGLang may flush"

    @property
    def available(self) -> int:
        """What only saves have locked counts as room."""
        for save in self.saves:
            self.tree.unlock(save.hold)
        room = len(self.tree.free) + self.tree.evictable
        for save in self.saves:
            save.hold = self.tree.lock(save.path)
        return room

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
            request.run_lock = lock
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
        """`evict_for_alloc`, and then the slots: what is written goes first, then jobs."""

        def missing() -> int:
            self.tree.evict(count - len(self.tree.free))
            return count - len(self.tree.free)

        while missing() > 0 and self.saves:
            self.tree.unlock(self.saves.pop().hold)
        if missing() > 0:
            self.jobs.make_room(missing)
        return self.tree.take(count)

    def _prefill(self, batch: list[tuple[Request, int]]) -> None:
        for request, count in batch:
            slots = self._allocate(count)
            assert slots is not None, "SGLang ends: there is no room for what it has admitted"
            request.slots += slots
        for request, _ in batch:
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
            self._requeue(last)
            if not self.running:
                # SGLang aborts it. That may be only for want of what others have.
                assert self.chunked is not None, "the last request is aborted"
                return
        self.tree.give(slots)

    def _attend(self, request: Request) -> None:
        """Its pass: everything before its new tokens must be what it should be."""
        assert request.run_lock is not None
        start = len(request.run_lock.path)
        assert self.tree.written(request.run_lock.path), "it attends to what is not there"
        for stop, slot in enumerate(request.slots, start + 1):
            self.tree.contents[slot] = [request.tokens[:stop]] * LAYERS

    def _checkpoint(self, request: Request, stop: int) -> None:
        assert request.run_lock is not None
        path = request.tokens[:stop]
        self.tree.insert(path, len(request.run_lock.path), request.slots)
        request.slots = []
        lock = self.tree.lock(path)
        self.tree.unlock(request.run_lock)
        request.run_lock = lock

    def _generate(self, request: Request) -> None:
        if not request.output:
            assert request.run_lock is not None
            path = request.run_lock.path
            steps = 0 if path in self.stored else self.rng.randrange(1, 9)
            self.saves.append(Save(path, self.tree.lock(path), steps))
        request.output += (10_000 + 100 * int(request.rid[1:]) + len(request.output),)
        if len(request.output) >= request.stops:
            self._checkpoint(request, request.computed)
            self._release(request)
            self._end(request)

    # What the tree cache does.

    def _poll(self) -> None:
        for save in self.saves:
            if save.steps:
                save.steps -= 1
                if not save.steps and self.rng.random() < 0.9:
                    self.stored.add(save.path)
                break
        if self.agreement.is_open or self.planned or self.jobs.active or self.saves:
            self.jobs.poll(self.queue, self._agreed())

    def _agreed(self) -> Sequence[LoadJob]:
        """Carry out what ranks agree on; returns the jobs that have ended."""
        slow = {job for job in self.jobs.loading if self.rng.random() < 0.02}
        over = list(itertools.takewhile(lambda save: save.steps <= 0, self.saves))
        wishes = {plan: plan.wish for plan in self.planned.values()}
        agreed = self.agreement.agree(wishes, self.jobs.started, slow, over)
        for save in agreed.ended_saves:
            if save in self.saves:
                self.tree.unlock(save.hold)
                self.saves.remove(save)
        for job in agreed.slow:
            if job.owned_slots is not None:
                for request in job.waiters:
                    request.num_failures = MOST_TRIES
                self.jobs.give_up(job)
        for plan, wish in agreed.proposals.items():
            if self.planned.get(plan.request.rid) is plan:
                del self.planned[plan.request.rid]
                self._begin(plan.request, wish)
        return agreed.ended

    def _may_start(self, request: Request) -> bool:
        if request.job is None and (not request.planned or self._has_lost(request)):
            self.plan(request)
        return not self.jobs.must_wait(request) and request.rid not in self.planned

    def plan(self, request: Request) -> None:
        request.planned = True
        tokens = request.tokens[:-1]
        resident = len(self.tree.match(tokens))
        if request.num_failures >= MOST_TRIES or len(tokens) - resident < LEAST:
            return
        stop = max((_common(tokens, path) for path in self.stored), default=0)
        loads, patience = self.rng.random() < 0.9, self.rng.choice([None, 0.0, 3.0])
        wish = LoadProposal(stop, loads, patience) if stop else LoadProposal()
        if self.ranks.alone:
            self._begin(request, wish)
        else:
            self.planned[request.rid] = Plan(request, wish)

    def _begin(self, request: Request, wish: LoadProposal) -> None:
        resident = len(self.tree.match(request.tokens[:-1]))
        if wish.worthwhile and wish.stop - resident >= LEAST:
            request.compute_seconds = wish.compute_seconds
            self.jobs.join(request, new_job(request.tokens[: wish.stop], resident))

    def _has_lost(self, request: Request) -> bool:
        if not request.loaded_stop or request.lock is not None:
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
            assert self.tree.written(request.lock.path)
            assert request.lock.path == request.tokens[: len(request.lock.path)], "it is its own"
            assert len(request.lock.path) >= _common(
                request.tokens[:-1], tuple(job.tokens.tolist())
            )
            request.loaded_stop = job.stop
        self.plan(request)

    # What always holds.

    def check(self) -> None:
        tree, jobs = self.tree, self.jobs
        job_world.check_queue(jobs)
        owned = [*tree.free, *(node.slot for node in tree.nodes.values())]
        for request in self.requests.values():
            owned += request.slots
        for job in jobs.loading:
            assert job.owned_slots is not None
            owned += job.owned_slots.tolist()
        assert sorted(owned) == list(range(NUM_SLOTS)), "every slot has one owner"
        assert all(path[:-1] in tree.nodes for path in tree.nodes if len(path) > 1)

        holds = [
            request.run_lock for request in self.requests.values() if request.run_lock is not None
        ]
        holds += [save.hold for save in self.saves]
        holds += [request.lock for request in jobs.waiters.values() if request.lock is not None]
        holds += [job.lock for job in jobs.loading]
        assert sorted(map(id, holds)) == sorted(map(id, tree.holds)), "locks end with their owners"
        for request in jobs.waiters.values():
            assert request.state is State.QUEUED, "nobody else waits"
        self._check_promises()

    def _check_promises(self) -> None:
        if self.ratio == 1.0:
            assert self.available >= self.promised(1.0, 0), "room that was promised is taken"
        if self.chunked is None:
            return
        rest = len(self.chunked.tokens) - self.chunked.computed
        paths = [r.run_lock.path for r in self.requests.values() if r.run_lock is not None]
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
