"""Stores on SSD for the tests: the short way to offer, look up and read back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.management.store import PrefixStore, StoreOutcome
from impress_sglang.management.tree import StoredMatch
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.read_cost import ReadCost
from impress_sglang.storage.writer import LayerReader
from impress_sglang.transfer.source import Demand, SegmentSource
from tests.unit.kv_factory import (
    IDENTITY,
    SequenceKVs,
    as_tokens,
    lanes_of,
    make_shape,
    streams_of,
)
from tests.unit.reading import read_rows

SHAPES = {
    "probe heads": make_shape(),
    "sketch float32": make_shape(sketch_bits=4),
    "sketch bfloat16": make_shape(dtype=torch.bfloat16, sketch_bits=4),
}
OTHER_IDENTITY = "f" * 32
# Of what is computed after a quarter of an exact prefix.
QUARTER = Quality(1, 0.25)
# No caches, no reading ahead and no reordering unless a test asks for them, so that bytes can be
# counted.
DEFAULTS = {
    "ssd_gb": 1.0,
    "min_free_gb": 0.0,
    "chunk_tokens": 8,
    "io_depth": 2,
    "readahead": 0.0,
    "device_gb": 0.0,
    "host_gb": 0.0,
    "reorder_interval": 0.0,
}


def prompt(number: int, length: int = 8) -> tuple[int, ...]:
    """Tokens that no other prompt begins with."""
    return tuple(100 * number + position for position in range(length))


class Workbench:
    """Stores on one directory, and the short way to offer and look up."""

    def __init__(self, root: Path, shape: KVShape) -> None:
        self.root = root
        self.shape = shape
        # Up to 8 tokens: one header, and one disk block for each stream of 2 layers.
        self.one = (1 + 2 * len(streams_of(shape))) * 4096
        self.done: list[tuple[int, ...]] = []
        self.abandoned: list[tuple[int, ...]] = []
        self._open: list[PrefixStore] = []

    def open(
        self, identity: str = IDENTITY, *, files: FileSystem | None = None, **options: Any
    ) -> PrefixStore:
        config = ImpressConfig(ssd_dir=str(self.root), **(DEFAULTS | options))
        store = PrefixStore(config, identity, self.shape, files=files)
        self._open.append(store)
        return store

    def close(self, store: PrefixStore) -> None:
        self._open.remove(store)
        store.check_integrity()
        store.check_index()
        store.close()

    def reopen(self, store: PrefixStore, **options: Any) -> PrefixStore:
        self.close(store)
        return self.open(**options)

    def close_all(self) -> None:
        for store in list(self._open):
            self.close(store)

    def offer(
        self,
        store: PrefixStore,
        tokens: Sequence[int],
        *,
        namespace: str = "",
        quality: Quality = EXACT,
        available_from: int = 0,
        min_tokens: int = 1,
        read_layers: Callable[[int], LayerReader] | None = None,
    ) -> StoreOutcome:
        kvs = SequenceKVs(self.shape, namespace, tuple(tokens), quality)
        outcome = store.offer(
            namespace,
            as_tokens(tokens),
            read_layers or kvs.read_from,
            lambda: self.done.append(tuple(tokens)),
            lambda: self.abandoned.append(tuple(tokens)),
            available_from=available_from,
            quality=quality,
            min_tokens=min_tokens,
        )
        store.check_integrity()
        return outcome

    def put(self, store: PrefixStore, tokens: Sequence[int], **options: Any) -> None:
        """Offer, and wait until it is written."""
        assert self.offer(store, tokens, **options) is StoreOutcome.ACCEPTED
        store.drain()
        store.check_integrity()

    def files(self) -> set[str]:
        """Names of the segment files, finished or not."""
        return {path.name for path in self.root.glob("*/segments/*/*")}

    def file_of(self, segment_id: str) -> Path:
        (path,) = self.root.glob(f"*/segments/*/{segment_id}.kv")
        return path


@pytest.fixture(params=SHAPES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "kv", SHAPES[request.param])
    yield bench
    bench.close_all()


@pytest.fixture
def store(bench: Workbench) -> PrefixStore:
    return bench.open()


@pytest.fixture
def no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only wanted blocks are read, so that bytes can be counted."""
    monkeypatch.setattr(ReadCost, "gap_bytes", 0)


class Gate:
    """A reader of KVs that waits until it is opened: a write that takes as long as a test wants."""

    def __init__(self, kvs: SequenceKVs) -> None:
        self.opened = threading.Event()
        self.starts: list[int] = []
        self._kvs = kvs

    def __call__(self, start: int) -> LayerReader:
        self.starts.append(start)
        read = self._kvs.read_from(start)

        def wait_and_read(layer: int) -> tuple[Tensor, Tensor]:
            assert self.opened.wait(30)
            return read(layer)

        return wait_and_read


def gb(num_bytes: int) -> float:
    """A quota with room for so many bytes, and less than a disk block more."""
    return (num_bytes + 1000) / 1e9


def look_up(
    store: PrefixStore, tokens: Sequence[int], namespace: str = "", *, quality: Quality = EXACT
) -> StoredMatch:
    return store.match(namespace, as_tokens(tokens), least=quality)


def length(store: PrefixStore, tokens: Sequence[int], **options: Any) -> int:
    return look_up(store, tokens, **options).num_tokens


def use(store: PrefixStore, tokens: Sequence[int]) -> None:
    """A request that reads the whole prefix: what counts as an access."""
    match = look_up(store, tokens)
    assert match.num_tokens == len(tokens)
    store.close_source(open_source(store, match))


def open_source(
    store: PrefixStore, match: StoredMatch, start: int = 0, stop: int | None = None
) -> SegmentSource:
    """For a request that asks for the probe stream and then for a selection."""
    stop = match.num_tokens if stop is None else stop
    return store.open_source(match, start, stop, Demand())


def rows(
    shape: KVShape, source: SegmentSource, layer: int, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, of the same tokens; probe heads come first in these shapes."""
    found = read_rows(source, layer, None if tokens is None else tokens.expand(lanes_of(shape), -1))
    keys, values = found.keys, found.values
    assert keys is not None and values is not None
    if shape.sketch_bits:
        return keys, values
    probe = source.read_probe(layer)
    return torch.cat([probe if tokens is None else probe[tokens], keys], 1), values


def check_rows(
    store: PrefixStore,
    tokens: Sequence[int],
    *,
    namespace: str = "",
    quality: Quality = EXACT,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """The whole of `tokens` is stored, and [start, stop) of it is read back right."""
    match = look_up(store, tokens, namespace, quality=quality)
    assert match.num_tokens == len(tokens)
    stop = len(tokens) if stop is None else stop
    shape = store._shape
    expected = SequenceKVs(shape, namespace, tuple(tokens))
    source = open_source(store, match, start, stop)
    try:
        for layer in range(shape.num_layers):
            keys, values = rows(shape, source, layer)
            assert torch.equal(keys, expected.keys(layer)[start:stop])
            assert torch.equal(values, expected.values(layer)[start:stop])
    finally:
        store.close_source(source)


def path_of(bench: Workbench, match: StoredMatch, number: int = 0) -> Path:
    return bench.file_of(match.spans[number].segment.segment_id)


def three_prefixes(bench: Workbench, **options: Any) -> PrefixStore:
    store = bench.open(**options)
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(2, 8), namespace="salt")
    return store


def check_three_prefixes(store: PrefixStore) -> None:
    store.check_integrity()
    check_rows(store, prompt(1, 40))
    check_rows(store, prompt(2, 8), namespace="salt")
    assert len(store.tree) == 3
