"""A bucket in memory that fails where a test says so, and servers that share it."""

from __future__ import annotations

import datetime
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from impress_sglang.paper.store import PartStore
from impress_sglang.store import bucket as bucket_module
from impress_sglang.store import bucket_peer as peer_module
from impress_sglang.store.bucket import Bucket
from tests.unit.kv_factory import IDENTITY
from tests.unit.store_factory import SHAPES, Workbench, length, until

obstore = pytest.importorskip("obstore")
URL = "s3://bucket/prefix"


class Faults(Bucket):
    def __init__(self) -> None:
        store = obstore.store.MemoryStore()
        super().__init__(store, store, URL)
        self.fails: Callable[[str, str], bool] = lambda what, name: False
        self.error: type[Exception] = RuntimeError
        self.counts = Counter[str]()
        self.ahead = datetime.timedelta()
        verbs = "list", "get", "get_range", "put", "delete"
        asks = {what: functools.partial(self._ask, what) for what in verbs}
        self._obstore = SimpleNamespace(**asks)

    def _ask(self, what: str, store: Any, name: Any, *arguments: Any, **how: Any) -> Any:
        self.counts[what] += 1
        if self.fails(what, name):
            raise self.error("a test")
        found = getattr(obstore, what)(store, name, *arguments, **how)
        return map(self._dated, found) if what == "list" else found

    def _dated(self, page: Any) -> Any:
        """By a clock that is ahead."""
        return [row | {"last_modified": row["last_modified"] + self.ahead} for row in page]

    @property
    def segments(self) -> list[str]:
        found = obstore.list(self._store, IDENTITY).collect()
        return [row["path"] for row in found if row["path"].endswith(".kv")]


class World:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.benches: dict[str, Workbench] = {}

    def open(self, name: str, **options: Any) -> PartStore:
        if name not in self.benches:
            self.benches[name] = Workbench(self._root / name, SHAPES["probe heads"])
        return self.benches[name].open(**({"store": URL} | options))

    def put(self, name: str, store: PartStore, *tokens: tuple[int, ...], **options: Any) -> None:
        for sequence in tokens:
            self.benches[name].put(store, sequence, **options)
            store.poll()

    def share(self, *prompts: tuple[int, ...], **options: Any) -> tuple[PartStore, PartStore]:
        """Servers a and b, of which b, with these options, has found what a has stored."""
        first, second = self.open("a"), self.open("b", **options)
        self.put("a", first, *prompts)
        for tokens in prompts:
            until_found(second, tokens)
        return first, second


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(
        "impress_sglang.store.disk.open_bucket", lambda config: faults if config.store else None
    )
    monkeypatch.setattr(peer_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(peer_module, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(peer_module, "_MAX_LIST_SHARE", 1.0)
    monkeypatch.setattr(bucket_module, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr("impress_sglang.store.unattached._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("impress_sglang.store.store.RETRY_SECONDS", 0.5)
    return faults


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for bench in world.benches.values():
        bench.close_all()


def until_found(store: PartStore, tokens: tuple[int, ...], **options: Any) -> None:
    until(store, lambda: length(store, tokens, **options) == len(tokens))


def until_gone(store: PartStore, tokens: tuple[int, ...]) -> None:
    until(store, lambda: not length(store, tokens))


def until_listed(store: PartStore, count: int) -> None:
    until(store, lambda: store.summary()["bucket"]["objects"] == count)


def until_kept(store: PartStore, count: int) -> None:
    """So many files are in its own directory."""
    segments = store.tree.segments
    until(store, lambda: sum(s.foreign_dir is None for s in segments()) == count)
