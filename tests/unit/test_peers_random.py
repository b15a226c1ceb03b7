"""Servers on one directory that tell each other things late, twice, or too many; and at random.

The random histories are of three servers, some of which are killed. No server ever finds KVs that
are not those of the tokens asked for, or that are purged; at the end each finds all that is there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.segment import Priority
from impress_sglang.store import journal as journal_module
from impress_sglang.store import peers as peers_module
from impress_sglang.store import unattached as places_module
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.stored import StoredMatch
from impress_sglang.store.writing import StoreOutcome
from tests.unit import store_factory as stores
from tests.unit import test_peers
from tests.unit.kv_factory import as_tokens
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, length, lengths, look_up, prompt, purge
from tests.unit.test_peers import Two, folder_of, until_stored
from tests.unit.waiting import Clock, wait_until

STEPS = 120
# Room for about this many segments.
ROOM = 30


class History:
    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bench = Workbench(root, stores.SHAPES["head groups bfloat16"])
        self.stores = list[PartStore]()
        self.purged = list[tuple[int, ...]]()
        self.start()
        self.start()

    def prompt(self) -> tuple[int, ...]:
        """One of a few trees of prompts, which often begin alike."""
        tokens: list[int] = []
        for level in range(self.chance.randint(1, 4)):
            family = self.chance.randint(0, 2)
            tokens += [1000 * level + 100 * family + n for n in range(4 + family)]
        return tuple(tokens)

    def store(self) -> PartStore:
        store = self.chance.choice(self.stores)
        if self.chance.random() < 0.8:
            hear(store)
        return store

    def step(self) -> None:
        kind = self.chance.choices(
            [self.offer, self.read, self.purge, self.kill, self.start, self.damage, self.look],
            [40, 30, 3, 2, 3, 2, 20],
        )
        kind[0]()
        for store in self.stores:
            check_store(store)
            assert all(length(store, tokens) < len(tokens) for tokens in self.purged)

    def offer(self) -> None:
        store, offered = self.store(), self.prompt()
        self.purged = [tokens for tokens in self.purged if tokens != offered[: len(tokens)]]
        outcome = self.bench.offer(store, offered)
        if outcome is StoreOutcome.ACCEPTED and self.chance.random() < 0.7:
            store.writes.drain()

    def read(self) -> None:
        """Whatever is found is right, or cannot be read."""
        store, tokens = self.store(), self.prompt()
        self.is_damaged(store, tokens)

    def is_damaged(self, store: PartStore, tokens: Sequence[int]) -> bool:
        """Whether something that is found of a prompt cannot be read, and is used no more."""
        found = length(store, tokens)
        try:
            check_rows(store, tokens[:found]) if found else None
        except PrefixUnreadable as error:
            store.report(error)
            # Another server may have the same.
            used = look_up(store, tokens).spans
            assert all(span.segment.segment_id != error.segment_id for span in used)
            return True
        return False

    def purge(self) -> None:
        store, tokens = self.store(), self.prompt()
        purge(store, tokens)
        # Others hear of it once it is written.
        store.worker.submit(int).result()
        assert length(store, tokens) < len(tokens)

        def all_gone() -> bool:
            self.look()
            return all(length(store, tokens) < len(tokens) for store in self.stores)

        wait_until(all_gone)
        self.purged.append(tokens)

    def kill(self) -> None:
        if len(self.stores) > 1:
            self.bench.kill(self.stores.pop(self.chance.randrange(len(self.stores))))

    def start(self) -> None:
        """A server that looks for news only when a step says so: what is found stays until then."""
        if len(self.stores) < 3:
            self.stores.append(self.bench.open(ssd_gb=stores.gb(ROOM * self.bench.one)))
            self.stores[-1]._disk.peers.close(10)

    def damage(self) -> None:
        """A file goes, or becomes shorter, unless a store removes it meanwhile."""
        if paths := sorted(self.bench.root.glob("*/segments/*/*.kv")):
            path = self.chance.choice(paths)
            if self.chance.random() < 0.5:
                path.unlink(missing_ok=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(path, min(5000, path.stat().st_size))

    def look(self) -> None:
        for store in self.stores:
            hear(store)

    def settle(self) -> None:
        """All write what they write, find what is damaged, and hear of it."""
        damaged = True
        while damaged:
            # Of what has no place yet a few are tried in each poll.
            for _ in range(30):
                for store in self.stores:
                    store.writes.drain()
                    stores.look_again(store)
                    store.worker.submit(int).result()
                self.look()
            damaged = any(
                self.is_damaged(store, tokens) for store in self.stores for tokens in has(store)
            )

    def check_finds_all(self) -> None:
        """What a server finds in its own folder, another finds as well."""
        for other, store in itertools.permutations(self.stores, 2):
            for tokens in has(other):
                found = length(store, tokens)
                if found < length(other, tokens) == len(tokens):
                    # Of two that were written at once and begin alike, one is used, and leaves a
                    # hole if it is lost; what was purged while its place was not known, is not.
                    (first,) = look_up(other, tokens).slice(found, found + 1)
                    info, segments = first.segment.info, store.tree.segments()
                    holes = [hole.prompt()[: found + 1].tolist() for hole in segments if hole.lost]
                    taken = found > info.prefix_len or tokens[: found + 1] in holes
                    assert taken or info.segment_id in store.unattached._banned


def has(store: PartStore) -> list[list[int]]:
    """Prompts whose ends a server has in its own folder."""
    segments = store.tree.segments()
    return [s.prompt().tolist() for s in segments if s.ready and s.foreign_dir is None]


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who waits for something tries again at once, and a poll has time for all that is heard.
    for name in ("unattached._RETRY_SECONDS", "quota._CHECK_SECONDS", "writing._REQUEST_SECONDS"):
        monkeypatch.setattr(f"impress_sglang.store.{name}", 0.0)
    for name in ("peers._MAX_POLL_SECONDS", "unattached._MAX_SECONDS"):
        monkeypatch.setattr(f"impress_sglang.store.{name}", 10.0)
    history = History(tmp_path / "kv", seed)
    for _ in range(STEPS):
        history.step()
    history.settle()
    used = sum(path.stat().st_size for path in history.bench.root.glob("*/segments/*/*.kv"))
    assert used <= (ROOM + len(history.stores)) * history.bench.one
    history.check_finds_all()
    history.bench.close_all()


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
    store._disk.peers.poll()
    while store._disk.peers.events or store._orders:
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
    store.worker.journal._end = 0
    store.worker.submit(store.worker.journal.record, {"want": 0}).result()


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_told_after_a_purge_was_purged(bench: Workbench, restarted: bool) -> None:
    """By a server that is dead, so that nobody else removes it."""
    first, second = bench.open(), bench.open()
    first._disk.peers.close(10)
    bench.put_all(second, 1, 2)
    bench.kill(second)
    purge(first, prompt(1))
    if restarted:
        first = bench.reopen(first)
        first._disk.peers.close(10)
    hear(first)
    assert lengths(first, 1, 2) == [0, 8]
    stores.until(first, lambda: len(bench.files()) == 1)
    bench.put(first, prompt(1))
    assert lengths(first, 1, 2) == [8, 8]


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


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_journal_that_is_made_anew_says_the_same(
    bench: Workbench, two: Two, in_parts: bool
) -> None:
    """What an interrupted look has not seen any more is gone all the same, and nothing is twice."""
    first, second = two
    bench.put_all(first, 1, 2, 3)
    hear(second)
    before = {segment.segment_id: segment for segment in second.tree.segments()}
    first.writes.discard([look_up(first, prompt(2)).spans[0].segment], MissCause.EVICTED)
    write_anew(first)
    if in_parts:
        path = folder_of(first) / "journal"
        lines = path.read_bytes().splitlines(keepends=True)
        bad = journal_module.encode(json.dumps({"add": {}, "tokens": ""}).encode())
        path.write_bytes(b"".join([*lines[:2], bad, *lines[2:]]))
        second._disk.peers.poll()
        assert second._disk.peers.unreadable
    hear(second)
    assert lengths(second, 1, 2, 3) == [8, 0, 8]
    after = {segment.segment_id: segment for segment in second.tree.segments()}
    assert len(after) == 2 and all(before[name] is segment for name, segment in after.items())
    assert (
        not second.unattached._unattached and second._disk.peers.num_bytes == first.tree.file_bytes
    )


def test_a_poll_takes_no_more_news_than_it_has_time_for(
    bench: Workbench, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    bench.put_all(first, *range(1, 21))
    second._disk.peers.poll()
    clock, hear_one = Clock(), second._take_event
    monkeypatch.setattr(peers_module, "time", SimpleNamespace(monotonic=clock))

    def slow(news: peers_module.PeerEvent) -> None:
        clock.now += 0.002
        hear_one(news)

    monkeypatch.setattr(second, "_take_event", slow)
    second.poll()
    assert 0 < len(second.tree) < 10
    stores.until(second, lambda: len(second.tree) == 20)


def test_room_is_found_without_passing_what_others_have_each_time(bench: Workbench) -> None:
    options = {"ssd_gb": stores.gb(30 * bench.one)}
    first, second = bench.open(**options), bench.open(**options)
    bench.put_all(first, *range(1, 11))
    until_stored(second, prompt(10))
    second = bench.reopen(second, **options)
    bench.put_all(second, *range(20, 40))
    segment = second.tree.match(second.namespace(""), as_tokens(prompt(39))).spans[0].segment

    def finds_room() -> bool:
        # Whether a process serves the other folder is asked first.
        found = second.quota.make_room(segment, StoredMatch())
        return found is not None and [evicted.foreign_dir for evicted in found] == [None]

    stores.until(second, finds_room)
    assert next(iter(second.tree.order)).foreign_dir is None


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
        (span,) = look_up(store, prompt(1, 13)).spans
        homes.add(span.segment.foreign_dir or folder_of(store))
        check_rows(store, prompt(1, 20))
        check_rows(store, (*prompt(1, 13), 7, 8))
    assert len(homes) == 1
    bench.close(two[1])
    for store in (two[0], bench.open()):
        check_rows(store, (*prompt(1, 13), 7, 8))


@pytest.mark.parametrize("lengths", [[40], [30, 40]])
def test_what_is_below_a_hole_makes_way_for_a_segment_with_all_of_it(
    bench: Workbench, two: Two, lengths: list[int]
) -> None:
    first, second = two
    bench.put(first, prompt(1, 13))
    settle(two)
    for stop in lengths:
        bench.put(second, prompt(1, stop))
    stores.lose(bench, first, stores.name_of(first, prompt(1, 13)))
    first = bench.reopen(first)
    bench.put(first, prompt(1, 60))
    settle((first, second))
    check_rows(second, prompt(1, 60))
    assert len(bench.files()) == 1


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
    monkeypatch.setattr(places_module, "_SIMULTANEOUS_SECONDS", seconds)
    first, second = two
    other = (*prompt(1, 5), *range(900, 908))
    bench.put(first, prompt(1, 13))
    bench.put(second, other)
    bench.put(first, prompt(2, 13), **options)
    bench.put(second, prompt(2, 13))
    settle(two)
    for tokens in (other, prompt(2, 13)):
        homes = [span.segment.foreign_dir for span in look_up(second, tokens).spans]
        assert homes[-1] is None and length(second, tokens) == len(tokens)
    assert len(bench.files()) == 4 or "ttl" in options
