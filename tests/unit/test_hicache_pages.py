"""Pages of HiCache on SSD: whole or missing, whatever happens to disk, process and file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from impress_sglang.errors import ConfigError
from impress_sglang.hicache import pages as pages_module
from impress_sglang.hicache.pages import SUFFIX, PageStore, pack_bytes
from tests.damage import flip_bit, truncate
from tests.faults import FaultyFileSystem, Killed, Rule, dead_disk, read_only
from tests.unit.waiting import wait_until

IDENTITY, OTHER = "ab" * 16, "cd" * 16
# No multiple of a block.
SIZE = 10_000
PACK_OF_ONE = pack_bytes([SIZE])
Open = Callable[..., PageStore]


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


def store(pages: PageStore, *numbers: int) -> list[bool]:
    return pages.set(keys(*numbers), lambda place: memoryview(content(numbers[place])))


def load(pages: PageStore, *numbers: int) -> list[int]:
    """The numbers that were read, all of them rightly."""
    got: dict[int, bytes] = {}

    def put(place: int, found: memoryview) -> None:
        got[place] = bytes(found)

    found = pages.get(keys(*numbers), put)
    assert [place in got for place in range(len(numbers))] == found
    for place, page in got.items():
        assert page == content(numbers[place])
    return [numbers[place] for place in sorted(got)]


def packs(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def files() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def opened(
    tmp_path: Path, files: FaultyFileSystem, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """Opens stores in one directory; each look for packs of others is made."""
    monkeypatch.setattr(pages_module, "SCAN_SECONDS", -1.0)
    stores: list[PageStore] = []

    def open_pages(identity: str = IDENTITY, gb: float = 1.0, **how: object) -> PageStore:
        how = {"patience": 20.0, "files": files} | how
        pages = PageStore(tmp_path, identity, ssd_bytes=int(gb * 1e9), **how)  # type: ignore[arg-type]
        stores.append(pages)
        return pages

    yield open_pages
    files.faults.clear()
    for pages in stores:
        pages.close()


def test_pages_come_back_after_a_restart_and_in_any_order(opened: Open, tmp_path: Path) -> None:
    first = opened()
    assert first.leading(keys(1, 2, 3)) == 0 and load(first, 1) == []
    assert store(first, 1, 2, 3) == [True] * 3
    (pack,) = packs(tmp_path)
    assert pack.stat().st_mode & 0o777 == 0o600
    assert pack.parent.stat().st_mode & 0o777 == 0o700
    assert pack.stat().st_size == pack_bytes([SIZE] * 3)
    for pages in (first, opened()):
        assert pages.leading(keys(1, 2, 9, 3)) == 2
        assert pages.has(keys(9, 3)) == [False, True]
        assert load(pages, 3, 9, 1, 2) == [3, 1, 2]


def test_what_is_stored_is_not_written_again(opened: Open, tmp_path: Path) -> None:
    pages = opened()
    store(pages, 1, 2)
    assert store(pages, 1, 2) == [True] * 2
    # Of a part, the rest; of the same page twice, one.
    assert store(pages, 2, 3, 3) == [True] * 3
    sizes = [pack.stat().st_size for pack in packs(tmp_path)]
    assert sum(sizes) == pack_bytes([SIZE] * 2) + PACK_OF_ONE
    assert load(pages, 1, 2, 3) == [1, 2, 3]


def test_many_pages_are_several_packs_and_neighbours_one_read(
    opened: Open, files: FaultyFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "PACK_BYTES", 4 * SIZE)
    numbers = range(10)
    pages = opened()
    store(pages, *numbers)
    assert len(packs(tmp_path)) == 3
    before = files.faults.operations["read"]
    assert load(pages, *numbers) == [*numbers]
    assert files.faults.operations["read"] - before == 3
    monkeypatch.setattr(pages_module, "RUN_BYTES", 2 * SIZE)
    assert load(pages, *numbers) == [*numbers]
    assert files.faults.operations["read"] - before > 3 + 5


def test_other_identities_have_other_pages(opened: Open, tmp_path: Path) -> None:
    store(opened(), 1)
    assert load(opened(OTHER), 1) == []
    # Nor does a file that somebody moves.
    (pack,) = packs(tmp_path)
    os.rename(pack, tmp_path / "hicache" / OTHER / pack.name)
    assert load(opened(OTHER), 1) == []


@pytest.mark.parametrize("wrong", ["page", "header", "cut off"])
def test_what_is_damaged_is_a_miss(opened: Open, tmp_path: Path, wrong: str) -> None:
    """The pack goes, its other pages are whole until then, and what is computed is stored again."""
    store(pages := opened(), 1, 2, 3)
    (pack,) = packs(tmp_path)
    if wrong == "cut off":
        truncate(pack)
    else:
        flip_bit(pack, 3 * 4096 + 5 if wrong == "page" else 20)
        pages = opened()
    assert load(pages, 1, 2, 3) == ([2, 3] if wrong == "page" else [])
    assert load(pages, 1) == []
    if wrong == "page":
        wait_until(lambda: not pack.exists())
    assert store(pages, 1, 2, 3) == [True] * 3
    assert load(opened(), 1, 2, 3) == [1, 2, 3]


@pytest.mark.parametrize("fault", ["short", "flip"])
def test_a_wrong_read_is_read_again(opened: Open, files: FaultyFileSystem, fault: str) -> None:
    """What was wrong once may be right on the disk, and a pack has many pages."""
    pages = opened()
    store(pages, 1, 2)
    with files.faults.injected(Rule(fault, "read", count=1)):
        assert load(pages, 1, 2) == [1, 2]
    assert len(packs(pages._folder)) == 1


@pytest.mark.parametrize("fault", ["torn-kill", "kill"])
def test_a_killed_process_leaves_nothing_half(
    opened: Open, tmp_path: Path, files: FaultyFileSystem, fault: str
) -> None:
    pages = opened()
    store(pages, 1)
    operation = "write" if fault == "torn-kill" else "rename"
    with files.faults.injected(Rule(fault, operation)), pytest.raises(Killed):
        store(pages, 2)
    assert list(tmp_path.rglob("*.tmp"))
    again = opened(files=FaultyFileSystem(), gb=3 * PACK_OF_ONE / 1e9)
    assert load(again, 1, 2) == [1]
    # What was left takes room as a pack does, and goes as one.
    assert store(again, 3) == [True] and store(again, 4) == [True]
    wait_until(lambda: not list(tmp_path.rglob("*.tmp")))


def test_the_quota_takes_what_was_not_used_for_longest(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all namespaces."""
    store(opened(OTHER), 9)
    pages = opened(gb=(3 * PACK_OF_ONE + 100) / 1e9)
    for number in (1, 2):
        store(pages, number)
    assert load(pages, 1) == [1]
    monkeypatch.setattr(pages_module, "SLACK", 0.0)
    assert store(pages, 3) == [True]
    assert load(opened(OTHER), 9) == [], "the oldest is of other weights"
    assert store(pages, 4) == [True]
    assert pages.has(keys(1, 2, 3, 4)) == [True, False, True, True]
    assert sum(path.stat().st_size for path in packs(tmp_path)) <= 3 * PACK_OF_ONE
    assert store(pages, *range(10, 20)) == [False] * 10, "larger than the quota: nothing goes"
    assert load(pages, 1, 3, 4) == [1, 3, 4]


def test_free_space_is_left(opened: Open, files: FaultyFileSystem) -> None:
    pages = opened()
    store(pages, 1)
    with files.faults.injected(Rule("full", "free_bytes")):
        assert store(pages, 2, 3) == [False] * 2
        assert load(pages, 1) == [1], "evicting would not have helped"
        assert store(pages, 2) == [True]
    assert pages.has(keys(1, 2)) == [False, True] and pages.health.state == "ok"


def test_servers_share_a_directory(opened: Open) -> None:
    one, other = opened(), opened()
    store(one, 1)
    assert other.leading(keys(1)) == 1 and load(other, 1) == [1]
    one.clear()
    assert load(other, 1) == [] and other.leading(keys(1)) == 0
    assert store(other, 1) == [True]


def test_threads_get_and_set_at_once(opened: Open) -> None:
    pages = opened(gb=30 * PACK_OF_ONE / 1e9)
    stop = threading.Event()

    def write() -> None:
        for number in range(100):
            store(pages, number, number + 1)
        stop.set()

    def read() -> int:
        count = 0
        while not stop.is_set():
            count += len(load(pages, *range(100)))
        return count

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        pool.submit(write).result()
        assert sum(reader.result() for reader in readers)


# What fails, and the state in that time.
FAILURES: dict[str, tuple[list[Rule], str]] = {
    "dead": (dead_disk(), "degraded"),
    "gone": (dead_disk("EROFS"), "degraded"),
    "unforeseen": ([Rule("raise")], "degraded"),
    "reads hang": ([Rule("hang", "read")], "degraded"),
    "writes hang": ([Rule("hang", "write")], "read-only"),
    "read-only": (read_only(), "read-only"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_disk_that_fails_is_misses_and_recovers(
    opened: Open, files: FaultyFileSystem, failure: str
) -> None:
    """Nobody waits for long, and what can be read still hits."""
    rules, state = FAILURES[failure]
    # No longer than needed: a loaded machine is slow as well.
    pages = opened(patience=1.0 if "hang" in failure else 20.0)
    store(pages, 1)
    store(pages, 2)
    readable = [1] if state == "read-only" else []
    with files.faults.injected(*rules):
        assert load(pages, 1) == readable
        assert store(pages, 3) == [False]
        assert load(pages, 1) == readable and pages.health.state == state
        assert pages.leading(keys(2)) == len(readable)
    wait_until(lambda: load(pages, 2) == [2])
    if "hang" not in failure:
        assert load(pages, 1) == readable, "what could not be read is not tried again"
    wait_until(lambda: store(pages, 1, 3) == [True] * 2)
    assert load(pages, 1, 2, 3) == [1, 2, 3]


def test_a_directory_that_cannot_be_used_is_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "hicache").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened()


def test_a_page_in_two_packs_may_lose_both(opened: Open) -> None:
    first, second = opened(), opened()
    for pages in (first, second):
        assert store(pages, 1) == [True]
    third = opened()
    assert third.has(keys(1)) == [True]
    names = sorted(third._packs)
    for name in (names[1], names[0]):
        third._give_up(name)
    assert third.has(keys(1)) == [False] and load(third, 1) == []


def test_a_pack_in_use_is_dated_now_and_then(
    opened: Open, files: FaultyFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = list[int]()
    monkeypatch.setattr(files, "set_mtime", lambda descriptor, when: dated.append(when))
    pages = opened()
    store(pages, 1)
    for _ in range(5):
        assert load(pages, 1) == [1]
    assert len(dated) == 1
