"""Several servers of a model on one directory: each finds what the others have stored."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from impress_sglang.errors import ConfigError, SegmentUnreadable, StoreInUseError, StoreUnavailable
from impress_sglang.paper.store import PartStore
from impress_sglang.storage import directory as directory_module
from impress_sglang.storage.directory import MARKER, take_free
from impress_sglang.storage.files import FileSystem
from impress_sglang.store import peers as peers_module
from impress_sglang.store import unattached as places_module
from impress_sglang.store.journal import encode
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.store import RETRY_SECONDS
from impress_sglang.store.writing import StoreOutcome
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory as stores
from tests.unit.kv_factory import IDENTITY, as_tokens, flip_byte
from tests.unit.store_checks import check_store
from tests.unit.store_factory import COARSE, Workbench, check_rows, length, lengths, prompt, until
from tests.unit.waiting import Clock


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks, and attempts to place segments, do not wait for each other."""
    monkeypatch.setattr(peers_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(peers_module, "FOLDERS_SECONDS", 0.02)
    monkeypatch.setattr(places_module, "_RETRY_SECONDS", 0.01)


Two = tuple[PartStore, PartStore]


@pytest.fixture
def two(bench: Workbench) -> Two:
    return bench.open(), bench.open()


def folder_of(store: PartStore) -> Path:
    return store._disk.directory.path


def until_stored(store: PartStore, tokens: tuple[int, ...], count: int | None = None) -> None:
    wanted = len(tokens) if count is None else count
    until(store, lambda: length(store, tokens) == wanted)


def test_what_one_stores_another_finds(bench: Workbench, two: Two) -> None:
    first, second = two
    assert [folder_of(store).name for store in two] == [IDENTITY, f"{IDENTITY}.1"]
    bench.put(first, prompt(1, 13))
    bench.put(first, prompt(2), namespace="salt")
    bench.put(first, prompt(3), quality=COARSE)
    until_stored(second, prompt(1, 13))
    bench.put(second, prompt(1, 40))
    until_stored(first, prompt(1, 40))
    bench.put(first, prompt(1, 60))
    until_stored(second, prompt(1, 60))
    for store in two:
        check_rows(store, prompt(1, 60))
        check_rows(store, prompt(2), namespace="salt")
        check_rows(store, prompt(3), quality=COARSE, rows_of=COARSE)
        assert length(store, prompt(2)) == length(store, prompt(3)) == 0
        assert bench.offer(store, prompt(1, 60)) is StoreOutcome.ALREADY_STORED
    used = [store.summary() for store in two]
    assert used[0]["used_bytes"] == used[1]["other_servers_bytes"]
    assert used[1]["used_bytes"] == used[0]["other_servers_bytes"] > 0


@pytest.mark.parametrize("killed", [True, False])
def test_a_folder_without_a_server_is_served_and_taken_over(
    bench: Workbench, two: Two, killed: bool
) -> None:
    first, second = two
    bench.put(first, prompt(1, 13))
    until_stored(second, prompt(1, 13))
    bench.put(second, prompt(1, 40))
    until_stored(first, prompt(1, 40))
    (Workbench.kill if killed else Workbench.close)(bench, first)
    check_rows(second, prompt(1, 40))
    bench.put(second, prompt(3))
    third = bench.open()
    assert folder_of(third) == folder_of(first)
    check_rows(third, prompt(1, 40))
    check_rows(third, prompt(3))
    (Workbench.kill if killed else Workbench.close)(bench, second)
    bench.put(third, prompt(1, 60))
    bench.close(third)
    alone = bench.open()
    check_rows(alone, prompt(1, 60))
    assert folder_of(alone).name == IDENTITY


def test_a_folder_that_another_server_has_made_again_is_its_own(
    bench: Workbench, two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key is the same, but not its lock."""
    first, _ = two
    bench.put(first, prompt(1))
    shutil.rmtree(folder_of(first))
    third = bench.open()
    assert folder_of(third) == folder_of(first)
    first.health._measured_at = -math.inf
    until(first, lambda: "used by another process" in str(first.health.summary()))
    assert bench.offer(first, prompt(2)) is StoreOutcome.UNAVAILABLE
    bench.put_all(third, 3, 4)
    bench.close(third)
    stores.until_well(first)
    until(first, lambda: bench.offer(first, prompt(5)) is not StoreOutcome.UNAVAILABLE)
    stores.until_well(first)
    bench.close(first)
    again = bench.open()
    assert lengths(again, 1, 2, 3, 4, 5) == [0, 0, 8, 8, 8]
    assert "is damaged" not in caplog.text


# What becomes of the journal of another server.
JOURNAL_DAMAGE: dict[str, Callable[[Path], object]] = {
    "cannot be read": lambda journal: None,
    "flipped": lambda journal: flip_byte(journal, journal.stat().st_size - 100),
    "behind": lambda journal: journal.write_bytes(journal.read_bytes().splitlines(True)[0]),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("purges", [False, True])
@pytest.mark.parametrize("damage", JOURNAL_DAMAGE)
def test_own_segments_outlive_a_start_while_others_are_not_known(
    bench: Workbench, two: Two, damage: str, purges: bool
) -> None:
    """They may build on what another server has, and may be of what is purged."""
    first, second = two
    bench.put(second, prompt(1, 13))
    until_stored(first, prompt(1, 13))
    bench.put(first, prompt(1, 40))
    bench.put(first, prompt(1, 60))
    bench.close(first)
    bench.kill(second)
    JOURNAL_DAMAGE[damage](folder_of(second) / "journal")
    files = FaultyFileSystem()
    if damage == "cannot be read":
        files.faults.add(Rule("EIO", "open", f"*{IDENTITY}.1/journal"))
    again = bench.open(files=files)
    again.worker.submit(int).result()
    assert length(again, prompt(1, 60)) == 0 and len(bench.files()) == 3
    assert again.quota.summary()["used_bytes"] == 0 < again.worker.unused_bytes
    if purges:
        stores.purge(again, prompt(1, 8))
        until(again, lambda: len(bench.files()) == 1)
        assert not again.worker.unused_bytes
        return
    # The next server of that folder finds its files.
    bench.open()
    bench.close(again)
    check_rows(bench.open(), prompt(1, 60))


@pytest.mark.parametrize("damage", ["gone", "flipped", "folder"])
def test_a_file_that_another_has_lost_is_a_miss(bench: Workbench, two: Two, damage: str) -> None:
    first, second = two
    bench.put(first, prompt(1, 13))
    bench.put(first, prompt(2))
    until_stored(second, prompt(2))
    bench.put(second, prompt(1, 40))
    name = stores.name_of(second, prompt(1, 13))
    path = bench.file_of(name)
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        flip_byte(path, path.stat().st_size - 4096)
    second.report(SegmentUnreadable(name, "a test"))
    assert length(second, prompt(1, 40)) == 0 and second.health.state == "ok"
    assert path.exists() == (damage != "gone"), "it is not ours to move"
    for _ in range(3):
        second._disk.peers.poll()
        second.poll()
    check_store(second)
    assert lengths(second, 1, 2) == [0, 8], "it is not used again"
    bench.put(second, prompt(1, 13))
    check_rows(second, prompt(1, 40))


def test_a_file_of_another_that_cannot_be_read_now_is_used_later(
    bench: Workbench, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, (first, second) = Clock(), two
    clock.now = time.monotonic()
    monkeypatch.setattr(places_module, "time", SimpleNamespace(monotonic=clock, time=time.time))
    bench.put(first, prompt(1, 13))
    until_stored(second, prompt(1, 13))
    bench.put(second, prompt(1, 40))
    second.report(StoreUnavailable(stores.name_of(second, prompt(1, 13)), "a test"))
    assert length(second, prompt(1, 40)) == 0 and second.health.state == "ok"
    clock.now += RETRY_SECONDS
    until_stored(second, prompt(1, 40))
    check_rows(second, prompt(1, 40))


def test_what_it_builds_on_may_be_there_by_another_name(bench: Workbench, two: Two) -> None:
    """Its server wrote that it builds on a segment that has been replaced since."""
    first, second = two
    third = bench.open()
    bench.put(first, prompt(1, 13))
    until_stored(second, prompt(1, 13))
    third._disk.peers.close(10)
    bench.put(second, prompt(1, 40))
    (span,) = stores.look_up(first, prompt(1, 13)).spans
    first.writes.discard([span.segment], MissCause.DAMAGED)
    bench.put(first, prompt(1, 13))
    third._disk.peers.poll()
    until_stored(third, prompt(1, 40))
    check_rows(third, prompt(1, 40))


# The last lines are sound, but say what no server says.
TAILS = (
    *(b"torn", b"0123456789abcdef {}\n", b"\n\n", bytes(100)),
    encode(b"[]") + encode(b'{"gone": 3}'),
)


@pytest.mark.parametrize("tail", TAILS)
def test_damage_of_a_journal_costs_what_is_damaged(bench: Workbench, two: Two, tail: bytes) -> None:
    first, second = two
    bench.put(first, prompt(1))
    until_stored(second, prompt(1))
    bench.kill(first)
    path = folder_of(first) / "journal"
    path.write_bytes(path.read_bytes() + tail)
    second._disk.peers.poll()
    assert lengths(second, 1) == [8]
    again = bench.open()
    bench.put(again, prompt(2))
    until_stored(second, prompt(2))
    assert lengths(second, 1, 2) == lengths(again, 1, 2) == [8, 8]
    bench.close(again)
    path.unlink()
    until_stored(second, prompt(1), 0)
    bench.open()
    until_stored(second, prompt(2))
    assert lengths(second, 1, 2) == [8, 8]


@pytest.mark.parametrize("alive", [True, False])
def test_a_purge_reaches_all(bench: Workbench, two: Two, alive: bool) -> None:
    first, second = two
    for store in two:
        bench.put(store, prompt(1, 13))
    bench.put(first, prompt(1, 40))
    bench.put(first, prompt(2))
    until_stored(second, prompt(2))
    bench.put(second, prompt(3))
    until_stored(first, prompt(3))
    assert first.pins.pin(first.namespace(""), as_tokens(prompt(1, 13))) is None
    if not alive:
        bench.kill(first)
    stores.purge(second, prompt(1, 8))
    assert length(second, prompt(1, 40)) == 0
    if not alive:
        # It was there twice, and neither is in a folder without a server any more.
        until(second, lambda: len(bench.files()) == 2)
        assert lengths(second, 1, 2, 3) == [0, 8, 8]
        first = bench.open()
    until_stored(first, prompt(1, 40), 0)
    until(first, lambda: len(bench.files()) == 2)
    assert lengths(first, 1, 2, 3) == lengths(second, 1, 2, 3) == [0, 8, 8]
    until(first, lambda: not len(first.pins))
    # What is stored from then on is not what was purged.
    bench.put(first, prompt(1, 13))
    bench.close(first)
    check_rows(bench.open(), prompt(1, 13))
    until_stored(second, prompt(1, 13))


def test_the_quota_is_that_of_the_directory(bench: Workbench) -> None:
    options = {"ssd_gb": stores.gb(8 * bench.one)}
    first, second = bench.open(**options), bench.open(**options)

    def bytes_there() -> int:
        num_bytes = 0
        for path in bench.root.glob("*/segments/*/*"):
            # It may be evicted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                num_bytes += path.stat().st_size
        return num_bytes

    bench.put_all(first, *range(1, 9))
    until_stored(second, prompt(8))
    assert bench.offer(second, prompt(20)) is StoreOutcome.NO_SPACE
    until(first, lambda: len(first.tree) < 8)
    numbers = itertools.count(20)

    def stored() -> bool:
        first.poll()
        assert bytes_there() <= 8 * bench.one
        if bench.offer(second, prompt(next(numbers))) is StoreOutcome.ACCEPTED:
            second.writes.drain()
        # Who has less than a share gets it, and then makes room itself.
        return second.stats.segments_evicted >= 3 and second.tree.file_bytes >= 3 * bench.one

    until(second, stored)
    first.worker.submit(int).result()
    shares = [store.summary()["used_bytes"] // bench.one for store in (first, second)]
    assert shares[0] >= 4 and sum(shares) <= 8, "nobody gives more than what is above its share"


def test_room_comes_from_folders_without_a_server(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impress_sglang.store.quota._CHECK_SECONDS", 0.0)
    options = {"ssd_gb": stores.gb(4 * bench.one)}
    first, second = bench.open(**options), bench.open(**options)
    bench.put_all(first, 1, 2)
    bench.put_all(second, 3, 4)
    until_stored(second, prompt(2))
    bench.kill(first)
    for path, age in zip(sorted(folder_of(first).rglob("*.kv")), (2, 1), strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    until(second, lambda: bench.offer(second, prompt(5)) is StoreOutcome.ACCEPTED)
    second.writes.drain()
    until(second, lambda: second._disk.peers.num_bytes == bench.one)
    assert lengths(second, 3, 4, 5) == [8, 8, 8] and sum(lengths(second, 1, 2)) == 8
    assert len(bench.files()) == 4


def test_no_more_goes_than_is_needed_until_the_free_space_is_measured(bench: Workbench) -> None:
    files = stores.Room()
    first, second = bench.open(files=files), bench.open(files=files)
    bench.put_all(first, *range(8))
    until_stored(second, prompt(7))
    bench.kill(first)
    files.leave(second, 0)
    second.health._measured_at = math.inf
    until(second, lambda: not second.health._measuring)
    outcomes = []
    for number in range(20, 24):
        outcomes.append(bench.offer(second, prompt(number)))
        second.worker.submit(int).result()
        second.poll()
    assert outcomes == 2 * [StoreOutcome.NO_SPACE, StoreOutcome.ACCEPTED]
    assert len(bench.files()) == 8


def test_servers_share_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So namespaces have the same names there, and others with another model."""
    monkeypatch.setattr(directory_module, "MAX_SERVERS", 2)
    files, other = FileSystem(), stores.OTHER_IDENTITY
    first, second = (take_free(files, tmp_path, IDENTITY) for _ in range(2))
    name = first.namespace("a" * 10_000)
    assert name == second.namespace("a" * 10_000) != first.namespace("") and len(name) == 32
    with pytest.raises(StoreInUseError, match="used by another"):
        take_free(files, tmp_path, IDENTITY)
    first.close()
    shutil.rmtree(first.path)
    again = take_free(files, tmp_path, IDENTITY)
    assert again.path == first.path and again.key == second.key
    third = take_free(files, tmp_path, other)
    assert third.namespace("a" * 10_000) != name
    # Its server has not written its key yet.
    (third.path / MARKER).unlink()
    monkeypatch.setattr(directory_module, "_KEY_SECONDS", 0.05)
    with pytest.raises(ConfigError, match="remove it"):
        take_free(files, tmp_path, other)
    for directory in (second, again, third):
        directory.close()
