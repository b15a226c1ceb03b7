"""Servers with directories of their own and one bucket: what one stores all others find."""

from __future__ import annotations

import datetime
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from impress_sglang.errors import ConfigError, SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.directory import segment_files
from impress_sglang.store import bucket as bucket_module
from impress_sglang.store import bucket_peer as peer_module
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.writing import StoreOutcome
from impress_sglang.threads import BackgroundThread
from tests.unit import bucket_world, store_factory
from tests.unit.bucket_world import Faults, World, obstore, until_found, until_kept, until_listed
from tests.unit.kv_factory import IDENTITY
from tests.unit.store_factory import check_rows, gb, length, lengths, prompt, purge, until, use
from tests.unit.waiting import wait_until

bucket, world = bucket_world.bucket, bucket_world.world


def test_what_one_stores_others_find_and_keep(world: World, bucket: Faults) -> None:
    first, second = world.share(prompt(1, 13), prompt(1, 40), prompt(3))
    world.put("a", first, prompt(2), namespace="salt")
    until(second, lambda: len(bucket.segments) == 4)
    until_found(second, prompt(2), namespace="salt")
    assert second.summary()["used_bytes"] == 0 == length(second, prompt(2))
    check_rows(second, prompt(1, 40))
    check_rows(second, prompt(2), namespace="salt")
    assert world.benches["b"].offer(second, prompt(1, 40)) is StoreOutcome.ALREADY_STORED
    # What was read is kept, and needs the bucket no more; what builds on it goes back there.
    until_kept(second, 3)
    bucket.counts.clear()
    check_rows(second, prompt(1, 40))
    assert "get_range" not in bucket.counts
    world.put("b", second, prompt(1, 60))
    until_found(first, prompt(1, 60))
    check_rows(first, prompt(1, 60))
    assert not (first.health.summary()["failures"] or second.health.summary()["failures"])


def test_ranges_are_fetched_together_and_each_once(
    world: World, bucket: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three are answered when all three have been asked for."""
    for module in ("bucket", "segment_readers"):
        monkeypatch.setattr(f"impress_sglang.store.{module}.RANGE_BYTES", 4096)
    monkeypatch.setattr(bucket_module, "IDLE_SECONDS", 600.0)
    tokens, three = prompt(1, 100), threading.Barrier(3)
    _, second = world.share(tokens)
    (segment,) = second.tree.segments()
    # That reads the header alone.
    second.readers.acquire(segment)
    bucket.counts["get_range"] = 0

    def wait_for_others(what: str, name: str) -> bool:
        if what == "get_range" and bucket.counts[what] <= 3:
            three.wait(30)
        return False

    bucket.fails = wait_for_others
    check_rows(second, tokens)
    second.readers.release(segment.segment_id)
    assert 3 < bucket.counts["get_range"] <= -(-segment.info.layout().file_bytes // 4096)


def test_a_lost_directory_a_restart_and_a_lost_key(world: World, bucket: Faults) -> None:
    first = world.open("a")
    world.put("a", first, prompt(1, 13), prompt(1, 40))
    until(first, lambda: len(bucket.segments) == 2)
    written = sorted(segment.written for segment in first.tree.segments())
    world.benches["a"].close(first)
    shutil.rmtree(world.benches["a"].root)
    again = world.open("a")
    until_found(again, prompt(1, 40))
    check_rows(again, prompt(1, 40))
    until_kept(again, 2)
    world.benches["a"].close(again)
    bucket.fails = lambda what, name: True
    # With segments of its own a server starts without the bucket; a new directory has no key.
    alone = world.open("a")
    check_rows(alone, prompt(1, 40))
    kept = sorted(s.written for s in alone.tree.segments() if s.foreign_dir is None)
    assert kept == pytest.approx(written, abs=1e-3), "as old as they were"
    world.put("a", alone, prompt(5))
    with pytest.raises(ConfigError, match="s3://bucket/prefix cannot be used"):
        world.open("b")
    world.benches["a"].close(alone)
    bucket.fails = lambda what, name: False
    # What was not sent then is sent now.
    again = world.open("a")
    until(again, lambda: again.summary()["bucket"]["sent"])
    until_found(world.open("b"), prompt(5))
    world.benches["a"].close(again)
    obstore.delete(bucket._store, f"{IDENTITY}/key")
    world.open("c")
    with pytest.raises(ConfigError, match="segments under another key"):
        world.open("a")


def test_the_same_is_there_once_and_stands_for_what_is_evicted(
    world: World, bucket: Faults
) -> None:
    """That it is there is no use of it."""
    first, second = world.open("a"), world.open("b")
    bucket.fails = lambda what, name: what == "list"
    for name, store in (("a", first), ("b", second)):
        world.put(name, store, prompt(1, 13), prompt(1, 40), prompt(2))
    bucket.fails = lambda what, name: False
    for store in (first, second):
        until_listed(store, 3)
        until(store, lambda store=store: len(store._disk.bucket._segments) == 3)
        store.writes.discard([next(iter(store.tree.order))], MissCause.EVICTED)
        until_found(store, prompt(1, 40))
        far, above, other = store.tree.order
        assert far.foreign_dir and (above.info.num_tokens, other.info.num_tokens) == (13, 8)
        check_rows(store, prompt(1, 40))
        until_kept(store, 3)
    assert len(bucket.segments) == 3


def test_the_local_quota_holds(world: World, bucket: Faults) -> None:
    first = world.open("a")
    one = world.benches["a"].one
    second = world.open("b", ssd_gb=gb(2 * one))
    world.put("a", first, *(prompt(number) for number in range(1, 6)))
    for number in (1, 2, 3, 4, 5, 1, 2):
        until_found(second, prompt(number))
        check_rows(second, prompt(number))
        until(second, lambda: not second.summary()["bucket"]["fetching_bytes"])
        assert second.summary()["used_bytes"] <= 2 * one
    until(second, lambda: len(world.benches["b"].files()) <= 2)


@pytest.mark.parametrize("by", ["a", "b"])
def test_a_purge_reaches_the_bucket_and_who_starts_later(
    world: World, bucket: Faults, by: str
) -> None:
    stores = {"a": world.open("a"), "b": world.open("b"), "c": world.open("c")}
    world.put("a", stores["a"], prompt(1), prompt(2))
    for store in stores.values():
        until_found(store, prompt(1))
        use(store, prompt(1))
    for name in ("b", "c"):
        until_kept(stores[name], 1)
    world.benches["c"].close(stores.pop("c"))
    purge(stores[by], prompt(1))
    until(stores[by], lambda: len(bucket.segments) == 1)
    for store in stores.values():
        bucket_world.until_gone(store, prompt(1))
        until_found(store, prompt(2))
    late = world.open("c")
    bucket_world.until_gone(late, prompt(1))
    until(late, lambda: not world.benches["c"].files())
    # What is stored after it stays.
    world.put("a", stores["a"], prompt(1))
    until_found(late, prompt(1))


def test_the_oldest_objects_go_after_a_while(world: World, bucket: Faults) -> None:
    first = world.open("a")
    one = world.benches["a"].one
    world.put("a", first, prompt(1), prompt(2), prompt(3))
    until(first, lambda: len(bucket.segments) == 3)
    second = world.open("b", store_gb=gb(2 * one))
    until(second, lambda: lengths(second, 1, 2, 3) == [0, 8, 8])
    until(second, lambda: len(bucket.segments) == 2)
    # Those that have it do without the bucket, and do not send it again.
    world.benches["a"].close(first)
    first = world.open("a", store_gb=gb(2 * one))
    until_listed(first, 2)
    assert lengths(first, 1, 2, 3) == [8, 8, 8]


def test_expired_objects_go_after_a_while(
    world: World, bucket: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads one goes on."""
    monkeypatch.setattr(peer_module, "GRACE_SECONDS", 600.0)
    monkeypatch.setattr(bucket_module, "RANGE_BYTES", 4096)
    monkeypatch.setattr(bucket_module, "IDLE_SECONDS", 600.0)
    first, second = world.open("a"), world.open("b")
    world.put("a", first, prompt(1), ttl=1000.0)
    until_found(second, prompt(1))
    (segment,) = second.tree.segments()
    opened = second.readers.acquire(segment)
    later = time.time() + 1001
    monkeypatch.setattr("time.time", lambda: later)
    for store in (first, second):
        until(store, lambda store=store: not len(store.tree))
    lists = bucket.counts["list"] + 10
    until(first, lambda: bucket.counts["list"] > lists)
    opened.check_all()
    second.readers.release(segment.segment_id)
    monkeypatch.setattr(peer_module, "GRACE_SECONDS", 0.0)
    until(second, lambda: not bucket.segments)


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_an_object_that_is_damaged_or_gone_is_a_miss(
    world: World, bucket: Faults, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = world.share(prompt(1), prompt(2))
    peer, (span,) = second._disk.bucket, store_factory.look_up(second, prompt(1)).spans
    name = peer.name_of(span.segment.info)
    # Reading finds it before a list does.
    with monkeypatch.context() as patch:
        patch.setattr(peer, "poll", (is_idle := threading.Event()).set)
        assert is_idle.wait(60)
        content = bytearray(obstore.get(bucket._store, name).bytes())
        content[-4096] ^= 1
        obstore.delete(bucket._store, bucket.segments)
        if damage == "flipped":
            obstore.put(bucket._store, name, bytes(content))
        with pytest.raises(SegmentUnreadable) as error:
            check_rows(second, prompt(1))
        second.report(error.value)
        assert lengths(second, 1, 2) == [0, 8] and second.health.state == "ok"
        until(second, lambda: not world.benches["b"].files())
    bucket_world.until_gone(second, prompt(2))


def test_a_bucket_that_fails_is_a_miss_until_it_answers(
    world: World, bucket: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = world.share(prompt(1), prompt(2))
    bucket.fails = lambda what, name: True
    with pytest.raises(StoreUnavailable) as error:
        check_rows(second, prompt(1))
    second.report(error.value)
    assert length(second, prompt(1)) == 0 and second.health.state == "ok"
    world.put("a", first, prompt(3))
    world.put("b", second, prompt(4))
    check_rows(second, prompt(4))
    # A list that was under way may have been answered since.
    until(second, lambda: second.summary()["bucket"]["state"] == "degraded")
    assert "computed until it answers again" in caplog.text
    bucket.fails = lambda what, name: False
    until(second, lambda: second.summary()["bucket"]["state"] == "ok")
    for store, number in ((second, 1), (second, 3), (first, 4)):
        until_found(store, prompt(number))
        check_rows(store, prompt(number))
    assert "answers again after" in caplog.text


def test_headers_say_what_is_a_segment_once_they_can_be_read(
    world: World, bucket: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is none is left alone."""
    monkeypatch.setattr(bucket_module, "_HEADER_BYTES", 64)
    obstore.put(bucket._store, f"{IDENTITY}/segments/x/{'0' * 32}.kv", b"x" * 10_000)
    for name in ("segments/x", "orders/x.json"):
        obstore.put(bucket._store, f"{IDENTITY}/{name}", b"")
    first, second = world.open("a"), world.open("b")
    bucket.fails = lambda what, name: what == "get_range"
    world.put("a", first, prompt(1))
    until(second, lambda: bucket.counts["get_range"] > 2)
    bucket.fails = lambda what, name: False
    until_found(second, prompt(1))
    (real,) = [name for name in bucket.segments if "/x/" not in name]
    content = obstore.get(bucket._store, real).bytes()
    obstore.put(bucket._store, real.replace(real[-8:-3], "fffff"), content)
    until_listed(second, 3)
    check_rows(second, prompt(1))


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_what_is_stored_again_after_a_purge_is_sent_again(
    world: World, bucket: Faults, ahead: float
) -> None:
    """Whatever the clock of the bucket says."""
    bucket.ahead = datetime.timedelta(seconds=ahead)
    first, second, third = (world.open(name) for name in "abc")
    world.put("a", first, prompt(1))
    for store in (first, second, third):
        until_found(store, prompt(1))
        until_listed(store, 1)
    bucket.fails = lambda what, name: what == "list"
    purge(first, prompt(1))
    world.put("a", first, prompt(1))
    bucket.fails = lambda what, name: False
    until(first, lambda: first.summary()["bucket"]["sent"] == 2)
    for store in (second, third):
        until(store, lambda store=store: store_factory.name_of(first, prompt(1)) in store.tree)
        check_rows(store, prompt(1))
    assert len(bucket.segments) == 1


def test_an_object_that_was_replaced_is_found(world: World, bucket: Faults) -> None:
    first, second, third = (world.open(name) for name in "abc")
    bucket.fails = lambda what, name: what == "list"
    for name, store in (("a", first), ("b", second)):
        world.put(name, store, prompt(1))
    bucket.fails = lambda what, name: False
    until_found(third, prompt(1))
    (name,), (old,) = bucket.segments, third.tree.segments()
    other = next(store for store in (first, second) if old.segment_id not in store.tree)
    ((new, path, _),) = segment_files(other._disk.files, other._disk.directory.path)
    obstore.put(bucket._store, name, Path(path).read_bytes())
    until(third, lambda: new in third.tree)
    check_rows(third, prompt(1))


def test_who_may_only_read_follows(world: World, bucket: Faults) -> None:
    first = world.open("a")
    world.put("a", first, prompt(1))
    until(first, lambda: bucket.segments)
    bucket.fails = lambda what, name: what in ("put", "delete")
    second = world.open("b")
    world.put("b", second, prompt(2))
    until(second, lambda: bucket.failures and lengths(second, 1, 2) == [8, 8])
    for number in (1, 2):
        check_rows(second, prompt(number))
    assert second.summary()["bucket"]["state"] == "ok" and len(bucket.segments) == 1


def test_what_builds_on_an_object_outlives_a_start(world: World, bucket: Faults) -> None:
    """Only after a look at the bucket is it known whether there is a place for it."""
    first, second = world.share(prompt(1, 13))
    world.benches["a"].close(first)
    bucket.fails = lambda what, name: what == "put"
    world.put("b", second, prompt(1, 40), prompt(1, 60), prompt(2))
    world.benches["b"].close(second)
    bucket.fails = lambda what, name: True
    second = world.open("b")
    until(second, lambda: bucket.failures)
    assert lengths(second, 2) == [8] and not length(second, prompt(1, 60))
    used, waiting = second.quota.missing(0), second.worker.unused_bytes
    assert waiting == sum(segment.file_bytes for segment in second._disk._orphans) > 0

    # A list alone does not tell.
    bucket.fails = lambda what, name: what == "get" and name.endswith(".kv")
    gets = bucket.counts["get"] + 3
    until(second, lambda: bucket.counts["get"] > gets)
    bucket.fails = lambda what, name: False
    until_found(second, prompt(1, 60))
    assert second.quota.missing(0) == used and not second.worker.unused_bytes
    until(second, lambda: second.summary()["bucket"]["sent"] == 3)
    until_found(third := world.open("c"), prompt(1, 60))
    check_rows(third, prompt(1, 60))
    # Nor is it taken for another server's.
    world.benches["b"].close(second)
    until_found(second := world.open("b"), prompt(1, 60))
    until(second, lambda: not second._disk.bucket._unsent)
    until_kept(second, 3)
    world.benches["b"].close(second)
    purge(third, prompt(1, 13))
    until(third, lambda: len(bucket.segments) == 1)
    second = world.open("b")
    until(second, lambda: len(world.benches["b"].files()) == 1)
    assert not second.worker.unused_bytes


def test_what_becomes_a_local_file_while_it_is_opened_is_read_as_one(world: World) -> None:
    _, second = world.share(prompt(1))
    use(second, prompt(1))
    # Nobody polls, so it is not the store's yet.
    wait_until(lambda: second._disk.bucket.completed)
    (segment,) = second.tree.segments()
    opener, opened = BackgroundThread("test"), threading.Event()
    second.readers._bucket_opener.submit(opened.wait, 30)
    opening = opener.submit(second.readers.acquire, segment)
    wait_until(lambda: second.readers._bucket_opener._jobs.qsize())
    until_kept(second, 1)
    opened.set()
    assert opening.result(30).reader is second._reader
    check_rows(second, prompt(1))
    second.readers.release(segment.segment_id)
    opener.close(10)


def test_a_read_may_outlast_the_store(world: World, bucket: Faults) -> None:
    _, second = world.share(prompt(1), io_timeout=1.0)
    peer, needed = second._disk.bucket, second.quota.missing(0)
    (segment,) = second.tree.segments()
    descriptor = peer.files.open(peer.path_of(segment.info), os.O_RDONLY)
    assert second.quota.missing(0) == needed + world.benches["b"].one, "what is fetched counts"
    with pytest.raises(OSError, match="fetched no more"):
        peer.files.stat("another.kv")
    world.benches["b"].close(second)
    assert not list(world.benches["b"].root.rglob("*.tmp"))
    os.fstat(descriptor)
    peer.files.close(descriptor)
    assert not Path(f"/proc/self/fd/{descriptor}").exists()
