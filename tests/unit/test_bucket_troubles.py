"""A bucket in trouble, or with a drive in trouble in front of it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults import Faults as DriveFaults
from tests.faults import FaultyFileSystem, Rule
from tests.unit import bucket_world
from tests.unit.bucket_world import World, until_found
from tests.unit.store_factory import prompt
from tests.unit.waiting import wait_until

bucket, world = bucket_world.bucket, bucket_world.world


@pytest.mark.parametrize("operation", ["open-write", "unlink"])
def test_who_ends_a_read_does_not_wait_for_a_drive_that_hangs(world: World, operation: str) -> None:
    """The scheduler's thread ends reads."""
    files = FaultyFileSystem(drive := DriveFaults())
    first, second = world.open("a"), world.open("b", files=files)
    world.put("a", first, prompt(1), prompt(2))
    for number in (1, 2):
        until_found(second, prompt(number))
    (read, other), objects = second.tree.segments(), second._disk.bucket.files
    second.readers.acquire(read)
    path = second._disk.bucket.path_of(other.info)
    with ThreadPoolExecutor(2) as pool:
        with drive.injected(rule := Rule("hang", operation, "*.tmp")):
            if operation == "unlink":
                working = pool.submit(objects.end, objects._find(path))
            else:
                working = pool.submit(objects.open, path, os.O_RDONLY)
            wait_until(lambda: rule.hits)
            pool.submit(second.readers.release, read.segment_id).result(30)
            assert not working.done()
        working.result()


def test_an_object_that_ends_while_it_is_opened(world: World) -> None:
    files = FaultyFileSystem(drive := DriveFaults())
    first, second = world.open("a"), world.open("b", files=files)
    world.put("a", first, prompt(1))
    until_found(second, prompt(1))
    (segment,), objects = second.tree.segments(), second._disk.bucket.files
    path = second._disk.bucket.path_of(segment.info)
    with ThreadPoolExecutor(1) as pool:
        with drive.injected(rule := Rule("hang", "open-write", "*.tmp")):
            opening = pool.submit(objects.open, path, os.O_RDONLY)
            wait_until(lambda: rule.hits)
            objects.forget()
        with pytest.raises(OSError, match="ended"):
            opening.result()
    assert not list(world.benches["b"].root.rglob("*.tmp")) and not objects.open_bytes
