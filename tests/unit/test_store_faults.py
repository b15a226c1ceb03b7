"""What a disk does wrong, and what the store makes of it: no exception, and nothing good lost."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.directory import PINS
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.orders import Purge
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState
from impress_sglang.store.writing import StoreOutcome
from tests import damage
from tests.faults import INDEX, Faults, FaultyFileSystem, Rule, dead_disk, read_only
from tests.unit import store_factory as stores
from tests.unit.kv_factory import as_tokens
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, length, prompt, until, until_well
from tests.unit.waiting import wait_until


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults(seed=1)
    yield faults
    faults.clear()


@pytest.fixture
def store(bench: Workbench, faults: Faults, request: pytest.FixtureRequest) -> PrefixStore:
    # No shorter than needed: a loaded machine is slow as well.
    patience = 2.0 if "hang" in request.node.name else 10.0
    return bench.open(files=FaultyFileSystem(faults), io_timeout=patience)


def read(store: PrefixStore, tokens: tuple[int, ...]) -> None:
    """What a request does with a stored prefix: right rows, or `PrefixUnreadable`, reported."""
    try:
        check_rows(store, tokens)
    except PrefixUnreadable as error:
        store.report(error)
        raise
    finally:
        check_store(store)


READ_FAULTS = {
    "EIO of a block": Rule("EIO", "block"),
    "EIO at open": Rule("EIO", "open", "*.kv"),
    "EMFILE at open": Rule("EMFILE", "open", "*.kv"),
    "ETIMEDOUT of the header": Rule("ETIMEDOUT", "read", "*.kv"),
    "ENODEV of a block": Rule("ENODEV", "block"),
    "the engine dies": Rule("raise", "finish", count=1),
    "an unforeseen exception": Rule("raise", "open", "*.kv"),
    "a block hangs": Rule("hang", "block"),
    "an open hangs": Rule("hang", "open", "*.kv"),
}


@pytest.mark.parametrize("rule", READ_FAULTS.values(), ids=READ_FAULTS)
def test_what_cannot_be_read_now_is_kept_and_comes_back(
    bench: Workbench, store: PrefixStore, faults: Faults, rule: Rule
) -> None:
    bench.put(store, prompt(1, 40))
    began = time.monotonic()
    with faults.injected(rule), pytest.raises(StoreUnavailable):
        read(store, prompt(1, 40))

    assert time.monotonic() - began < 30.0, "the scheduler's thread must not wait for a disk"
    assert store.health.state == "degraded"
    assert length(store, prompt(1, 40)) == 0, "it is left alone"
    assert bench.offer(store, prompt(2)) is StoreOutcome.UNAVAILABLE
    assert store.stats.offers_while_unavailable == 1
    until_well(store)
    check_rows(store, prompt(1, 40))
    bench.put(store, prompt(2))
    check_rows(store, prompt(2))
    assert store.stats.segments_quarantined == store.stats.segments_gone == 0
    assert store.health.summary()["recoveries"] == 1


WRITE_FAULTS = {
    "ENOSPC": [Rule("ENOSPC", "write", "*.tmp")],
    "EIO": [Rule("EIO", "write", "*.tmp")],
    "EIO of the sync": [Rule("EIO", "sync", "*.tmp")],
    "EMFILE": [Rule("EMFILE", "open-write", "*.tmp")],
    "torn": [Rule("torn", "write", "*.tmp")],
    "rename": [Rule("EIO", "rename", "*.tmp")],
    "sync of the folder": [Rule("EIO", "sync_directory")],
    "an unforeseen exception": [Rule("raise", "write", "*.tmp")],
    "read-only": read_only(),
}


@pytest.mark.parametrize("rules", WRITE_FAULTS.values(), ids=WRITE_FAULTS)
def test_what_cannot_be_written_is_a_miss_and_leaves_nothing(
    bench: Workbench,
    store: PrefixStore,
    faults: Faults,
    rules: list[Rule],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench.put(store, prompt(1, 40))
    faults.add(*rules)
    bench.offer(store, prompt(2, 40))
    store.writes.drain()

    assert store.stats.segments_failed == 1
    assert "a prefix of 40 tokens could not be stored" in caplog.text
    assert bench.done == [prompt(1, 40), prompt(2, 40)], "its KVs are not needed any more"
    assert length(store, prompt(2, 40)) == 0
    check_rows(store, prompt(1, 40))
    assert any(faults.hits[rule.name] for rule in rules)
    faults.clear()
    until_well(store)
    bench.put(store, prompt(2, 40))
    check_rows(store, prompt(2, 40))
    assert len(bench.files()) == 2


def test_writes_that_hang_are_given_up_and_their_slots_with_them(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    rule = Rule("hang", "write", "*.tmp")
    faults.add(rule)
    bench.offer(store, prompt(1))
    began = time.monotonic()
    store.writes.drain()

    assert time.monotonic() - began < 30.0
    assert bench.abandoned == bench.done == [prompt(1)]
    assert store.health.state == "read-only"
    faults.clear()
    until(store, lambda: not store.writes)
    until_well(store)


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "torn", "raise"])
def test_the_index_may_refuse(
    bench: Workbench, store: PrefixStore, faults: Faults, fault: str
) -> None:
    """The files are the truth: what the index does not take is stored all the same."""
    with faults.injected(Rule(fault, "write|open-write|rename", INDEX)):
        bench.offer(store, prompt(1, 40))
        store.writes.drain()
    if fault != "raise":
        check_rows(store, prompt(1, 40))
    until_well(store)
    bench.close(store)
    assert length(bench.open(), prompt(1, 40)) in ((0, 40) if fault == "raise" else (40,))


def test_what_hangs_at_the_end_is_left_behind_and_told(
    bench: Workbench, store: PrefixStore, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(store, prompt(1))
    bench.forget(store)
    with faults.injected(Rule("hang", "open-write", INDEX)):
        store.close()
        assert "access times are not kept" in caplog.text


class Mounted(FaultyFileSystem):
    """What stands in the mount point is of another disk while nothing is mounted there."""

    elsewhere = False

    def stat(self, path: Path | str) -> os.stat_result:
        found = super().stat(path)
        return os.stat_result([*found[:2], found.st_dev + self.elsewhere, *found[3:]])


@pytest.mark.parametrize("instead", ["a file", "an empty mount point"])
def test_a_directory_that_goes_and_comes_back(
    bench: Workbench, tmp_path: Path, instead: str
) -> None:
    """Nothing is made in its place, and all is found again but what was purged meanwhile, whose
    files seem to be gone already."""
    files = Mounted()
    store = bench.open(files=files)
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(2))
    away = tmp_path / "away"
    shutil.move(bench.root, away)
    if instead == "a file":
        bench.root.write_text("what stands there now is not ours")
    else:
        bench.root.mkdir()
        files.elsewhere = True
    with pytest.raises(PrefixUnreadable):
        read(store, prompt(1, 40))
    until(store, lambda: store.health.state == "degraded")

    assert length(store, prompt(1, 40)) == 0
    assert bench.offer(store, prompt(3)) is StoreOutcome.UNAVAILABLE
    (purged,) = (segment for segment in store.tree.segments() if segment.info.num_tokens == 8)
    store.writes.discard([purged], MissCause.PURGED)
    until(store, lambda: bool(store.worker.blocked_removals()))
    if instead == "a file":
        bench.root.unlink()
    else:
        bench.root.rmdir()
        files.elsewhere = False
    shutil.move(away, bench.root)
    until_well(store)
    until(store, lambda: not store.worker.blocked_removals())
    check_rows(store, prompt(1, 40))
    assert store.stats.segments_gone == 0 and len(bench.files()) == 1
    store = bench.reopen(store)
    assert length(store, prompt(1, 40)) == 40 and length(store, prompt(2)) == 0


def test_what_is_purged_while_the_disk_refuses_leaves_later(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    """Also from quarantine, and from the file of the pins, where its tokens stand."""
    bench.put_all(store, 1, 2)
    stores.lose(bench, store, stores.name_of(store, prompt(1)))
    assert store.pins.pin(store.namespace(""), as_tokens(prompt(2))) is None
    store.worker.submit(int).result()
    (pins,) = bench.root.glob("*/pins.json")
    assert len(list(bench.root.glob("*/quarantine/*"))) == len(json.loads(pins.read_bytes())) == 1

    with faults.injected(Rule("EIO", "unlink|open-write|write|rename")):
        done = Purge().step(store)
        store.worker.submit(int).result()
        assert store.health.state != "ok" and store.summary()["quarantined_bytes"] > 0
    assert done["segments"] == done["unpinned"] == 1
    until_well(store)
    store.worker.submit(int).result()

    assert not list(bench.root.glob("*/quarantine/*")) and not bench.files()
    assert json.loads(pins.read_bytes()) == [] and store.summary()["quarantined_bytes"] == 0


def test_pins_that_are_refused_twice_are_kept_later(
    bench: Workbench, store: PrefixStore, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nothing else that is written fails."""
    monkeypatch.setattr("impress_sglang.store.health.FIRST_PAUSE_S", 0.05)
    bench.put(store, prompt(1))
    rule = Rule("EIO", "open-write", f"*/{PINS}*")
    with faults.injected(rule):
        assert store.pins.pin(store.namespace(""), as_tokens(prompt(1))) is None
        until(store, lambda: faults.hits[rule.name] >= 2)
    until(store, lambda: list(bench.root.glob(f"*/{PINS}")))
    until_well(store)


@pytest.mark.parametrize("folder", ["", "*/segments", "*/quarantine"])
def test_a_directory_that_was_removed_begins_anew(
    bench: Workbench, store: PrefixStore, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(store, prompt(1, 40))
    path = stores.path_of(bench, stores.look_up(store, prompt(1, 40)))
    shutil.rmtree(next(bench.root.glob(folder)) if folder else bench.root)
    if path.exists():
        damage.flip_data_bit(path)
    with pytest.raises(SegmentUnreadable):
        read(store, prompt(1, 40))
    until(store, lambda: not store.summary()["used_bytes"])
    bench.offer(store, prompt(2, 40))
    store.writes.drain()
    until_well(store)

    assert ("was removed; it begins anew" in caplog.text) == (not folder)
    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))


def test_a_long_chain_of_segments_can_lose_its_head(
    bench: Workbench, store: PrefixStore, request: pytest.FixtureRequest
) -> None:
    """A chat of a thousand turns once ended in RecursionError; here it would after 200."""
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    turns = 250
    tokens = tuple(range(turns))
    for turn in range(turns):
        assert bench.offer(store, tokens[: turn + 1]) is StoreOutcome.ACCEPTED
    store.writes.drain()
    first = next(store.tree.segments())
    stores.lose(bench, store, first.segment_id, gone=True)
    assert first.state is SegmentState.LOST

    assert length(store, tokens) == 0
    bench.put(store, tokens)
    assert length(store, tokens) == turns


def test_the_free_space_may_not_be_known(
    bench: Workbench, store: PrefixStore, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`statvfs` of a directory that is gone once killed the server."""
    monkeypatch.setattr("impress_sglang.store.health.MEASURE_S", 0.0)
    with faults.injected(Rule("EIO", "free_bytes")):
        until(store, lambda: store.health.state == "degraded")
    until_well(store)


def test_descriptors_are_given_back(bench: Workbench, store: PrefixStore, faults: Faults) -> None:
    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))
    before = len(os.listdir("/proc/self/fd"))
    for rule in (Rule("EIO", "block"), Rule("flip", "block", count=1)):
        with faults.injected(rule), pytest.raises(PrefixUnreadable):
            read(store, prompt(1, 40))
        until_well(store)
        check_rows(store, prompt(1, 40))
    # Other threads may have some for a moment.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_dead_disk_raises_nothing(bench: Workbench, store: PrefixStore, faults: Faults) -> None:
    bench.put(store, prompt(1, 40))
    gate = bench.begin(store, prompt(2))
    faults.add(*dead_disk())
    gate.opened.set()
    with pytest.raises(PrefixUnreadable):
        read(store, prompt(1, 40))
    for _ in range(100):
        store.poll()
        assert length(store, prompt(1, 40)) == 0
        assert bench.offer(store, prompt(3)) is not StoreOutcome.ACCEPTED
    store.writes.drain()
    faults.clear()
    until_well(store)
    check_rows(store, prompt(1, 40))
