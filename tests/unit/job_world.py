"""What a job queue works with, small and by hand: SGLang's pool and tree, requests, and a loader.

A page has one token. A node of the tree stands for a token and all before it, and has one slot.
Everything that slots hold is known.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.serving.job_queue import JobQueue, Waiter
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.load_jobs import JobRevoked, JobState, LoadJob
from tests.unit.waiting import Clock

Path = tuple[int, ...]
LAYERS = 2


@dataclasses.dataclass(eq=False)
class Hold:
    path: Path


@dataclasses.dataclass(eq=False)
class Node:
    slot: int
    locks: int = 0
    used: int = 0


class Tree:
    """Slots of tokens by all tokens up to them, with locks, and what is free."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = list(range(num_slots))
        self.nodes: dict[Path, Node] = {}
        self.holds: list[Hold] = []
        # By slot: of which path it holds the KVs in each layer.
        self.contents: list[list[Path | None]] = [[None] * LAYERS for _ in range(num_slots)]
        self._now = 0

    def match(self, tokens: Path) -> Path:
        self._now += 1
        found = 0
        while found < len(tokens) and (node := self.nodes.get(tokens[: found + 1])) is not None:
            node.used = self._now
            found += 1
        return tokens[:found]

    def on(self, path: Path) -> Iterator[Node]:
        return (self.nodes[path[:stop]] for stop in range(1, len(path) + 1))

    def lock(self, path: Path) -> Hold:
        for node in self.on(path):
            node.locks += 1
        self.holds.append(hold := Hold(path))
        return hold

    def unlock(self, hold: Hold) -> None:
        self.holds.remove(hold)
        for node in self.on(hold.path):
            node.locks -= 1

    @property
    def evictable(self) -> int:
        return sum(not node.locks for node in self.nodes.values())

    def evict(self, count: int) -> int:
        """Free so many slots, the least recently used leaves first; returns how many."""
        freed = 0
        while freed < count:
            inner = {path[:-1] for path in self.nodes}
            leaves = [p for p, n in self.nodes.items() if not n.locks and p not in inner]
            if not leaves:
                break
            self.remove(min(leaves, key=lambda path: (self.nodes[path].used, path)))
            freed += 1
        return freed

    def remove(self, path: Path) -> None:
        node = self.nodes.pop(path)
        assert not node.locks, "what is in use is removed"
        self.give([node.slot])

    def take(self, count: int) -> list[int] | None:
        """Slots that hold nothing yet; None if there are not as many."""
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for slot in taken:
            self.contents[slot] = [None] * LAYERS
        return taken

    def give(self, slots: Iterable[int]) -> None:
        returned = list(slots)
        assert not set(returned) & set(self.free), "a slot is free twice"
        self.free += returned

    def insert(self, path: Path, start: int, slots: Sequence[int]) -> None:
        """Insert slots of the tokens from `start` on; those of tokens that are there come free."""
        for stop, slot in enumerate(slots, start + 1):
            assert path[: stop - 1] in self.nodes or stop == 1
            if path[:stop] in self.nodes:
                self.give([slot])
            else:
                self._now += 1
                self.nodes[path[:stop]] = Node(slot, used=self._now)

    def written(self, path: Path) -> bool:
        return all(
            self.contents[node.slot] == [path[:stop]] * LAYERS
            for stop, node in enumerate(self.on(path), 1)
        )


class StepLoader:
    """Loads a layer of the first job each time it is told to, in the tree's slots."""

    def __init__(self, tree: Tree, clock: Clock) -> None:
        self.tree, self.clock = tree, clock
        self.begun = collections.deque[LoadJob]()
        self.corrupt: set[Path] = set()
        """Paths whose last token cannot be read."""
        self.stalls = False
        self.wake = self

    def begin(self, job: LoadJob) -> None:
        assert job.state is JobState.LOADING and job.owned_slots is not None and not job.revoked
        self.begun.append(job)

    def wait(self, seconds: float) -> None:
        """As an event's: the loader goes on meanwhile."""
        self.clock.now += seconds
        self.step()

    def clear(self) -> None:
        """As an event's."""

    def step(self) -> None:
        if self.stalls or not self.begun:
            return
        job = self.begun[0]
        if job.revoked:
            self._end(job, JobState.DROPPED)
        elif any(tuple(job.tokens[:stop].tolist()) in self.corrupt for stop in self._read(job)):
            error = SegmentUnreadable("s", "is corrupt")
            self._end(job, JobState.FAILED, error)
        else:
            self.write(job)
            if job.layers_loaded == LAYERS:
                self._end(job, JobState.LOADED)

    def write(self, job: LoadJob) -> None:
        assert job.target_slots is not None
        try:
            with job.writing():
                for stop, slot in zip(self._read(job), job.target_slots.tolist(), strict=True):
                    self.tree.contents[slot][job.layers_loaded] = tuple(job.tokens[:stop].tolist())
        except JobRevoked:
            self._end(job, JobState.DROPPED)
        else:
            job.count_layer()

    def _read(self, job: LoadJob) -> range:
        return range(job.start + 1, job.stop + 1)

    def _end(self, job: LoadJob, state: JobState, error: BaseException | None = None) -> None:
        self.begun.popleft()
        job.end(state, error)

    def run(self, steps: int = 100) -> None:
        for _ in range(steps):
            self.step()


class State(enum.Enum):
    QUEUED = "queued"
    CHUNKED = "chunked"
    """A part of its prompt is computed."""
    RUNNING = "running"
    ENDED = "ended"


@dataclasses.dataclass(eq=False, kw_only=True)
class Request(Waiter):
    """`max_tokens`: how many tokens it may generate; it ends after `stops`.

    `slots` are its own: of tokens behind the path that it has locked.
    """

    prompt: Path
    max_tokens: int = 0
    stops: int = 0
    state: State = State.QUEUED
    output: Path = ()
    run_lock: Hold | None = None
    slots: list[int] = dataclasses.field(default_factory=list)
    planned: bool = False
    loaded_stop: int = 0

    @property
    def tokens(self) -> Path:
        return self.prompt + self.output

    @property
    def left(self) -> int:
        return self.max_tokens - len(self.output)

    @property
    def computed(self) -> int:
        return (0 if self.run_lock is None else len(self.run_lock.path)) + len(self.slots)

    @property
    def admitted(self) -> bool:
        return self.state in (State.CHUNKED, State.RUNNING)


class Pool:
    """`plugin.job_slots.JobSlots` on a tree."""

    windows = False

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.promised = 0
        """What running requests need."""
        self.idle = True

    def room(self) -> int:
        return len(self.tree.free) + self.tree.evictable - self.promised

    def need(self, request: Request, counted: set[object]) -> int:
        job, total = request.job, len(request.tokens) + request.left + 1
        if job is not None and (job.owned_slots is not None or job in counted):
            return total - request.common_tokens
        if job is not None:
            counted.add(job)
            total += job.stop - request.common_tokens
        path = self.tree.match(request.tokens[:-1])
        if path in counted:
            return total - len(path)
        counted.add(path)
        return total - len(path) + sum(not node.locks for node in self.tree.on(path))

    def is_idle(self) -> bool:
        return self.idle

    def lacking(self, job: LoadJob) -> int:
        return job.stop - len(self.tree.match(tuple(job.tokens.tolist())))

    def take(self, job: LoadJob) -> bool:
        path = self.tree.match(tuple(job.tokens.tolist()))
        hold, count = self.tree.lock(path), job.stop - len(path)
        self.tree.evict(count - len(self.tree.free))
        slots = self.tree.take(count)
        if slots is None:
            self.tree.unlock(hold)
            return False
        job.start, job.lock = len(path), hold
        job.owned_slots = job.target_slots = torch.tensor(slots, dtype=torch.int64)
        return True

    def free(self, job: LoadJob) -> None:
        slots, job.owned_slots = job.owned_slots, None
        assert slots is not None
        assert job.revoked or job.state is not JobState.LOADED
        self.tree.give(slots.tolist())
        self.tree.unlock(job.lock)

    def insert(self, job: LoadJob) -> None:
        assert job.owned_slots is not None and not job.revoked
        path = tuple(job.tokens.tolist())
        self.tree.insert(path, job.start, job.owned_slots.tolist())
        job.owned_slots = None
        hold = self.tree.lock(path)
        self.tree.unlock(job.lock)
        job.lock = hold

    def discard(self, job: LoadJob) -> None:
        assert job.inserted_early
        self.tree.unlock(job.lock)
        top = tuple(job.tokens[: job.start + 1].tolist())
        for path in sorted(self.tree.nodes, key=len, reverse=True):
            if path[: len(top)] == top:
                self.tree.remove(path)

    def lock_for(self, request: Request) -> Hold:
        return self.tree.lock(self.tree.match(request.tokens[:-1]))

    def release(self, hold: Any) -> None:
        self.tree.unlock(hold)


def new_job(tokens: Path, start: int = 0) -> LoadJob:
    """Of a store that has all of these tokens."""
    nothing: Any = None
    return LoadJob(
        nothing, KVClass(), (None, None), np.array(tokens, np.int32), nothing, start, nothing
    )


def check_queue(jobs: JobQueue[Request]) -> None:
    """What holds between calls of a queue; slots and locks of requests are somebody else's."""
    loader: Any = jobs._loader
    for rid, request in jobs.waiters.items():
        assert request.rid == rid
        assert request.job is None or (request.job in jobs.jobs and request in request.job.waiters)
    for job in jobs.jobs:
        assert all(w.job is job and jobs.waiters[w.rid] is w for w in job.waiters)
        if job.state is JobState.WAITING:
            assert job.owned_slots is None and job.lock is None, "who waits holds nothing"
            assert job.waiters, "nobody waits for it"
            assert job not in loader.begun
        else:
            # Its end was not taken in, or it is being loaded.
            assert job.done.is_set() or job in loader.begun
            assert job.owned_slots is None or not job.revoked
            assert job.waiters or job.inserted_early or job.owned_slots is None, (
                "nobody waits for it"
            )
    assert len(set(map(id, jobs.jobs))) == len(jobs.jobs)
