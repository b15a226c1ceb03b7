"""A bucket in trouble, or with a drive in trouble in front of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from impress_sglang.cli import DONE
from impress_sglang.cli.main import main
from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.segment import SegmentHeader, encode_header
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.orders import Purge
from tests.faults import Faults as DriveFaults
from tests.faults import FaultyFileSystem, Rule
from tests.unit import bucket_world
from tests.unit import kv_factory as kv
from tests.unit.bucket_world import Faults, World, obstore, until_found, until_kept
from tests.unit.kv_factory import IDENTITY
from tests.unit.store_factory import check_rows, length, lengths, name_of, prompt, purge, until, use
from tests.unit.test_cli import NONE
from tests.unit.waiting import wait_until

bucket, world = bucket_world.bucket, bucket_world.world


def test_one_object_that_is_refused(
    world: World,
    bucket: Faults,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an archived one is, at any time: that is no failure of all others."""
    monkeypatch.setattr("impress_sglang.store.store.RETRY_SECONDS", 600.0)
    first, second = world.share(prompt(1))
    (archived,) = bucket.segments
    obstore.put(bucket._store, f"{IDENTITY}/orders/x.json", b"archived")
    bucket.error = obstore.exceptions.PermissionDeniedError
    bucket.fails = lambda what, name: (
        what in ("get", "get_range") and (name == archived or "/orders/" in name)
    )
    world.put("a", first, prompt(2))
    third = world.open("c")
    for store in (second, third):
        until_found(store, prompt(2))
        check_rows(store, prompt(2))
    with pytest.raises(StoreUnavailable) as error:
        check_rows(second, prompt(1))
    second.report(error.value)
    lists = bucket.counts["list"] + 6
    until(third, lambda: bucket.counts["list"] > lists)
    assert lengths(second, 1, 2) == [0, 8] == lengths(third, 1, 2)
    assert [store.summary()["bucket"]["state"] for store in (second, third)] == ["ok", "ok"]
    assert "1 objects of s3://bucket/prefix cannot be used: [Errno 13] a test" in caplog.text


@pytest.mark.parametrize("has_key", [False, True])
def test_a_bucket_that_fails_when_a_directory_first_uses_it(
    world: World, bucket: Faults, has_key: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All agree on a key, or it is not used."""
    world.put("a", first := world.open("a", store=""), prompt(1))
    world.benches["a"].close(first)
    second = world.open("b") if has_key else None
    bucket.fails = lambda what, name: True
    first = world.open("a")
    world.put("a", first, prompt(2))
    bucket.fails = lambda what, name: False
    if second is None:
        until(first, lambda: len(bucket.segments) == 2)
        second = world.open("b")
        for number in (1, 2):
            until_found(second, prompt(number))
    else:
        until(first, lambda: "directory has another key" in caplog.text)
        world.put("b", second, prompt(3))
        until(second, lambda: second.summary()["bucket"]["objects"] == 1)
        assert lengths(first, 1, 2, 3) == [8, 8, 0]
        assert first.summary()["bucket"]["state"] == "degraded"


def test_a_key_that_is_none_is_logged_once(
    world: World, bucket: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    world.put("a", store := world.open("a", store=""), prompt(1))
    world.benches["a"].close(store)
    obstore.put(bucket._store, f"{IDENTITY}/key", b"no key")
    store = world.open("a")
    until(store, lambda: "has another key" in caplog.text)
    assert length(store, prompt(1)) == 8 and "cannot be followed" not in caplog.text


def test_what_builds_on_what_has_expired_goes_when_it_expires(
    world: World, bucket: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, now = world.open("a"), time.time()
    world.put("a", first, prompt(1, 13), ttl=1000.0)
    world.put("a", first, prompt(1, 40), ttl=2000.0)
    until(first, lambda: len(bucket.segments) == 2)
    monkeypatch.setattr("time.time", lambda: now + 1500)
    until(first, lambda: len(bucket.segments) == 1)
    world.benches["a"].close(first)
    second = world.open("b")
    until(second, lambda: second.summary()["bucket"]["objects"] == 1)
    monkeypatch.setattr("time.time", lambda: now + 2500)
    until(second, lambda: not bucket.segments)


def test_what_waits_for_a_bucket_that_fails_goes_when_it_expires(
    world: World, bucket: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, second), later = world.share(prompt(1, 13)), time.time() + 1001
    world.put("b", second, prompt(1, 40), ttl=1000.0)
    world.put("b", second, prompt(2))
    world.benches["b"].close(second)
    bucket.fails = lambda what, name: True
    monkeypatch.setattr("time.time", lambda: later)
    second = world.open("b")
    until(second, lambda: len(world.benches["b"].files()) == 1)
    assert length(second, prompt(2)) == 8 and not second.worker.unused_bytes


def test_a_purge_of_another_prefix_spares_what_waits_for_a_bucket(
    world: World, bucket: Faults
) -> None:
    """Orders of the last day come before the first list, by which it is known what it builds on."""
    _, second = world.share(prompt(1, 13))
    world.put("b", second, prompt(1, 40), prompt(2))
    until(second, lambda: second.summary()["bucket"]["sent"] == 2)
    purge(second, prompt(2))
    until(second, lambda: len(bucket.segments) == 2)
    world.benches["b"].close(second)
    bucket.fails = lambda what, name: what == "list"
    second = world.open("b")
    until(second, lambda: second.unattached._purged and not second._orders)
    bucket.fails = lambda what, name: False
    until_found(second, prompt(1, 40))
    assert len(world.benches["b"].files()) == 1


@pytest.mark.parametrize("whole_namespace", [False, True])
def test_a_purge_without_a_server_reaches_the_bucket_later(
    world: World, bucket: Faults, whole_namespace: bool
) -> None:
    """Also what builds on what is not there any more."""
    first = world.open("a")
    world.put("a", first, prompt(1, 64), prompt(1, 80), prompt(1, 96), prompt(2))
    until(first, lambda: len(bucket.segments) == 4)
    below = next(segment for segment in first.tree.segments() if not segment.info.prefix_len)
    name = first._disk.bucket.name_of(below.info)
    world.benches["a"].close(first)
    first = world.open("a", store="")
    order = Purge(first.namespace(""), None if whole_namespace else kv.as_tokens(prompt(1, 64)))
    while order.unfinished:
        order.step(first)
    world.benches["a"].close(first)
    if whole_namespace:
        obstore.delete(bucket._store, name)
    # The order comes first.
    bucket.fails = lambda what, name: what == "list"
    first = world.open("a")
    until(first, lambda: first.unattached._purged)
    bucket.fails = lambda what, name: False
    until(first, lambda: len(bucket.segments) == (0 if whole_namespace else 1))


def test_a_purge_spares_what_builds_on_a_damaged_object_of_another_prefix(
    world: World, bucket: Faults
) -> None:
    first, second = world.share(prompt(1, 64), prompt(1, 80), prompt(2))
    world.benches["a"].close(first)
    purge(second, prompt(2))
    until(second, lambda: len(bucket.segments) == 2)
    second.report(SegmentUnreadable(name_of(second, prompt(1, 64)), "is damaged"))
    (above,) = (segment for segment in second.tree.segments() if not segment.lost)
    # The bucket has it again.
    name = second._disk.bucket.name_of(above.info)
    found = obstore.get(bucket._store, name)
    content, attributes = bytes(found.bytes()), dict(found.attributes)
    obstore.delete(bucket._store, [name])
    until(second, lambda: not len(second.tree))
    obstore.put(bucket._store, name, content, attributes=attributes)
    until(second, lambda: above.segment_id in second.unattached._unattached)
    assert len(bucket.segments) == 2


def test_what_builds_on_an_object_that_is_older_than_its_own_parent_outlives_a_start(
    world: World, bucket: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers are read oldest first; one whose parent was sent again waits for its turn."""
    first, second = world.share(prompt(1, 13))
    (name,) = bucket.segments
    world.put("a", first, prompt(1, 40))
    until_found(second, prompt(1, 40))
    world.benches["a"].close(first)
    bucket.fails = lambda what, name: what == "put"
    world.put("b", second, prompt(1, 60))
    world.benches["b"].close(second)
    found = obstore.get(bucket._store, name)
    content, attributes = bytes(found.bytes()), dict(found.attributes)
    obstore.delete(bucket._store, [name])
    obstore.put(bucket._store, name, content, attributes=attributes)
    monkeypatch.setattr("impress_sglang.store.bucket_peer._HEADERS_PER_BATCH", 1)
    monkeypatch.setattr("impress_sglang.store.unattached._RETRY_SECONDS", 600.0)
    bucket.fails = lambda what, name: what == "list"
    second = world.open("b")
    second.poll()
    bucket.fails = lambda what, name: False
    until_found(second, prompt(1, 60))


def test_commands_without_a_server_spare_what_builds_on_an_object(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = world.open("a"), world.open("b")
    world.put("a", first, prompt(1, 64), namespace=NONE)
    until_found(second, prompt(1, 64), namespace=NONE)
    world.put("b", second, prompt(1, 80), prompt(2, 64), namespace=NONE)
    world.benches["b"].close(second)
    bench, left = world.benches["b"], []
    for verb, number in (("pin", 2), ("purge", 1)):
        ids = ",".join(map(str, prompt(number, 64)))
        assert main([verb, "--ids", ids, "--dir", str(bench.root)]) == DONE
        left.append(len(bench.files()))
    assert left == [2, 1]


@pytest.mark.parametrize("purged", [False, True])
def test_what_leaves_while_it_is_sent(world: World, bucket: Faults, purged: bool) -> None:
    """What was evicted is found there, and what was purged is not there later."""
    store, is_sending, sent = world.open("a"), threading.Event(), threading.Event()

    def wait(what: str, name: str) -> bool:
        if what == "put" and name.endswith(".kv") and bucket.segments:
            is_sending.set()
            assert sent.wait(60)
        return False

    bucket.fails = wait
    world.put("a", store, prompt(1, 13), prompt(1, 40))
    until(store, is_sending.is_set)
    if purged:
        purge(store, prompt(1, 13))
        until(store, lambda: not bucket.segments)
    else:
        store.writes.discard(list(store.tree.segments()), MissCause.EVICTED)
    sent.set()
    until(store, lambda: store.summary()["bucket"]["sent"] == 2)
    if purged:
        until(store, lambda: not bucket.segments)
    else:
        until_found(store, prompt(1, 40))
        check_rows(store, prompt(1, 40))


@pytest.mark.parametrize(
    "fields",
    [
        {"segment_id": "../../out"},
        {"segment_id": 7},
        {"namespace": ["x"]},
        {"prefix_digest": None},
        {"prefix_len": "x"},
        {"expires": "never"},
        {"windows_from": -1},
        {"written": "inf"},
    ],
)
def test_objects_that_somebody_made_up(
    world: World, bucket: Faults, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Ids become names of files."""
    first = world.open("a")
    world.put("a", first, prompt(1))
    until(first, lambda: len(bucket.segments) == 1)
    (segment,), (old,) = first.tree.segments(), bucket.segments
    with contextlib.closing(first._disk.open(segment)) as file:
        described = {name: value for name, value in fields.items() if name != "written"}
        made_up = dataclasses.replace(file.info, **described)
        header = SegmentHeader(made_up, file.checksums, file.sinks, file.mapping, file.fits)
        content = obstore.get(bucket._store, old).bytes()
        content = encode_header(header) + bytes(content)[file.layout.header_bytes :]
    name = first._disk.bucket.name_of(made_up)
    world.benches["a"].close(first)
    obstore.delete(bucket._store, [old])
    attributes = {"written": fields.get("written", "0.0")}
    obstore.put(bucket._store, name, content, attributes=attributes)
    second = world.open("b")
    until(second, lambda: "cannot be used" in caplog.text or len(second.tree))
    if len(second.tree):
        use(second, prompt(1))
        until_kept(second, 1)
    assert not list(world.benches["b"].root.parent.glob("*.kv")) and not len(second.tree)
    world.put("b", second, prompt(2))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": ""},
        {"tokens": "AAAA"},
        {"tokens": "AAAAAA==", "namespace": None},
        {"tokens": 5},
        {"namespace": ["x"]},
        {"before": float("nan")},
        {"before": float("inf")},
        {"before": 10**400},
        {"before": None},
    ],
)
def test_orders_that_are_none(
    world: World, bucket: Faults, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may write to a bucket can put anything there."""
    order = {"tokens": None, "namespace": None, "before": time.time() + 60, "unpins": True}
    content = json.dumps(order | {"namespace": "x"} | fields).encode()
    obstore.put(bucket._store, f"{IDENTITY}/orders/x.json", content)
    store = world.open("a")
    until(store, lambda: "of another version" in caplog.text)
    world.put("a", store, prompt(1))
    assert length(store, prompt(1)) == 8
    # A good one.
    obstore.put(bucket._store, f"{IDENTITY}/orders/y.json", json.dumps(order).encode())
    until(store, lambda: not length(store, prompt(1)))


@pytest.mark.parametrize("operation", ["open-write", "unlink"])
def test_who_ends_a_read_does_not_wait_for_a_drive_that_hangs(world: World, operation: str) -> None:
    """The scheduler's thread ends reads."""
    files = FaultyFileSystem(drive := DriveFaults())
    _, second = world.share(prompt(1), prompt(2), files=files)
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
    _, second = world.share(prompt(1), files=files)
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
