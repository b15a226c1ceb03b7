"""Random histories of three servers on one directory, some of which are killed, beside a model.

The model has what each server has published and nobody has removed. No server ever finds KVs that
are not those of the tokens asked for, or that are purged; at the end each finds all that is there.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.paper.store import PartStore
from impress_sglang.store import peers as peers_module
from impress_sglang.store import places as places_module
from impress_sglang.store import quota as quota_module
from impress_sglang.store import writing as writing_module
from impress_sglang.store.writing import StoreOutcome
from tests.unit.store_checks import check_store
from tests.unit.store_factory import (
    SHAPES,
    Workbench,
    check_rows,
    gb,
    length,
    look_up,
    purge,
    use,
)
from tests.unit.waiting import wait_until

STEPS = 120
# Room for about this many segments.
ROOM = 30


class History:
    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bench = Workbench(root, SHAPES["head groups bfloat16"])
        self.options = {"ssd_gb": gb(ROOM * self.bench.one)}
        self.stores = [self.bench.open(**self.options) for _ in range(2)]

    def prompt(self) -> tuple[int, ...]:
        """One of a few trees of prompts, which often begin alike."""
        tokens: list[int] = []
        for level in range(self.chance.randint(1, 4)):
            family = self.chance.randint(0, 2)
            tokens += [1000 * level + 100 * family + n for n in range(4 + family)]
        return tuple(tokens)

    def store(self) -> PartStore:
        store = self.chance.choice(self.stores)
        store.poll()
        return store

    def step(self) -> None:
        kind = self.chance.choices(
            [self.offer, self.read, self.purge, self.kill, self.start, self.damage, self.look],
            [40, 30, 3, 2, 3, 2, 20],
        )
        kind[0]()
        for store in self.stores:
            check_store(store)

    def offer(self) -> None:
        store = self.store()
        outcome = self.bench.offer(store, self.prompt())
        if outcome is StoreOutcome.ACCEPTED and self.chance.random() < 0.7:
            store.writes.drain()

    def read(self) -> None:
        """Whatever is found is right, or cannot be read."""
        store, tokens = self.store(), self.prompt()
        found = look_up(store, tokens).num_tokens
        try:
            check_rows(store, tokens[:found]) if found else None
        except PrefixUnreadable as error:
            store.report(error)
            # Another server may have the same.
            used = look_up(store, tokens).spans
            assert all(own.segment.segment_id != error.segment_id for own in used)

    def purge(self) -> None:
        store, tokens = self.store(), self.prompt()
        purge(store, tokens)
        assert length(store, tokens) < len(tokens)

        def all_gone() -> bool:
            self.look()
            return all(length(own, tokens) < len(tokens) for own in self.stores)

        wait_until(all_gone)

    def kill(self) -> None:
        if len(self.stores) > 1:
            self.bench.kill(self.stores.pop(self.chance.randrange(len(self.stores))))

    def start(self) -> None:
        if len(self.stores) < 3:
            self.stores.append(self.bench.open(**self.options))

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
            store._disk.peers.look()
            store.poll()

    def settle(self) -> None:
        """All write what they write, and hear of it."""
        for store in self.stores:
            store.writes.drain()
            store.worker.submit(int).result()
        # Of what has no place yet a few are tried in each poll.
        for _ in range(30):
            self.look()


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FOLDERS_SECONDS", 0.0)
    monkeypatch.setattr(places_module, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(peers_module, "LOOK_SECONDS", 0.02)
    # What is heard in a poll does not depend on the machine.
    monkeypatch.setattr(peers_module, "_MOST_SECONDS", 10.0)
    monkeypatch.setattr(places_module, "_SEARCH_SECONDS", 10.0)
    monkeypatch.setattr(quota_module, "_LOCKED_SECONDS", 0.0)
    monkeypatch.setattr(writing_module, "_ASK_SECONDS", 0.0)
    history = History(tmp_path / "kv", seed)
    for _ in range(STEPS):
        history.step()
    history.settle()
    for store in history.stores:
        check_finds_all(history, store)
    used = sum(path.stat().st_size for path in history.bench.root.glob("*/segments/*/*.kv"))
    assert used <= (ROOM + len(history.stores)) * history.bench.one
    for store in history.stores:
        history.bench.close(store)
    last = history.bench.open(**history.options)
    check_finds_all(history, last)
    history.bench.close_all()


def check_finds_all(history: History, store: PartStore) -> None:
    """What a server finds in its own folder, another finds as well, unless it is damaged."""
    for other in history.stores:
        if other._closed:
            continue
        for segment in list(other.tree.segments()):
            if segment.ready and segment.home is None:
                tokens = prompt_with(other, segment.segment_id)
                reachable = length(other, tokens)
                try:
                    use(other, tokens[:reachable]) if reachable else None
                except PrefixUnreadable as error:
                    other.report(error)
                    continue
                found = length(store, tokens)
                if found < reachable == len(tokens):
                    # Of two that were written at once and begin alike, one is used; what is damaged
                    # or was purged while its place was not known, is not.
                    (first,) = look_up(other, tokens).slice(found, found + 1)
                    info = first.segment.info
                    assert info.segment_id in store.places._unwanted or found > info.prefix_len


def prompt_with(store: PartStore, segment_id: str) -> Sequence[int]:
    segment = store.tree.get(segment_id)
    assert segment is not None
    return segment.prompt().tolist()
