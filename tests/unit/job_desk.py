"""A job queue before a small pool, with all that its tests ask of it."""

from __future__ import annotations

from impress_sglang.serving.job_queue import JobQueue, Waiter
from impress_sglang.serving.load_jobs import LoadJob
from tests.unit.job_world import Path, Pool, StepLoader, Tree, check_queue
from tests.unit.waiting import Clock

LEAST = 2


class Desk:
    """A queue of requests before a pool of 20 slots, and what their jobs came to."""

    def __init__(self, num_slots: int = 20) -> None:
        self.clock = Clock()
        self.tree = Tree(num_slots)
        self.pool = Pool(self.tree)
        self.loader = StepLoader(self.tree, self._tick)
        self.ended: list[LoadJob] = []
        self.replanned: list[tuple[str, LoadJob]] = []
        self.again: dict[str, LoadJob] = {}
        """Jobs that requests get when theirs has ended."""
        self.waiters: dict[str, Waiter] = {}
        self.queue: list[str] = []
        self.jobs = JobQueue(
            self.pool, self.loader, self.ended.append, self._replan, LEAST, self.clock
        )

    def _tick(self) -> None:
        self.clock.now += 0.01

    def _replan(self, waiter: Waiter, job: LoadJob) -> None:
        assert waiter.job is None
        if job.target is not None:
            assert self.ended[-1] is job, "the end of a job is told first"
        self.replanned.append((waiter.rid, job))
        if (new := self.again.pop(waiter.rid, None)) is not None:
            self.jobs.join(waiter, new)

    def ask(
        self,
        rid: str,
        prompt: Path,
        job: LoadJob | None = None,
        *,
        new: int = 0,
        patience: float | None = None,
    ) -> Waiter:
        """A request is queued, with a job or none."""
        self.pool.prompts[rid], self.pool.new_tokens[rid] = prompt, new
        self.waiters[rid] = waiter = Waiter(rid, patience)
        self.queue.append(rid)
        if job is not None:
            self.jobs.join(waiter, job)
        return waiter

    def leave(self, rid: str) -> None:
        """It is admitted, or gone."""
        self.queue.remove(rid)
        self.jobs.leave(rid)

    def poll(self) -> None:
        self.jobs.poll(self.queue)
        check_queue(self.jobs, self.tree)

    def load(self) -> None:
        """Let the loader do all it was asked to, and take that in."""
        self.loader.run()
        self.poll()

    @property
    def waiting(self) -> list[str]:
        return [rid for rid in self.queue if self.jobs.waits(rid)]

    def check_nothing_is_left(self) -> None:
        assert not self.jobs and not self.jobs.waiters and not self.tree.holds
        assert len(self.tree.free) + len(self.tree.nodes) == self.tree.num_slots
        assert not any(self.jobs.loading)


def prompt(number: int, length: int = 6) -> Path:
    """Tokens that no other prompt begins with."""
    return tuple(100 * number + position for position in range(length))


def resident(desk: Desk, path: Path) -> None:
    slots = desk.tree.take(len(path))
    assert slots is not None
    for stop, slot in enumerate(slots, 1):
        desk.tree.contents[slot] = [path[:stop]] * 2
    desk.tree.insert(path, 0, slots)
