"""The store of other weights is opened behind the scheduler, however long its disk takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from impress_sglang.errors import StoreInUseError
from impress_sglang.serving import service
from impress_sglang.storage import files as files_module
from impress_sglang.storage.directory import StoreDirectory
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import SegmentLayout
from impress_sglang.store.memory import StoreMemory
from impress_sglang.transfer.wanted import pages_per_chunk
from tests.faults import Faults, FaultyFileSystem, Rule
from tests.integration.worlds import NEW, OLD, OTHER, SHAPE, STORED, TOKENS, World
from tests.unit.waiting import wait_until

THIRD = "2" * 32
IO_TIMEOUT = 2.0
PATIENCE = 30.0


def hang(identity: str, operations: str = "*") -> Rule:
    """The folder of one model does not answer."""
    return Rule("hang", operations, f"*/{identity}*")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(files_module, "_installed", FaultyFileSystem(faults))
    return faults


@pytest.fixture
def options() -> dict[str, float]:
    return {"io_timeout": IO_TIMEOUT}


@pytest.fixture
def world(faults: Faults, world: World) -> Iterator[World]:
    """A test whose scheduler hangs goes on after a while, and fails."""
    world.store_prompt()
    watchdog = threading.Timer(PATIENCE, faults.clear)
    watchdog.start()
    yield world
    assert watchdog.is_alive(), "the scheduler's thread waited for the disk"
    watchdog.cancel()
    faults.clear()


def opens(world: World, identity: str) -> bool:
    """Whether nobody has the lock of a store."""
    try:
        StoreDirectory(FileSystem(), world.config.ssd_path, identity).close()
    except StoreInUseError:
        return False
    return True


def begin_update(world: World, faults: Faults, rule: Rule) -> None:
    """Other weights come, and the disk hangs."""
    faults.add(rule)
    assert world.call("update_weights_from_disk").success
    wait_until(lambda: faults.hits)
    assert world.service.suspended == "opening"


def test_a_disk_that_hangs_while_a_store_is_opened(world: World, faults: Faults) -> None:
    """All that the scheduler does goes on without the store, and then with it."""
    begin_update(world, faults, hang(NEW))
    summary = world.cache.summary()
    assert (summary["suspended"], summary["integrity"]) == ("opening", "unchecked")
    assert summary["store"] is summary["cache"] is summary["reorder"] is None
    assert world.stored(STORED) == 0
    world.prefill("unsaved", OTHER)
    assert not world.cache._saves.writing_tokens
    world.cache.evict(EvictParams(num_tokens=4 * TOKENS))
    assert world.serve(world.request("asks", [*STORED, 5]))["path"] == "computed"
    assert world.told("reorder") == {"error": "no store is in use: opening"}
    for _ in range(2):
        assert world.flush() and world.service.suspended == "opening"
    # What is computed meanwhile is of the same weights.
    slots = world.allocator.alloc(3)
    assert slots is not None

    faults.clear()

    assert world.used() and world.service.identity == NEW and world.stored(STORED) == 0
    world.allocator.free(slots)
    world.prefill("saved", OTHER)
    world.service.store.writes.drain()
    assert world.stored(OTHER) == TOKENS


def test_weights_that_change_while_a_store_is_opened(world: World, faults: Faults) -> None:
    """What nobody wants any more is closed when it comes, and what has not begun never does."""
    begin_update(world, faults, hang(NEW))
    assert world.call("update_weights_from_disk", model_path=THIRD).success
    assert world.call("update_weights_from_disk", model_path=OLD).success
    assert world.service.suspended == "opening" and world.service.identity == OLD

    faults.clear()

    assert world.used() and world.stored(STORED) == TOKENS
    assert opens(world, NEW)
    assert not (world.config.ssd_path / THIRD).exists()


@pytest.mark.parametrize("fault", ["EIO", "raise"])
def test_a_disk_that_fails_while_a_store_is_opened(
    world: World, faults: Faults, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the attempt is left, so that the next flush finds the store free."""
    before = set(threading.enumerate())
    # After the folder was locked, and threads were begun.
    with faults.injected(Rule(fault, "free_bytes", f"*/{NEW}*")):
        assert world.call("update_weights_from_disk").success
        assert not world.used() and world.service.suspended == "not opened"
    assert caplog.text.count("cannot be opened; the next flush tries again") == 1
    # Else threads of the attempt are left.
    wait_until(lambda: not set(threading.enumerate()) - before)
    assert world.flush() and world.used() and world.service.identity == NEW


def test_the_next_store_has_the_memory_of_the_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocating and pinning it takes seconds, and others may have it by then."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("memory was allocated again")

    before = world.service.store.cache
    pages, pool = before.pages, world.service._memory.buffers
    ids = before.placement.attach(pages_per_chunk(SegmentLayout(SHAPE, 8, 16, 4096), codes=False))
    before.placement.access(np.array([ids]), np.ones(1))
    monkeypatch.setattr(StoreMemory, "allocate", refuse)
    assert world.call("update_weights_from_disk").success and world.used()
    after = world.service.store.cache
    assert after.pages is pages and world.service._memory.buffers is pool
    assert after.summary()["device"]["chunks"] == after.summary()["host"]["chunks"] == 0
    assert not before.pages, "the old store could still read them"


def test_the_end_of_a_server_does_not_wait_for_a_store_that_is_opened(
    world: World, faults: Faults
) -> None:
    begin_update(world, faults, hang(NEW))
    began = time.monotonic()
    world.service.close()
    assert time.monotonic() - began < PATIENCE / 2
    faults.clear()
    wait_until(lambda: opens(world, NEW))


def test_a_server_serves_before_its_store_is_open(
    world: World, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it has so many segments that opening it takes long."""
    world.service.close()
    monkeypatch.setattr(service, "START_SECONDS", 0.1)
    faults.add(hang(OLD, "list"))
    begun = World(world.config.ssd_path, io_timeout=IO_TIMEOUT)
    assert begun.service.suspended == "opening" and begun.stored(STORED) == 0
    assert begun.cache.summary()["store"] is None
    faults.clear()
    assert begun.used() and begun.stored(STORED) == TOKENS
    begun.service.close()
