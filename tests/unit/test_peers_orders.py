"""What servers on one directory tell each other, when it comes late, twice, or is too much."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from impress_sglang.paper.store import PartStore
from impress_sglang.storage.segment import Priority
from impress_sglang.store import journal as journal_module
from impress_sglang.store import peers as peers_module
from impress_sglang.store import places as places_module
from impress_sglang.store.losses import Cause
from impress_sglang.store.stored import StoredMatch
from impress_sglang.store.writing import StoreOutcome
from tests.unit import test_peers
from tests.unit.kv_factory import as_tokens
from tests.unit.store_checks import check_store
from tests.unit.store_factory import (
    Workbench,
    check_rows,
    gb,
    length,
    lengths,
    look_up,
    prompt,
    purge,
    until,
)
from tests.unit.test_peers import Two, folder_of, until_stored

at_once = test_peers.at_once


@pytest.fixture
def two(bench: Workbench) -> tuple[PartStore, PartStore]:
    """Two servers, of which the second one does not look by itself."""
    first, second = bench.open(), bench.open()
    second._disk.peers.close(10)
    return first, second


def hear(store: PartStore) -> None:
    """Look, and act on all that is new."""
    store._disk.peers._folders_at = 0.0
    store._disk.peers.look()
    while store._disk.peers.news:
        store.poll()
    store.poll()
    check_store(store)


def settle(two: Two) -> None:
    """Each hears of what the other has, and has had time to act on it."""
    for _ in range(20):
        for store in two:
            hear(store)
        time.sleep(0.01)
    for store in two:
        store.worker.submit(int).result()
        check_store(store)


def write_anew(store: PartStore) -> None:
    store.worker.submit(int).result()
    store.worker.journal._unsound = True
    store.worker.submit(store.worker.journal.record, {"want": 0}).result()


def test_what_is_told_after_a_purge_was_purged(bench: Workbench, two: Two) -> None:
    """The one who stored it is dead, so that nobody else removes it."""
    first, second = two
    bench.put_all(first, 1, 2)
    bench.kill(first)
    purge(second, prompt(1))
    second.worker.submit(int).result()
    hear(second)
    assert lengths(second, 1, 2) == [0, 8]
    until(second, lambda: len(bench.files()) == 1)
    bench.put(second, prompt(1))
    assert lengths(second, 1, 2) == [8, 8]


def test_a_restarted_server_keeps_its_own_order(bench: Workbench, two: Two) -> None:
    first, second = two
    bench.put_all(first, 1, 2)
    bench.kill(first)
    purge(second, prompt(1))
    second.worker.submit(int).result()
    bench.close(second)
    (again,) = [own for own in (bench.open(), bench.open()) if folder_of(own) == folder_of(second)]
    until(again, lambda: lengths(again, 1, 2) == [0, 8])


@pytest.mark.parametrize("restarted", [False, True])
def test_an_order_that_is_heard_again_leaves_what_is_newer(
    bench: Workbench, two: Two, restarted: bool
) -> None:
    first, second = two
    bench.put(first, prompt(1))
    hear(second)
    purge(first, prompt(1))
    first.worker.submit(int).result()
    hear(second)
    # Files have the time of a tick of the clock.
    time.sleep(0.02)
    bench.put(second, prompt(1))
    assert second.pins.pin(second.namespace(""), as_tokens(prompt(1))) is None
    bench.put(first, prompt(3))
    write_anew(first)
    if restarted:
        second = bench.reopen(second)
    hear(second)
    assert lengths(second, 1, 3) == [8, 8] and len(second.pins) == 1


def test_a_new_journal_that_is_read_in_parts(bench: Workbench, two: Two) -> None:
    """What an interrupted look has not seen any more is gone all the same, and nothing is twice."""
    first, second = two
    bench.put_all(first, 1, 2, 3)
    hear(second)
    assert lengths(second, 1, 2, 3) == [8, 8, 8]
    first.writes.discard(
        [first.tree.match(first.namespace(""), as_tokens(prompt(2))).spans[0].segment],
        Cause.EVICTED,
    )
    write_anew(first)
    path = folder_of(first) / "journal"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = journal_module.encode(json.dumps({"add": {}, "tokens": ""}).encode())
    path.write_bytes(b"".join([*lines[:2], bad, *lines[2:]]))
    second._disk.peers.look()
    assert second._disk.peers.unreadable
    hear(second)
    assert lengths(second, 1, 2, 3) == [8, 0, 8]
    assert not second.places._unplaced and second._disk.peers.num_bytes == first.tree.file_bytes


def test_a_poll_takes_no_more_news_than_it_has_time_for(
    bench: Workbench, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    bench.put_all(first, *range(1, 21))
    second._disk.peers.look()
    heard, hear_one = [], second._hear

    def slow(news: peers_module.News) -> None:
        heard.append(news)
        time.sleep(0.002)
        hear_one(news)

    monkeypatch.setattr(second, "_hear", slow)
    second.poll()
    assert 0 < len(heard) < 10
    until(second, lambda: len(heard) == 20)
    assert length(second, prompt(20)) == 8


def test_room_is_found_without_passing_what_others_have_each_time(bench: Workbench) -> None:
    options = {"ssd_gb": gb(30 * bench.one)}
    first, second = bench.open(**options), bench.open(**options)
    bench.put_all(first, *range(1, 11))
    until_stored(second, prompt(10))
    second = bench.reopen(second, **options)
    bench.put_all(second, *range(20, 40))
    segment = second.tree.match(second.namespace(""), as_tokens(prompt(39))).spans[0].segment

    def finds_room() -> bool:
        # Whether a process serves the other folder is asked first.
        found = second.quota.make_room(segment, StoredMatch(), lambda name: False)
        return found is not None and [own.home for own in found] == [None]

    until(second, finds_room)
    assert next(iter(second.tree.order)).home is None


def test_who_has_less_than_a_share_gets_it(bench: Workbench) -> None:
    options = {"ssd_gb": gb(8 * bench.one)}
    first, second = bench.open(**options), bench.open(**options)
    bench.put_all(first, *range(1, 9))
    until_stored(second, prompt(8))
    stored = []

    def has_its_share() -> bool:
        first.poll()
        if bench.offer(second, prompt(20 + len(stored))) is StoreOutcome.ACCEPTED:
            second.writes.drain()
            stored.append(1)
        return second.tree.file_bytes >= 3 * bench.one

    until(second, has_its_share)


def test_nothing_that_is_read_ends_the_thread(bench: Workbench, two: Two) -> None:
    first, second = two
    path = folder_of(first) / "journal"
    bench.put(first, prompt(1))
    first.worker.submit(int).result()
    with path.open("ab") as file:
        file.write(journal_module.encode(b"[]") + journal_module.encode(b'{"gone": 3}'))
    end = path.stat().st_size
    first.worker.submit(setattr, first.worker.journal, "_end", end).result()
    bench.put(first, prompt(2))
    for _ in range(4):
        second._disk.peers.look()
    hear(second)
    assert lengths(second, 1, 2) == [8, 8]


def test_both_may_store_the_same_at_once(bench: Workbench, two: Two) -> None:
    """One of them removes its own as soon as nobody needs it; what builds on either is found."""
    for store in two:
        bench.put(store, prompt(1, 13))
        assert store.pins.pin(store.namespace(""), as_tokens(prompt(1, 13))) is None
    settle(two)
    assert len(bench.files()) == 2
    for store in two:
        store.pins.unpin(store.namespace(""), as_tokens(prompt(1, 13)))
    bench.put(two[0], prompt(1, 20))
    bench.put(two[1], (*prompt(1, 13), 7, 8))
    settle(two)
    assert len(bench.files()) == 3
    homes = set()
    for store in two:
        (own,) = look_up(store, prompt(1, 13)).spans
        homes.add(own.segment.home or folder_of(store))
        check_rows(store, prompt(1, 20))
        check_rows(store, (*prompt(1, 13), 7, 8))
    assert len(homes) == 1
    bench.close(two[1])
    for store in (two[0], bench.open()):
        check_rows(store, (*prompt(1, 13), 7, 8))


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"ttl": 3600.0}, 30.0), ({"priority": Priority.HIGH}, 30.0), ({}, 0.0)],
)
def test_both_stay_if_one_does_not_stand_for_the_other(
    bench: Workbench,
    two: Two,
    options: dict[str, Any],
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has other tokens or another priority, expires, or is older and perhaps unreadable."""
    monkeypatch.setattr(places_module, "_AT_ONCE_SECONDS", seconds)
    first, second = two
    other = (*prompt(1, 5), *range(900, 908))
    bench.put(first, prompt(1, 13))
    bench.put(second, other)
    bench.put(first, prompt(2, 13), **options)
    bench.put(second, prompt(2, 13))
    settle(two)
    for tokens in (other, prompt(2, 13)):
        homes = [span.segment.home for span in look_up(second, tokens).spans]
        assert homes[-1] is None and length(second, tokens) == len(tokens)
    assert len(bench.files()) == 4 or "ttl" in options
