"""What a disk does wrong, and what the store makes of it: no exception, and nothing good lost."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable, StoreUnavailable
from impress_sglang.management.losses import Cause
from impress_sglang.management.purging import Purge
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import SegmentState
from impress_sglang.management.suspects import MOST_LOOKS
from impress_sglang.management.writing import Offer, StoreOutcome
from tests import damage
from tests.faults import SQL, Faults, FaultyFileSystem, Rule, dead_disk, read_only
from tests.unit import store_factory
from tests.unit.kv_factory import SequenceKVs, as_tokens
from tests.unit.store_factory import (
    Gate,
    Workbench,
    check_rows,
    gb,
    length,
    look_up,
    lose,
    open_source,
    path_of,
    prompt,
    rows,
)
from tests.unit.test_index_scale import rows_of

PATIENCE_S = 0.8
KEYS_BLOCK = 0
RECOVERY_S = 10.0


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults(seed=1)
    yield faults
    faults.clear()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "kv", store_factory.SHAPES["head groups float32"])
    yield bench
    bench.close_all()


@pytest.fixture
def store(bench: Workbench, faults: Faults) -> PrefixStore:
    return bench.open(files=FaultyFileSystem(faults), io_timeout=PATIENCE_S)


def until(store: PrefixStore, condition: Callable[[], bool]) -> None:
    """Poll as the scheduler does after each batch."""
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline, store.summary()
        store.poll()
        time.sleep(0.01)
    store.check_integrity()


def until_well(store: PrefixStore) -> None:
    until(store, lambda: store.health.state == "ok" and not len(store._looks))


def read(store: PrefixStore, tokens: tuple[int, ...]) -> None:
    """What a request does with a stored prefix: right rows, or `PrefixUnreadable`, reported."""
    match = look_up(store, tokens)
    expected = SequenceKVs(store._shape, "", tokens)
    source = None
    try:
        source = open_source(store, match)
        for layer in range(store._shape.num_layers):
            keys, values = rows(store._shape, source, layer)
            assert torch.equal(keys, expected.keys(layer)[: match.num_tokens])
            assert torch.equal(values, expected.values(layer)[: match.num_tokens])
    except PrefixUnreadable as error:
        store.report(error)
        raise
    finally:
        if source is not None:
            store.close_source(source)
        store.check_integrity()


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
    with faults.injected(rule), pytest.raises(PrefixUnreadable) as caught:
        match = look_up(store, prompt(1, 40))
        source = None
        try:
            source = open_source(store, match)
            rows(bench.shape, source, 0)
        finally:
            if source is not None:
                store.close_source(source)
            # What the fault does goes on until the end of this block.
            raised = time.monotonic() - began
            assert raised < 3.0, "the scheduler's thread must not wait for a disk"
    store.report(caught.value)

    assert isinstance(caught.value, StoreUnavailable)
    assert store.health.state == "degraded"
    assert length(store, prompt(1, 40)) == 0, "it is left alone"
    assert bench.offer(store, prompt(2)) is StoreOutcome.UNAVAILABLE
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
    bench: Workbench, store: PrefixStore, faults: Faults, rules: list[Rule]
) -> None:
    bench.put(store, prompt(1, 40))
    faults.add(*rules)
    bench.offer(store, prompt(2, 40))
    store.writes.drain()

    assert store.stats.segments_failed == 1
    assert length(store, prompt(2, 40)) == 0
    check_rows(store, prompt(1, 40))
    assert any(faults.hits[rule.name] for rule in rules)
    faults.clear()
    until_well(store)
    bench.put(store, prompt(2, 40))
    check_rows(store, prompt(2, 40))
    assert len([name for name in bench.files() if name.endswith(".kv")]) == 2


def test_writes_that_hang_are_given_up_and_their_slots_with_them(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    rule = Rule("hang", "write", "*.tmp")
    faults.add(rule)
    bench.offer(store, prompt(1))
    began = time.monotonic()
    store.writes.drain()

    assert time.monotonic() - began < 3.0
    assert bench.abandoned == bench.done == [prompt(1)]
    assert store.health.state == "read-only"
    faults.clear()
    until(store, lambda: not store.writes)
    until_well(store)


@pytest.mark.parametrize("fault", ["EIO", "locked", "malformed", "raise"])
def test_the_index_may_refuse(
    bench: Workbench, store: PrefixStore, faults: Faults, fault: str
) -> None:
    """The files are the truth: what the index does not take is stored all the same."""
    with faults.injected(Rule(fault, SQL)):
        bench.offer(store, prompt(1, 40))
        store.writes.drain()
    if fault != "raise":
        check_rows(store, prompt(1, 40))
    until_well(store)
    bench.close(store)
    again = bench.open()
    assert length(again, prompt(1, 40)) in (0, 40) if fault == "raise" else 40


@pytest.mark.parametrize("fault", ["EIO", "locked"])
def test_the_index_has_all_once_the_disk_is_well(
    bench: Workbench, store: PrefixStore, faults: Faults, fault: str
) -> None:
    """Not only with the next change: until then a kill would cost a start that reads headers."""
    bench.put(store, prompt(1))
    (old,) = rows_of(bench)
    with faults.injected(Rule(fault, SQL)):
        bench.offer(store, prompt(2))
        store.writes.drain()
        store.writes.discard([look_up(store, prompt(1)).spans[0].segment], Cause.PURGED)
        # Whatever the writing thread has to do, for it does it in order.
        store.writes.written_before(0.0).result()
    assert not store._keeper.undeleted and set(rows_of(bench)) == {old}
    until_well(store)
    store.writes.written_before(0.0).result()
    assert set(rows_of(bench)) == {own.segment_id for own in store.tree.segments()} != {old}


def test_a_directory_that_goes_and_comes_back(
    bench: Workbench, store: PrefixStore, tmp_path: Path
) -> None:
    """Unmounted, say: nothing is made in its place, and all is found again."""
    bench.put(store, prompt(1, 40))
    away = tmp_path / "away"
    own = next(bench.root.iterdir())
    shutil.move(own, away)
    own.write_text("what stands there now is not ours")
    with pytest.raises(PrefixUnreadable):
        read(store, prompt(1, 40))
    until(store, lambda: store.health.state == "degraded")

    assert length(store, prompt(1, 40)) == 0
    assert bench.offer(store, prompt(2)) is StoreOutcome.UNAVAILABLE
    assert own.is_file()
    own.unlink()
    shutil.move(away, own)
    until_well(store)
    check_rows(store, prompt(1, 40))
    assert store.stats.segments_gone == 0


def test_what_is_purged_while_the_directory_is_away_does_not_come_back(
    bench: Workbench, store: PrefixStore, tmp_path: Path
) -> None:
    """Each file seems to be gone already."""
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    shutil.move(bench.root, tmp_path / "away")
    store.writes.discard([look_up(store, prompt(1)).spans[0].segment], Cause.PURGED)
    store.writes.written_before(0.0)
    until(store, lambda: bool(store._keeper.undeleted))
    shutil.move(tmp_path / "away", bench.root)
    until_well(store)
    until(store, lambda: not store._keeper.undeleted)

    assert len(bench.files()) == 1
    bench.close(store)
    again = bench.open()
    assert [length(again, prompt(number)) for number in (1, 2)] == [0, 8]


def test_what_is_purged_while_the_disk_refuses_leaves_later(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    """Also from quarantine, and from the file of the pins, where its tokens stand."""
    for number in (1, 2):
        bench.put(store, prompt(number))
    lose(bench, store, look_up(store, prompt(1)).spans[0].segment.segment_id)
    assert store.pins.pin(store.namespace(""), as_tokens(prompt(2))) is None
    store.writes.written_before(0.0).result()
    (pins,) = bench.root.glob("*/pins.json")
    assert len(list(bench.root.glob("*/quarantine/*"))) == len(json.loads(pins.read_bytes())) == 1

    with faults.injected(Rule("EIO", "unlink|open-write|write|rename")):
        done = Purge().step(store)
        store.writes.written_before(0.0).result()
        assert store.health.state != "ok" and store.summary()["quarantined_bytes"] > 0
    assert len(done.segment_ids) == done.unpinned == 1
    until_well(store)
    store.writes.written_before(0.0).result()

    assert not list(bench.root.glob("*/quarantine/*")) and not bench.files()
    assert json.loads(pins.read_bytes()) == [] and store.summary()["quarantined_bytes"] == 0


def test_a_directory_that_was_removed_begins_anew(
    bench: Workbench, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(store, prompt(1, 40))
    shutil.rmtree(bench.root)
    with pytest.raises(SegmentUnreadable):
        read(store, prompt(1, 40))
    until(store, lambda: store.health.state == "degraded")
    until_well(store)

    assert "was removed; it begins anew" in caplog.text
    assert length(store, prompt(1, 40)) == 0
    assert store.summary()["used_bytes"] == 0
    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))


class _OtherDisk(FaultyFileSystem):
    """The mount point without what was mounted there."""

    gone = False

    def stat(self, path: Path | str) -> os.stat_result:
        found = super().stat(path)
        fields = [*found[:2], found.st_dev + self.gone, *found[3:]]
        return os.stat_result(fields)


def test_nothing_is_made_in_the_place_of_a_disk_that_is_not_mounted(bench: Workbench) -> None:
    files = _OtherDisk()
    store = bench.open(files=files)
    bench.put(store, prompt(1, 40))
    files.gone = True
    shutil.rmtree(bench.root)
    bench.root.mkdir()
    with pytest.raises(SegmentUnreadable):
        read(store, prompt(1, 40))
    until(store, lambda: "not mounted" in store.health.summary()["last_failure"])

    assert store.health.state == "degraded"
    assert list(bench.root.iterdir()) == []
    files.gone = False
    until_well(store)


def test_a_dead_disk_raises_nothing(bench: Workbench, store: PrefixStore, faults: Faults) -> None:
    bench.put(store, prompt(1, 40))
    gate = Gate(SequenceKVs(bench.shape, "", prompt(2)))
    bench.offer(store, prompt(2), read_layers=gate)
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


def test_the_free_space_may_not_be_known(
    bench: Workbench, store: PrefixStore, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`statvfs` of a directory that is gone once killed the server."""
    monkeypatch.setattr("impress_sglang.management.monitor.MEASURE_SECONDS", 0.0)
    with faults.injected(Rule("EIO", "free_bytes")):
        until(store, lambda: store.health.state == "degraded")
    until_well(store)


def test_a_full_disk_takes_nothing_more(
    bench: Workbench, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impress_sglang.management.monitor.MEASURE_SECONDS", 0.0)
    store = bench.open(files=FaultyFileSystem(faults))
    with faults.injected(Rule("full", "free_bytes")):
        until(store, lambda: store._monitor.free_bytes == 0)
        assert bench.offer(store, prompt(1)) is StoreOutcome.NO_SPACE
    until(store, lambda: store._monitor.free_bytes > 0)
    bench.put(store, prompt(1))


def shared_prefix(bench: Workbench, store: PrefixStore) -> tuple[Path, list[tuple[int, ...]]]:
    """A stored prefix and two that build on it; the file of the first."""
    first = prompt(1, 24)
    chats = [(*first, *prompt(number, 16)) for number in (7, 8)]
    for tokens in (first, *chats):
        bench.put(store, tokens)
    return path_of(bench, look_up(store, first)), chats


def test_a_damaged_segment_is_set_aside_and_what_builds_on_it_stays(
    bench: Workbench, store: PrefixStore
) -> None:
    """`test_store_damage.py` has other kinds of damage."""
    path, chats = shared_prefix(bench, store)
    damage.flip_data_bit(path, KEYS_BLOCK)
    with pytest.raises(SegmentUnreadable):
        read(store, chats[0])
    assert length(store, chats[0]) == 0, "it is not used before it is known to be good"
    until(store, lambda: store.stats.segments_quarantined == 1)

    assert store.health.state == "ok", "a bad block is not a bad disk"
    assert not path.exists()
    assert [own.name for own in bench.root.glob("*/quarantine/*")] == [path.name]
    assert length(store, chats[1]) == 0
    bench.put(store, chats[0])
    for tokens in chats:
        check_rows(store, tokens)
    assert store.stats.segments_written == 4, "only the lost part was written again"


def test_a_damaged_segment_on_a_read_only_disk_costs_nothing_else(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    """It cannot be set aside there; what else is stored is served all the same."""
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(2, 40))
    path = path_of(bench, look_up(store, prompt(1, 40)))
    faults.add(*read_only())
    damage.flip_data_bit(path, KEYS_BLOCK)
    with pytest.raises(SegmentUnreadable):
        read(store, prompt(1, 40))
    until(store, lambda: store.health.state != "ok")
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        store.poll()
        assert store.health.readable
        time.sleep(0.01)
    check_rows(store, prompt(2, 40))
    assert length(store, prompt(1, 40)) == 0
    faults.clear()
    until(store, lambda: store.stats.segments_quarantined == 1)


@pytest.mark.parametrize("folder", ["segments", "quarantine"])
def test_a_folder_of_the_store_that_was_removed_is_made_anew(
    bench: Workbench, store: PrefixStore, folder: str
) -> None:
    bench.put(store, prompt(1, 40))
    path = path_of(bench, look_up(store, prompt(1, 40)))
    shutil.rmtree(next(bench.root.glob(f"*/{folder}")))
    if path.exists():
        damage.flip_data_bit(path, KEYS_BLOCK)
    with pytest.raises(SegmentUnreadable):
        read(store, prompt(1, 40))
    until(store, lambda: store.stats.segments_gone + store.stats.segments_quarantined == 1)
    bench.offer(store, prompt(2, 40))
    store.writes.drain()
    until_well(store)

    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))


def test_a_bit_that_was_wrong_only_in_memory_costs_one_recompute(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    path, chats = shared_prefix(bench, store)
    with faults.injected(Rule("flip", "block", count=1)), pytest.raises(SegmentUnreadable):
        read(store, chats[0])
    until(store, lambda: store.stats.segments_cleared == 1)

    assert path.exists()
    check_rows(store, chats[0])


def test_a_segment_that_cannot_be_read_now_makes_room(bench: Workbench, faults: Faults) -> None:
    """As behind a bad sector, before looks have decided."""
    store = bench.open(files=FaultyFileSystem(faults), ssd_gb=gb(bench.one))
    bench.put(store, prompt(1))
    path = path_of(bench, look_up(store, prompt(1)))
    with faults.injected(Rule("EIO", "read|block", f"*{path.name}")):
        with pytest.raises(StoreUnavailable):
            read(store, prompt(1))
        until(store, lambda: store.health.state == "ok")
        bench.put(store, prompt(2))
        check_rows(store, prompt(2))
    assert len(bench.files()) == 1
    assert store.summary()["segments_suspect"] == 0


@pytest.fixture
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impress_sglang.management.suspects.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("impress_sglang.management.suspects.LONGEST_PAUSE_S", 0.01)


def looks_at(faults: Faults, store: PrefixStore, rule: Rule, count: int) -> None:
    """Until so many looks have found the fault."""
    before = faults.hits[rule.name]
    until(store, lambda: faults.hits[rule.name] >= before + count)


def test_a_segment_behind_a_bad_sector_is_set_aside(
    bench: Workbench, store: PrefixStore, faults: Faults, frequent_looks: None
) -> None:
    path, chats = shared_prefix(bench, store)
    rule = Rule("EIO", "read|block", f"*{path.name}")
    with faults.injected(rule):
        with pytest.raises(StoreUnavailable):
            read(store, chats[0])
        until(store, lambda: store.stats.segments_quarantined == 1)
        assert faults.hits[rule.name] == 1 + MOST_LOOKS, "the request, and the looks"
        assert not path.exists()
        assert store.health.state == "ok" and store.summary()["segments_suspect"] == 0
        bench.put(store, chats[0])
        for tokens in chats:
            check_rows(store, tokens)
    assert store.stats.segments_unreadable == 1


def test_a_disk_that_does_not_answer_condemns_nothing(
    bench: Workbench, store: PrefixStore, faults: Faults, frequent_looks: None
) -> None:
    """Not even a new file can be made: what cannot be read says nothing about one segment."""
    path, chats = shared_prefix(bench, store)
    sector = Rule("EIO", "read|block", f"*{path.name}")
    with faults.injected(sector):
        with pytest.raises(StoreUnavailable):
            read(store, chats[0])
        with faults.injected(Rule("EMFILE", "open-write", "*/probe")):
            # Nobody else has noticed.
            store.health.probed(None, readable=True)
            looks_at(faults, store, sector, 2 * MOST_LOOKS)
        assert path.exists() and store.stats.segments_quarantined == 0
    until_well(store)
    check_rows(store, chats[0])
    assert store.stats.segments_cleared == 1


@pytest.mark.parametrize("fault", ["EMFILE", "ENOMEM", "EACCES"])
def test_what_the_machine_refuses_condemns_nothing(
    bench: Workbench, store: PrefixStore, faults: Faults, frequent_looks: None, fault: str
) -> None:
    """It says nothing about the file, although the rest of the disk answers."""
    path, chats = shared_prefix(bench, store)
    name = look_up(store, chats[0]).spans[0].segment.segment_id
    rule = Rule(fault, "open", f"*{path.name}")
    with faults.injected(rule):
        store.report(SegmentUnreadable(name, "a test"))
        looks_at(faults, store, rule, 2 * MOST_LOOKS)
        assert path.exists() and store.stats.segments_quarantined == 0
    until_well(store)
    check_rows(store, chats[0])


def test_a_look_that_was_under_way_when_the_disk_came_back_does_not_count(
    bench: Workbench, store: PrefixStore, faults: Faults, frequent_looks: None
) -> None:
    path, chats = shared_prefix(bench, store)
    name = look_up(store, chats[0]).spans[0].segment.segment_id
    sector = Rule("EIO", "read", f"*{path.name}")
    with faults.injected(sector):
        store.report(SegmentUnreadable(name, "a test"))
        looks_at(faults, store, sector, MOST_LOOKS - 1)
        (suspect,) = store._looks._suspects.values()
        until(store, lambda: suspect.look is not None)
        store._looks.hurry()
        until(store, lambda: suspect.look is None)
        assert suspect.looks <= 0 and path.exists()
    until_well(store)
    check_rows(store, chats[0])


def test_what_was_set_aside_does_not_come_back_with_a_power_loss(
    bench: Workbench, tmp_path: Path
) -> None:
    files = FaultyFileSystem(journal=tmp_path / "journal")
    store = bench.open(files=files)
    path, chats = shared_prefix(bench, store)
    damage.flip_data_bit(path, KEYS_BLOCK)
    with pytest.raises(SegmentUnreadable):
        read(store, chats[0])
    until(store, lambda: store.stats.segments_quarantined == 1)
    files.power_loss(database="lost")
    bench.forget(store)

    assert not path.exists()
    assert length(bench.open(), chats[0]) == 0


def test_a_long_chain_of_segments_can_lose_its_head(
    bench: Workbench, store: PrefixStore, request: pytest.FixtureRequest
) -> None:
    """A chat of a thousand turns once ended in RecursionError; here it would after 200."""
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    turns = 250
    tokens = tuple(range(turns))
    for turn in range(turns):
        outcome = store.writes.offer(
            "",
            Offer(
                as_tokens(tokens[: turn + 1]),
                SequenceKVs(bench.shape, "", tokens[: turn + 1]).read_from,
                lambda: None,
                lambda: None,
                min_tokens=1,
            ),
        )
        assert outcome is StoreOutcome.ACCEPTED
    store.writes.drain()
    first = next(store.tree.segments())
    path = store._directory.segment_path(first.segment_id)
    path.unlink()
    store.report(SegmentUnreadable(first.segment_id, "is missing"))
    until(store, lambda: first.state is SegmentState.LOST)

    assert length(store, tokens) == 0
    bench.put(store, tokens)
    assert length(store, tokens) == turns


def test_at_a_start_what_cannot_be_read_is_left_where_it_is(
    bench: Workbench, faults: Faults
) -> None:
    """It counts, and so does what builds on it: there is less room for others."""
    store = bench.open()
    path, chats = shared_prefix(bench, store)
    used = store.summary()["used_bytes"]
    bench.close(store)
    for index in bench.root.glob("*/catalog.sqlite*"):
        index.unlink()
    with faults.injected(Rule("EMFILE", "open", f"*{path.name}")):
        store = bench.open(files=FaultyFileSystem(faults), ssd_gb=gb(used))
        assert length(store, chats[0]) == 0
    assert bench.offer(store, prompt(3)) is StoreOutcome.NO_SPACE
    assert len(bench.files()) == 3

    store = bench.reopen(store)
    for tokens in chats:
        check_rows(store, tokens)


def test_nothing_is_evicted_for_an_offer_that_is_refused_all_the_same(bench: Workbench) -> None:
    """Beside the last segment of the match there is a worse version of the same tokens."""
    store = bench.open(ssd_gb=gb(2 * bench.one))
    worse, best, offered = ((1, *prompt(number, 7)) for number in (2, 3, 4))
    bench.put(store, worse, quality=store_factory.QUARTER)
    (read,) = store.tree.segments()
    bench.put(store, best)
    store._readers.acquire(read)

    assert bench.offer(store, offered, quality=store_factory.QUARTER) is StoreOutcome.NO_SPACE

    store._readers.release(read.segment_id)
    check_rows(store, best)
    assert store.stats.segments_evicted == 0


def test_prompts_that_begin_alike_replace_each_other(bench: Workbench) -> None:
    """With room for one, each further prompt was refused for ever."""
    prompts = [(1, *prompt(number, 7)) for number in range(2, 6)]
    store = bench.open(ssd_gb=gb(bench.one))
    for tokens in prompts:
        bench.put(store, tokens)
        assert length(store, tokens) == 8
    assert store.stats.offers_without_space == 0


def test_a_prompt_that_shares_most_of_another_does_not_replace_it(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(bench.one))
    bench.put(store, prompt(1))

    assert bench.offer(store, (*prompt(1)[:6], 1, 2)) is StoreOutcome.NO_SPACE
    assert length(store, prompt(1)) == 8


def test_descriptors_are_given_back(bench: Workbench, store: PrefixStore, faults: Faults) -> None:
    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))
    before = len(os.listdir("/proc/self/fd"))
    for rule in (Rule("EIO", "block"), Rule("flip", "block", count=1)):
        with faults.injected(rule), pytest.raises(PrefixUnreadable):
            read(store, prompt(1, 40))
        until_well(store)
        check_rows(store, prompt(1, 40))
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("seed", range(4))
def test_what_was_published_outlives_a_power_loss(
    bench: Workbench, tmp_path: Path, seed: int
) -> None:
    """Only what was synced is left, or with the other seeds also some of the rest."""
    files = FaultyFileSystem(journal=tmp_path / "journal")
    store = bench.open(files=files)
    published = [prompt(number, 24) for number in range(3)]
    for tokens in published:
        bench.put(store, tokens)
    # One that ends in the middle of a write, which nobody waited for.
    files.faults.add(Rule("kill", "write", "*.tmp", after=seed % 3))
    bench.offer(store, prompt(9, 24))
    until_ended = time.monotonic() + RECOVERY_S
    while files.faults.hits.total() == 0 and time.monotonic() < until_ended:
        time.sleep(0.01)
    files.power_loss(everything=not seed, seed=seed, database=("kept", "lost")[seed % 2])
    bench._open.remove(store)

    again = bench.open()
    for tokens in published:
        check_rows(again, tokens)
    assert length(again, prompt(9, 24)) == 0
    assert not [name for name in bench.files() if name.endswith(".tmp")]
