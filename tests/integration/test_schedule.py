"""Requests change places in SGLang's own queue by what is cached of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.srt.managers.schedule_policy import SchedulePolicy

from tests.integration.test_awaited import Queue
from tests.integration.test_awaited import _sglang as _sglang
from tests.integration.test_weights import SHAPE, World

STORED, RESIDENT, UNKNOWN = 1000, 2000, 3000


@pytest.fixture
def schedule() -> str:
    return "classes"


@pytest.fixture
def order() -> str:
    return "fcfs"


@pytest.fixture
def queue(tmp_path: Path, schedule: str, order: str) -> Iterator[Queue]:
    """A prompt is stored, another one resident, and three requests wait: the slowest first."""
    world = World(tmp_path, schedule=schedule, load="always")
    world.prefill("stored", STORED).open(SHAPE.num_layers)
    world.runtime.store.writes.drain()
    del world.cache._saves._begun["stored"]
    world.flush()
    queue = Queue(world, order)
    queue.resident(RESIDENT)
    for rid, first in (("stored", STORED), ("unknown", UNKNOWN), ("resident", RESIDENT)):
        queue.add(rid, first)
    yield queue
    world.runtime.prefetches.drop_all()
    world.cache.check_integrity()
    world.runtime.close()


def rids(queue: Queue) -> list[str]:
    queue.schedule()
    return [req.rid for req in queue.waiting]


@pytest.mark.parametrize("order", ["fcfs", "lpm", "dfs-weight"])
def test_what_is_ready_goes_first_and_what_must_be_read_last(queue: Queue) -> None:
    assert rids(queue) == rids(queue) == ["resident", "unknown", "stored"]


@pytest.mark.parametrize("schedule", ["off"])
def test_without_a_schedule_sglang_decides(queue: Queue) -> None:
    assert rids(queue) == ["stored", "unknown", "resident"]


def test_a_higher_priority_goes_first_whatever_is_cached(queue: Queue) -> None:
    queue.policy = SchedulePolicy("fcfs", queue.cache, False, True, False)
    for req, priority in zip(queue.waiting, (2, 1, 1), strict=True):
        req.priority = priority
    assert rids(queue) == ["stored", "resident", "unknown"]


def test_a_new_request_is_behind_those_that_came_before(queue: Queue) -> None:
    """However places were changed in between: SGLang finds its own order again."""
    assert rids(queue)[-1] == "stored"
    queue.add("stored too", STORED)
    queue.add("unknown too", UNKNOWN + 500)
    assert rids(queue) == ["resident", "unknown", "unknown too", "stored", "stored too"]


def test_what_becomes_resident_meanwhile_is_seen(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fcfs nobody else matches a request again before it is admitted."""
    monkeypatch.setattr("impress_sglang.serving.scheduling.LOOK_SHARE", 1e9)
    assert rids(queue) == ["resident", "unknown", "stored"]
    queue.resident(UNKNOWN)
    for _ in range(4):
        queue.schedule()
    assert rids(queue) == ["unknown", "resident", "stored"]


@pytest.mark.parametrize("end", [Queue.admit, Queue.abort, Queue.release])
def test_who_leaves_is_forgotten(queue: Queue, end: object) -> None:
    assert callable(end)
    queue.schedule()
    for req in queue.waiting:
        end(queue, req)
    assert not queue.world.runtime.queue_order._states


def test_a_request_that_is_not_served_changes_places_too(queue: Queue) -> None:
    """With what is resident: of what is stored it gets nothing, and waits for nothing."""
    req = queue.request("log", STORED)
    req.return_logprob, req.logprob_start_len = True, 0
    req.full_untruncated_fill_ids = req.origin_input_ids
    queue.cache.prefetch(req)
    queue.waiting.append(req)
    assert rids(queue) == ["resident", "unknown", "log", "stored"]
    assert "log" not in queue.world.runtime.prefetches
