"""The job queue: who gets slots when, what is held until when, and what becomes of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from impress_sglang.serving import job_queue
from impress_sglang.serving.job_queue import JobQueue, overlapping
from impress_sglang.serving.load_jobs import JobState, LoadJob
from tests.unit.job_world import LAYERS, Path, Pool, Request, StepLoader, Tree, check_queue, new_job
from tests.unit.store_factory import prompt
from tests.unit.waiting import Clock

LEAST = 2
LOADING, WAITING = JobState.LOADING, JobState.WAITING


class Desk:
    """A queue of requests before a pool of 20 slots, and what their jobs came to."""

    def __init__(self) -> None:
        self.clock, self.tree = Clock(), Tree(20)
        self.pool, self.loader = Pool(self.tree), StepLoader(self.tree, self.clock)
        self.ended: list[LoadJob] = []
        self.replanned: list[tuple[str, LoadJob]] = []
        self.again: dict[str, LoadJob] = {}
        """Jobs that requests get when theirs has ended."""
        self.queue: list[Request] = []
        self.jobs: JobQueue[Request] = JobQueue(
            self.pool, self.loader, self.ended.append, self._replan, LEAST, self.clock
        )

    def _replan(self, request: Request, job: LoadJob) -> None:
        assert request.job is None
        assert job.target_slots is None or self.ended[-1] is job, "the end of a job is told first"
        self.replanned.append((request.rid, job))
        if (new := self.again.pop(request.rid, None)) is not None:
            self.jobs.join(request, new)

    def ask(
        self,
        rid: str,
        prompt: Path,
        job: LoadJob | None = None,
        *,
        new: int = 0,
        patience: float | None = None,
    ) -> Request:
        """A request is queued, with a job or none."""
        request = Request(rid, patience, prompt=prompt, max_tokens=new)
        self.queue.append(request)
        if job is not None:
            self.jobs.join(request, job)
        return request

    def leave(self, request: Request) -> None:
        """It is admitted, or gone."""
        self.queue.remove(request)
        self.jobs.leave(request)

    def poll(self) -> None:
        self.jobs.poll(self.queue, [job for job in self.jobs.started if job.done.is_set()])
        check_queue(self.jobs)

    def load(self) -> None:
        """Let the loader do all it was asked to, and take that in."""
        self.loader.run()
        self.poll()

    @property
    def waiting(self) -> list[str]:
        return [request.rid for request in self.queue if self.jobs.must_wait(request)]

    def check_nothing_is_left(self) -> None:
        assert not self.jobs.active and not self.tree.holds and not any(self.jobs.loading)
        assert len(self.tree.free) + len(self.tree.nodes) == self.tree.num_slots


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_who_needs_more_than_what_became_resident_gets_another_job(desk: Desk) -> None:
    """Also if it had joined the job of a shorter request."""
    job, more = new_job(prompt(1, 8)), new_job(prompt(1, 12), 8)
    desk.ask("a", prompt(1, 9), job)
    desk.ask("b", prompt(1, 13), job)
    desk.again["b"] = more
    desk.tree.insert(prompt(1, 8), 0, desk.tree.take(8) or ())
    desk.poll()
    assert desk.replanned == [("a", job), ("b", job)] and not desk.ended
    assert desk.waiting == ["b"] and more.state is LOADING, "begun by the same poll"
    desk.load()
    assert more.state is JobState.LOADED and len(desk.tree.nodes) == 12


def test_slots_are_given_in_the_order_of_the_queue(desk: Desk) -> None:
    jobs = [new_job(prompt(number, 7)) for number in range(3)]
    for number, job in enumerate(jobs):
        desk.ask(str(number), prompt(number, 8), job)
    desk.queue.reverse()
    desk.poll()
    assert [job.state for job in jobs] == [WAITING, LOADING, LOADING]


def test_nobody_gets_what_those_before_need(desk: Desk) -> None:
    small = new_job(prompt(2, 2))
    before = desk.ask("a", prompt(1, 10), new=5)
    desk.ask("b", prompt(2, 3), small)
    desk.poll()
    assert small.state is WAITING, "10 + 5 + 1, and 3 + 1, are 20"
    assert desk.waiting == ["b"]
    before.max_tokens = 4
    desk.poll()
    assert small.state is LOADING


def test_nothing_is_held_against_a_request_that_came_to_the_head(desk: Desk) -> None:
    """No job waits: SGLang would wait for room for ever."""
    desk.ask("b", prompt(2, 7), new_job(prompt(2, 6)))
    desk.poll()
    desk.load()
    head = desk.ask("a", prompt(1, 9), new=3)
    desk.queue.reverse()
    desk.poll()
    assert len(desk.tree.holds) == 1, "9 + 3 + 1, and 6, are 19"
    head.max_tokens = 4
    desk.poll()
    assert not desk.tree.holds, "SGLang wants room for more than it needs"


class TestPassing:
    """A request that waits for room is passed by others, but not for ever."""

    def busy(self, desk: Desk, patience: float | None = None) -> LoadJob:
        """Somebody needs all but 4 tokens, and a job waits for more."""
        desk.pool.promised, desk.pool.idle = 16, False
        job = new_job(prompt(1, 6))
        blocked, other = desk.ask("a", prompt(1, 7), job, patience=patience), desk.ask("b", (7, 8))
        assert blocked.blocked_at is None
        desk.poll()
        assert blocked.blocked_at is not None and other.blocked_at is None
        return job

    @pytest.mark.parametrize(
        ("patience", "seconds"), [(None, job_queue.DEFAULT_PATIENCE), (0.25, 0.25), (7.0, 7.0)]
    )
    def test_for_as_long_as_it_takes_itself(
        self, desk: Desk, patience: float | None, seconds: float
    ) -> None:
        job, (blocked, _) = self.busy(desk, patience), desk.queue
        assert desk.waiting == ["a"], "b may pass"
        assert desk.jobs.blocked == [blocked]
        desk.clock.now += seconds
        desk.poll()
        assert desk.waiting == ["a"]
        desk.clock.now += 0.001
        desk.poll()
        assert desk.waiting == ["a", "b"], "b may not"
        desk.pool.promised = 0
        desk.poll()
        assert job.state is LOADING and desk.waiting == ["a"] and not desk.jobs.blocked
        desk.leave(blocked)
        assert blocked.blocked_at is None, "it may be put back"

    def begun(self, desk: Desk) -> LoadJob:
        """The job that waited is loading, and somebody needs all room there is."""
        job = self.busy(desk)
        desk.pool.promised = 0
        desk.poll()
        assert job.state is LOADING
        desk.clock.now += 5.0
        desk.pool.promised = 17
        return job

    def test_patience_begins_again_when_something_was_brought(self, desk: Desk) -> None:
        more = desk.again["a"] = new_job(prompt(1, 10), 6)
        self.begun(desk)
        desk.queue[0].prompt, desk.pool.promised = prompt(1, 11), 11
        desk.load()
        assert more.state is WAITING and desk.waiting == ["a"], "b may pass"

    def test_but_not_when_slots_were_taken_away(self, desk: Desk) -> None:
        """Otherwise it might wait for its patience again and again."""
        again = desk.again["a"] = new_job(prompt(1, 6))
        job = self.begun(desk)
        desk.jobs.make_room(lambda: 15 - len(desk.tree.free))
        assert job.revoked
        desk.load()
        assert again.state is WAITING and desk.waiting == ["a", "b"], "b may not"
        desk.leave(desk.queue[0])
        assert not desk.waiting, "without jobs there is no poll"

    def test_who_is_blocked_is_found_in_one_look_at_a_long_queue(self, desk: Desk) -> None:
        class Counted(dict[str, Request]):
            looks = 0

            def values(self) -> Any:
                self.looks += 1
                return super().values()

        for number in range(20):
            desk.ask(f"{number}", prompt(number, 7), new_job(prompt(number, 6)))
        desk.queue[7].blocked_at = 0.0
        desk.jobs.waiters = counted = Counted(desk.jobs.waiters)
        assert desk.jobs.blocked == [desk.queue[7]] and counted.looks == 1


@pytest.mark.parametrize(("size", "begins"), [(15, True), (21, False)])
def test_a_job_for_which_there_is_too_little_room_begins_alone_or_never(
    desk: Desk, size: int, begins: bool
) -> None:
    """Nobody would make room for it."""
    job = new_job(prompt(1, size))
    request = desk.ask("a", prompt(1, size + 1), job, new=10)
    desk.poll()
    assert job.state is (LOADING if begins else JobState.DROPPED)
    assert desk.waiting == ["a"] * begins
    desk.leave(request)
    desk.load()
    desk.check_nothing_is_left()


class TestPressure:
    """Whoever needs room that was promised gets it."""

    def test_first_what_is_held_is_released(self, desk: Desk) -> None:
        held = desk.ask("a", prompt(1, 7), new_job(prompt(1, 6)))
        desk.poll()
        desk.load()
        desk.ask("b", prompt(2, 7), job := new_job(prompt(2, 6)))
        desk.poll()

        def missing() -> int:
            desk.tree.evict(10 - len(desk.tree.free))
            return 10 - len(desk.tree.free)

        desk.jobs.make_room(missing)

        assert held.lock is None and job.owned_slots is not None and not job.revoked

    def test_then_jobs_lose_their_slots_the_latest_first(self, desk: Desk) -> None:
        jobs = [new_job(prompt(number, 4)) for number in range(3)]
        requests = [desk.ask(str(n), prompt(n, 5), job) for n, job in enumerate(jobs)]
        desk.poll()
        assert [job.state for job in jobs] == [LOADING] * 3
        desk.loader.step()
        desk.loader.stalls = True

        desk.jobs.make_room(lambda: 16 - len(desk.tree.free))

        assert [job.revoked for job in jobs] == [False, True, True]
        assert [request.job for request in requests] == jobs and not desk.replanned
        assert len(desk.tree.free) == 16
        desk.loader.stalls = False
        desk.load()
        assert [job.state.value for job in jobs] == ["loaded", "dropped", "dropped"]
        assert [rid for rid, _ in desk.replanned] == ["0", "1", "2"] and not desk.waiting
        assert [request.num_failures for request in requests] == [0, 1, 1]
        assert desk.tree.written(prompt(0, 4)) and len(desk.tree.nodes) == 4


def early_job(desk: Desk) -> LoadJob:
    """One for whose request the pass has begun, with a layer in its slots."""
    job = new_job(prompt(1, 5))
    request = desk.ask("a", prompt(1, 6), job)
    desk.poll()
    desk.loader.step()
    desk.pool.insert(job)
    job.inserted_early = True
    desk.leave(request)
    return job


class TestGivingUp:
    def test_slots_are_free_before_the_loader_has_let_go(self, desk: Desk) -> None:
        """SGLang may flush then. It waits for the loader, but not for ever."""
        jobs = [new_job(prompt(number, 8)) for number in range(3)]
        for number, job in enumerate(jobs):
            desk.ask(str(number), prompt(number, 9), job)
        desk.poll()
        desk.loader.step()
        desk.loader.stalls, before = True, desk.clock.now
        desk.jobs.drop_all()
        assert not desk.jobs.filling and len(desk.tree.free) == 20 and not desk.waiting
        assert not desk.jobs.wait_for_loader(1.0)
        assert 1.0 <= desk.clock.now - before < 1.1 and desk.jobs
        desk.loader.stalls = False
        assert desk.jobs.wait_for_loader(1.0)
        assert not desk.replanned and {job.state for job in jobs} == {JobState.DROPPED}
        desk.check_nothing_is_left()

    @pytest.mark.parametrize("fails", [False, True])
    def test_an_early_job_is_finished_when_the_loader_is_done(
        self, desk: Desk, fails: bool
    ) -> None:
        """SGLang flushes next, without a poll, unless other ranks would have to agree."""
        job = early_job(desk)
        if fails:
            desk.loader.corrupt.add(prompt(1, 4))
        desk.jobs.drop_all()
        assert desk.jobs.wait_for_loader(1.0, alone=False)
        assert desk.jobs.filling and not desk.ended
        assert desk.jobs.wait_for_loader(1.0)
        assert not desk.jobs.filling and desk.ended == [job]
        assert len(desk.tree.nodes) == (0 if fails else 5)
        desk.check_nothing_is_left()


def test_what_others_hold_below_an_early_job_that_fails_is_released(desk: Desk) -> None:
    """Its slots are in the tree; a job for tokens behind it may have begun, or ended."""
    early_job(desk)
    fork = (*prompt(1, 5), 77, 78, 79, 80)
    ended, loading = new_job(prompt(1, 7), 5), new_job(fork[:8], 5)
    held = desk.ask("b", prompt(1, 8), ended)
    desk.ask("c", fork, loading)
    desk.poll()
    # The drive brings what is behind first: only an order for this test.
    desk.loader.begun.rotate(-1)
    desk.loader.run(LAYERS)
    desk.loader.begun.rotate(1)
    desk.poll()
    assert ended.state is JobState.LOADED and held.lock is not None
    desk.loader.corrupt.add(prompt(1, 4))
    desk.load()
    assert loading.revoked and desk.queue[1].num_failures == 1
    assert not desk.waiting and not desk.tree.nodes and not desk.tree.holds


# Tokens and start of a job beside one of 8 tokens, and how many of its first ones that brings.
OVERLAPS = [
    *((prompt(1, length), 0, min(length, 8)) for length in (5, 8, 12)),
    (prompt(1, 8), 6, 8),
    # Too few of them are the same.
    *((prompt(1, length), 7, None) for length in (8, 12)),
    ((100, *prompt(2, 5)), 0, None),
    ((100, 101, *prompt(2, 5)), 0, 2),
    ((5, *prompt(1, 8)[1:]), 0, None),
    ((*prompt(1, 5), 7, 8, 9), 4, None),
]


@pytest.mark.parametrize(("tokens", "start", "common"), OVERLAPS)
def test_who_needs_the_same_tokens_joins(tokens: Path, start: int, common: int | None) -> None:
    old, new = new_job(prompt(1, 8)), new_job(tokens, start)
    assert overlapping([old], new, LEAST) == ((new, new.stop) if common is None else (old, common))


def test_who_needs_earlier_tokens_joins_a_job_that_waits(desk: Desk) -> None:
    """It will begin behind what is resident then. Nobody joins a job of others, or one in vain."""
    old, new = new_job(prompt(1, 8), 4), new_job(prompt(1, 9))
    requests = [desk.ask("a", prompt(1, 10), old), desk.ask("b", prompt(1, 10), new)]
    assert [(request.common_tokens, request.started_job) for request in requests] == [
        (8, True),
        (8, False),
    ]
    assert old.waiters == requests and desk.jobs.jobs == [old]
    old.state = LOADING
    apart, revoked = new_job(prompt(1, 8)), new_job(prompt(1, 8))
    apart.key_scope = ("salt", None)
    revoked.revoke()
    assert overlapping([old, apart, revoked], new, LEAST) == (new, 9)
