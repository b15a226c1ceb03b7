"""Requests change places in SGLang's own queue by what is cached of each."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import SchedulePolicy

from tests.integration.test_awaited import Queue
from tests.integration.test_awaited import _sglang as _sglang
from tests.integration.worlds import TOKENS, World

STORED, RESIDENT, UNKNOWN = 1000, 2000, 3000


@pytest.fixture
def options() -> dict[str, Any]:
    return {"schedule": "classes", "load": "always"}


@pytest.fixture
def order() -> str:
    return "fcfs"


@pytest.fixture
def queue(world: World, order: str) -> Queue:
    """A prompt is stored, another one resident, and three requests wait: the slowest first."""
    world.store_prompt(STORED)
    queue = Queue(world, order)
    queue.resident(RESIDENT)
    for rid, first in (("stored", STORED), ("unknown", UNKNOWN), ("resident", RESIDENT)):
        queue.add(rid, first)
    return queue


def rids(queue: Queue) -> list[str]:
    queue.schedule()
    return [req.rid for req in queue.waiting]


@pytest.mark.parametrize("order", ["fcfs", "lpm", "dfs-weight", "hrrn"])
def test_what_is_ready_goes_first_and_what_must_be_read_last(queue: Queue) -> None:
    assert rids(queue) == rids(queue) == ["resident", "unknown", "stored"]


@pytest.mark.parametrize("options", [{"schedule": "off", "load": "always"}])
def test_without_a_schedule_sglang_decides(queue: Queue) -> None:
    assert rids(queue) == ["stored", "unknown", "resident"]


def test_a_higher_priority_goes_first_whatever_is_cached(queue: Queue) -> None:
    queue.policy = SchedulePolicy("fcfs", queue.cache, False, True, False)
    for req, priority in zip(queue.waiting, (2, 1, 1), strict=True):
        req.priority = priority
    assert rids(queue) == ["stored", "resident", "unknown"]


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


@pytest.mark.parametrize("options", [{"schedule": "classes", "load": "faster"}])
def test_reading_is_measured_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a request is looked at whose prefix is computed because that is faster."""
    measured: list[object] = []
    world = queue.world
    monkeypatch.setattr("impress_sglang.serving.scheduling.LOOK_SHARE", 1e9)
    monkeypatch.setattr(world.runtime.store, "measure_reading", measured.append)
    world.runtime.estimator.note_forward(TOKENS, TOKENS**2, 1e-9)
    queue.add("computed", STORED)
    queue.schedule(9)
    assert len(measured) == 1
