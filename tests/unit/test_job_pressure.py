"""What becomes of jobs and of what is held when others need the room, or nobody waits any more."""

from __future__ import annotations

import pytest

from impress_sglang.serving.load_jobs import JobState, LoadJob
from tests.unit.job_world import Desk, new_job, prompt


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


class TestEarly:
    """A job whose slots are in the tree before they are filled."""

    def start(self, desk: Desk) -> LoadJob:
        job = new_job(prompt(1, 5))
        desk.ask("a", prompt(1), job)
        desk.poll()
        desk.loader.step()
        desk.pool.insert(job)
        job.early = True
        assert job.early and job.slots is None and not any(desk.jobs.loading)
        return job

    def test_is_not_under_pressure(self, desk: Desk) -> None:
        """A pass uses its slots."""
        job = self.start(desk)
        desk.leave("a")
        desk.jobs.make_room(lambda: 20 - len(desk.tree.free))
        assert not job.revoked and len(desk.tree.free) == 15

    @pytest.mark.parametrize("fault", ["corrupt", "revoked"])
    def test_one_that_fails_is_discarded(self, desk: Desk, fault: str) -> None:
        job, put_back = self.start(desk), []
        desk.pool.put_back = put_back.append
        desk.leave("a")
        if fault == "corrupt":
            desk.loader.corrupt.add(prompt(1, 4))
        else:
            # By a pass that has waited long enough.
            job.revoke()
        desk.load()
        assert put_back == [job] and desk.ended == [job] and not desk.tree.nodes
        desk.check_nothing_is_left()

    def test_what_others_hold_below_one_that_fails_is_released(self, desk: Desk) -> None:
        """A job for tokens behind it may have begun, or ended."""
        self.start(desk)
        desk.leave("a")
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
