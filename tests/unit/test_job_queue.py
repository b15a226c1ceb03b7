"""The job queue: who gets slots when, what is held until when, and what becomes of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from impress_sglang.serving import job_queue
from impress_sglang.serving.job_queue import Waiter, overlapping
from impress_sglang.serving.load_jobs import JobState, LoadJob
from tests.unit.job_world import Desk, Path, new_job, prompt, resident


def test_who_needs_more_than_what_became_resident_gets_another_job(desk: Desk) -> None:
    """Also if it had joined the job of a shorter request."""
    job, more = new_job(prompt(1, 8)), new_job(prompt(1, 12), 8)
    desk.ask("a", prompt(1, 9), job)
    desk.ask("b", prompt(1, 13), job)
    desk.again["b"] = more
    resident(desk, prompt(1, 8))
    desk.poll()
    assert desk.replanned == [("a", job), ("b", job)] and not desk.ended
    assert desk.waiting == ["b"] and more.state is JobState.LOADING, "begun by the same poll"
    desk.load()
    assert more.state is JobState.LOADED and desk.tree.written(prompt(1, 12))


class TestOrder:
    def test_slots_are_given_in_the_order_of_the_queue(self, desk: Desk) -> None:
        """Not in that of the jobs."""
        jobs = {name: new_job(prompt(n, 7)) for n, name in enumerate("abc")}
        for n, name in enumerate("abc"):
            desk.ask(name, prompt(n, 8), jobs[name])
        desk.queue.reverse()
        desk.poll()
        assert [jobs[name].state for name in "cba"] == [
            JobState.LOADING,
            JobState.LOADING,
            JobState.WAITING,
        ]

    def test_nobody_gets_what_those_before_need(self, desk: Desk) -> None:
        small = new_job(prompt(2, 2))
        desk.ask("a", prompt(1, 10), new=5)
        desk.ask("b", prompt(2, 3), small)
        desk.poll()
        assert small.state is JobState.WAITING, "10 + 5 + 1, and 3 + 1, are 20"
        assert desk.waiting == ["b"]
        desk.pool.new_tokens["a"] = 4
        desk.poll()
        assert small.state is JobState.LOADING


class TestPassing:
    """A request that waits for room is passed by others, but not for ever."""

    def busy(self, desk: Desk, patience: float | None = None) -> LoadJob:
        """Somebody needs all but 4 tokens, and a job waits for more."""
        desk.pool.promised, desk.pool.idle = 16, False
        job = new_job(prompt(1, 6))
        desk.ask("a", prompt(1, 7), job, patience=patience)
        desk.ask("b", prompt(2, 2))
        assert desk.waiters["a"].blocked_at is None
        desk.poll()
        assert desk.waiters["a"].blocked_at is not None and desk.waiters["b"].blocked_at is None
        return job

    @pytest.mark.parametrize(
        ("patience", "seconds"), [(None, job_queue.PATIENCE), (0.25, 0.25), (7.0, 7.0)]
    )
    def test_for_as_long_as_it_takes_itself(
        self, desk: Desk, patience: float | None, seconds: float
    ) -> None:
        job = self.busy(desk, patience)
        assert desk.waiting == ["a"], "b may pass"
        assert desk.jobs.blocked == [desk.waiters["a"]]
        desk.clock.now += seconds
        desk.poll()
        assert desk.waiting == ["a"]
        desk.clock.now += 0.001
        desk.poll()
        assert desk.waiting == ["a", "b"], "b may not"
        desk.pool.promised = 0
        desk.poll()
        assert job.state is JobState.LOADING and desk.waiting == ["a"] and not desk.jobs.blocked
        desk.leave("a")
        assert desk.waiters["a"].blocked_at is None, "it may be put back"

    def test_who_is_blocked_is_found_in_one_look_at_a_long_queue(self, desk: Desk) -> None:
        class Counted(dict[str, Waiter]):
            looks = 0

            def values(self) -> Any:
                self.looks += 1
                return super().values()

        for number in range(20):
            desk.ask(f"{number}", prompt(number, 7), new_job(prompt(number, 6)))
        desk.jobs.waiters["7"].blocked_at = 0.0
        desk.jobs.waiters = counted = Counted(desk.jobs.waiters)
        assert desk.jobs.blocked == [desk.waiters["7"]] and counted.looks == 1

    def test_nothing_is_held_against_a_request_that_came_to_the_head(self, desk: Desk) -> None:
        """No job waits: SGLang would wait for room for ever."""
        desk.ask("b", prompt(2, 7), new_job(prompt(2, 6)))
        desk.poll()
        desk.load()
        desk.ask("a", prompt(1, 9), new=5)
        desk.queue.reverse()
        desk.pool.new_tokens["a"] = 3
        desk.poll()
        assert len(desk.tree.holds) == 1, "9 + 3 + 1, and 6, are 19"
        desk.pool.new_tokens["a"] = 4
        desk.poll()
        assert not desk.tree.holds, "SGLang wants room for more than it needs"

    def begun(self, desk: Desk) -> LoadJob:
        """The job that waited is loading, and somebody needs all room there is."""
        job = self.busy(desk)
        desk.pool.promised = 0
        desk.poll()
        assert job.state is JobState.LOADING
        desk.clock.now += 5.0
        desk.pool.promised = 17
        return job

    def test_patience_begins_again_when_something_was_brought(self, desk: Desk) -> None:
        more = desk.again["a"] = new_job(prompt(1, 10), 6)
        self.begun(desk)
        desk.pool.prompts["a"], desk.pool.promised = prompt(1, 11), 11
        desk.load()
        assert more.state is JobState.WAITING and desk.waiting == ["a"], "b may pass"

    def test_but_not_when_slots_were_taken_away(self, desk: Desk) -> None:
        """Otherwise it might wait for its patience again and again."""
        again = desk.again["a"] = new_job(prompt(1, 6))
        job = self.begun(desk)
        desk.jobs.make_room(lambda: 15 - len(desk.tree.free))
        assert job.revoked
        desk.load()
        assert again.state is JobState.WAITING and desk.waiting == ["a", "b"], "b may not"


class TestAlone:
    def test_a_job_for_which_there_is_too_little_room_begins_alone(self, desk: Desk) -> None:
        """Nobody would make room for it."""
        job = new_job(prompt(1, 15))
        desk.ask("a", prompt(1, 16), job, new=10)
        desk.poll()
        assert job.state is JobState.LOADING

    def test_one_that_is_too_large_is_given_up(self, desk: Desk) -> None:
        job = new_job(prompt(1, 21))
        waiter = desk.ask("a", prompt(1, 22), job)
        desk.poll()
        assert job.state is JobState.DROPPED and waiter.job is None and not desk.waiting
        assert not desk.jobs and not desk.tree.holds
        desk.leave("a")
        desk.check_nothing_is_left()


class TestPressure:
    """Whoever needs room that was promised gets it."""

    def test_first_what_is_held_is_released(self, desk: Desk) -> None:
        first, second = new_job(prompt(1, 6)), new_job(prompt(2, 6))
        held = desk.ask("a", prompt(1, 7), first)
        desk.poll()
        desk.load()
        desk.ask("b", prompt(2, 7), second)
        desk.poll()

        def missing() -> int:
            lacking = 10 - len(desk.tree.free)
            desk.tree.evict(lacking)
            return 10 - len(desk.tree.free)

        desk.jobs.make_room(missing)

        assert held.hold is None and second.slots is not None and not second.revoked

    def test_then_jobs_lose_their_slots_the_latest_first(self, desk: Desk) -> None:
        jobs = [new_job(prompt(number, 4)) for number in range(3)]
        waiters = [desk.ask(str(n), prompt(n, 5), job) for n, job in enumerate(jobs)]
        desk.poll()
        assert [job.state for job in jobs] == [JobState.LOADING] * 3
        desk.loader.step()
        desk.loader.stalls = True

        desk.jobs.make_room(lambda: 16 - len(desk.tree.free))

        assert [job.revoked for job in jobs] == [False, True, True]
        assert all(waiter.job is job for waiter, job in zip(waiters, jobs, strict=True))
        assert len(desk.tree.free) == 16 and not desk.replanned
        desk.loader.stalls = False
        desk.load()
        assert [job.state.value for job in jobs] == ["loaded", "dropped", "dropped"]
        assert [rid for rid, _ in desk.replanned] == ["0", "1", "2"] and not desk.waiting
        assert [waiter.tries for waiter in waiters] == [0, 1, 1]
        assert desk.tree.written(prompt(0, 4)) and len(desk.tree.nodes) == 4


def early_job(desk: Desk) -> LoadJob:
    """One for whose request the pass has begun, with a layer in its slots."""
    job = new_job(prompt(1, 5))
    desk.ask("a", prompt(1), job)
    desk.poll()
    desk.loader.step()
    desk.pool.insert(job)
    job.early = True
    desk.leave("a")
    return job


class TestGivingUp:
    def test_slots_are_free_before_the_loader_has_let_go(self, desk: Desk) -> None:
        jobs = [new_job(prompt(number, 8)) for number in range(3)]
        for number, job in enumerate(jobs):
            desk.ask(str(number), prompt(number, 9), job)
        desk.poll()
        desk.loader.step()
        desk.jobs.drop_all()
        assert not desk.jobs.filling and len(desk.tree.free) == 20, "SGLang may flush at once"
        assert desk.jobs.wait_for_loader(1.0)
        assert not desk.replanned and not desk.waiting
        assert {job.state for job in jobs} == {JobState.DROPPED}
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

    def test_but_not_for_ever(self, desk: Desk) -> None:
        job = new_job(prompt(1, 8))
        desk.ask("a", prompt(1, 9), job)
        desk.poll()
        desk.loader.stalls = True
        before = desk.clock.now
        desk.jobs.drop_all()
        assert not desk.jobs.wait_for_loader(1.0)
        assert 1.0 <= desk.clock.now - before < 1.1
        assert desk.jobs and len(desk.tree.free) == 20 and not desk.waiting
        desk.loader.stalls = False
        desk.load()
        desk.check_nothing_is_left()


def test_what_others_hold_below_an_early_job_that_fails_is_released(desk: Desk) -> None:
    """Its slots are in the tree; a job for tokens behind it may have begun, or ended."""
    early_job(desk)
    ended, loading = new_job(prompt(1, 7), 5), new_job((*prompt(1, 5), 77, 78, 79), 5)
    desk.ask("b", prompt(1, 8), ended)
    desk.ask("c", (*prompt(1, 5), 77, 78, 79, 80), loading)
    desk.poll()
    # The drive brings what is behind first: only an order for this test.
    desk.loader.begun.rotate(-1)
    desk.loader.run(2)
    desk.loader.begun.rotate(1)
    desk.poll()
    assert ended.state is JobState.LOADED and desk.waiters["b"].hold is not None
    desk.loader.corrupt.add(prompt(1, 4))
    desk.load()
    assert loading.revoked and desk.waiters["c"].tries == 1
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
    assert overlapping([old], new, 2) == ((new, new.stop) if common is None else (old, common))


def test_who_needs_earlier_tokens_joins_a_job_that_waits() -> None:
    """It will begin behind what is resident then."""
    old, new = new_job(prompt(1, 8), 4), new_job(prompt(1, 8))
    assert overlapping([old], new, 2) == (old, 8)
    old.state = JobState.LOADING
    assert overlapping([old], new, 2) == (new, 8)


def test_nobody_joins_a_job_of_others() -> None:
    apart, revoked, new = (new_job(prompt(1, 8)) for _ in range(3))
    apart.space = ("salt", None)
    revoked.revoke()
    assert overlapping([apart, revoked], new, 2) == (new, 8)


def test_a_job_that_brings_more_than_a_request_needs_room_for_all_of_it(desk: Desk) -> None:
    """Whoever began it may be further back in the queue."""
    job = new_job(prompt(1, 9))
    desk.ask("b", prompt(1, 10), job)
    desk.ask("a", prompt(1, 3), new_job(prompt(1, 2)), new=1)
    desk.queue.reverse()
    assert desk.waiters["a"].job is job and not desk.waiters["a"].leads
    desk.pool.promised, desk.pool.idle = 8, False
    desk.poll()
    assert job.state is JobState.WAITING, "9, 1 + 1 + 1 are 12"
    desk.pool.promised = 7
    desk.poll()
    assert job.state is JobState.LOADING
