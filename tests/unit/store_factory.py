"""Stores on SSD for the tests: the short way to offer, look up and read back."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.config import PART_POLICIES, ImpressConfig
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.writer import LayerReader, WriteAbandoned
from impress_sglang.store.journal import Journal, decode, encode
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.orders import Purge
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.store.writing import Offer, StoreOutcome
from impress_sglang.transfer.codecs import Codec, plain_codec
from tests.unit import kv_factory as kv
from tests.unit.reading import read_rows
from tests.unit.store_checks import check_store
from tests.unit.waiting import wait_until

SHAPES = {
    "probe heads": kv.make_shape(),
    "head groups float32": kv.make_shape(probe=()),
    "head groups bfloat16": kv.make_shape(dtype=torch.bfloat16, probe=()),
}
OTHER_IDENTITY = "f" * 32
# Of what is computed behind an exact prefix that was loaded in few bits.
COARSE = Quality(1, 4.0)
# No caches, no reading ahead, no reordering and no measuring unless a test asks for them, so that
# bytes can be counted.
DEFAULTS = {
    "write_after": 1,
    "policy": "paper",
    "ssd_gb": 1.0,
    "min_free_gb": 0.0,
    "chunk_tokens": 8,
    "io_depth": 2,
    "readahead": 0.0,
    "device_gb": 0.0,
    "host_gb": 0.0,
    "reorder_interval": 0.0,
    "retention": 0.25,
}


def make_config(root: Path, **options: Any) -> ImpressConfig:
    """The defaults, where not all is used of a prefix only if the policy has parts."""
    options = DEFAULTS | options
    if options["policy"] not in PART_POLICIES:
        options["retention"] = 1.0
    return ImpressConfig(ssd_dir=str(root), **options)


def prompt(number: int, length: int = 8) -> tuple[int, ...]:
    """Tokens that no other prompt begins with."""
    return tuple(100 * number + position for position in range(length))


class Workbench:
    """Stores on one directory, and the short way to offer and look up."""

    def __init__(self, root: Path, shape: KVShape, codec: Codec | None = None) -> None:
        self.root = root
        self.shape = shape
        self.codec = codec or plain_codec(shape)
        # Up to 8 tokens: one header, and one disk block for each column of 2 layers.
        self.one = (
            1 + 2 * sum(bool(kv.heads_of(shape, column)) for column in kv.columns_of(shape))
        ) * 4096
        self.done: list[tuple[int, ...]] = []
        self.abandoned: list[tuple[int, ...]] = []
        self._open: list[PartStore] = []

    def open(
        self,
        identity: str = kv.IDENTITY,
        *,
        files: FileSystem | None = None,
        lookahead: LookAhead | None = None,
        **options: Any,
    ) -> PartStore:
        config = make_config(self.root, **options)
        # Servers that load parts of prefixes have exact KVs.
        kind: Any = PartStore if self.shape.exact else PrefixStore
        store = kind(
            config, identity, self.shape, files=files, lookahead=lookahead, codec=self.codec
        )
        self._open.append(store)
        return store

    def close(self, store: PartStore) -> None:
        self._open.remove(store)
        check_store(store)
        check_index(store)
        store.close()

    def reopen(self, store: PartStore, **options: Any) -> PartStore:
        self.close(store)
        return self.open(**options)

    def forget(self, store: PrefixStore) -> None:
        """The test closes it, or has broken it."""
        self._open.remove(store)

    def close_all(self) -> None:
        for store in list(self._open):
            self.close(store)

    def kill(self, store: PrefixStore) -> None:
        """As if its process were gone: nobody has its lock, and nothing of it goes on."""
        store.writes.drain()
        store.worker.submit(int).result()
        store._disk.peers.close(10)
        self.forget(store)
        store._disk.directory.close()

    def offer(
        self,
        store: PrefixStore,
        tokens: Sequence[int],
        *,
        namespace: str = "",
        quality: Quality = EXACT,
        min_tokens: int = 1,
        read_layers: Callable[[int], LayerReader] | None = None,
        **options: Any,
    ) -> StoreOutcome:
        """`options` are those of an `Offer`."""
        kvs = kv.SequenceKVs(self.shape, namespace, tuple(tokens), quality)
        thread = threading.current_thread()

        def done() -> None:
            assert threading.current_thread() is thread
            self.done.append(tuple(tokens))

        def abandon() -> None:
            self.abandoned.append(tuple(tokens))
            if isinstance(read_layers, Gate):
                read_layers.abandon()

        arguments = kv.as_tokens(tokens), read_layers or kvs.read_from, done, abandon
        offer = Offer(*arguments, min_tokens=min_tokens, quality=quality, **options)
        outcome = store.writes.offer(namespace, offer)
        check_store(store)
        return outcome

    def begin(self, store: PrefixStore, tokens: Sequence[int], **options: Any) -> Gate:
        """Offer; the write is accepted, and waits until its gate is opened."""
        gate = Gate(kv.SequenceKVs(self.shape, "", tuple(tokens)))
        outcome = self.offer(store, tokens, read_layers=gate, **options)
        assert outcome is StoreOutcome.ACCEPTED
        return gate

    def put(self, store: PrefixStore, tokens: Sequence[int], **options: Any) -> None:
        """Offer, and wait until it is written."""
        assert self.offer(store, tokens, **options) is StoreOutcome.ACCEPTED
        store.writes.drain()
        check_store(store)

    def put_all(self, store: PrefixStore, *numbers: int, **options: Any) -> None:
        """The prompts of these numbers, one after the other."""
        for number in numbers:
            self.put(store, prompt(number), **options)

    def files(self) -> set[str]:
        """Names of the segment files, finished or not."""
        return {path.name for path in self.root.glob("*/segments/*/*")}

    def file_of(self, segment_id: str) -> Path:
        (path,) = self.root.glob(f"*/segments/*/{segment_id}.kv")
        return path


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "kv", SHAPES["probe heads"])
    yield bench
    bench.close_all()


@pytest.fixture(params=["probe heads", "head groups bfloat16"])
def bench_of_each_shape(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workbench]:
    """For modules that ask what the shape of the KVs may change."""
    bench = Workbench(tmp_path / "kv", SHAPES[request.param])
    yield bench
    bench.close_all()


@pytest.fixture
def store(bench: Workbench) -> PartStore:
    return bench.open()


class Gate:
    """A reader of KVs that waits until it is opened: a write that takes as long as a test wants."""

    def __init__(self, kvs: kv.SequenceKVs) -> None:
        self.opened = threading.Event()
        self._abandoned = False
        self._kvs = kvs

    def abandon(self) -> None:
        self._abandoned = True
        self.opened.set()

    def __call__(self, start: int) -> LayerReader:
        read = self._kvs.read_from(start)

        def wait_and_read(layer: int) -> tuple[Tensor, Tensor]:
            assert self.opened.wait(30)
            if self._abandoned:
                raise WriteAbandoned("a test")
            return read(layer)

        return wait_and_read


def gb(num_bytes: int) -> float:
    """A quota with room for so many bytes, and less than a disk block more."""
    return (num_bytes + 1000) / 1e9


def look_up(
    store: PrefixStore, tokens: Sequence[int], namespace: str = "", *, quality: Quality = EXACT
) -> StoredMatch:
    return store.match(namespace, kv.as_tokens(tokens), min_quality=quality)


def length(store: PrefixStore, tokens: Sequence[int], **options: Any) -> int:
    return look_up(store, tokens, **options).num_tokens


def lengths(store: PrefixStore, *numbers: int, **options: Any) -> list[int]:
    """Of the prompts of these numbers."""
    return [length(store, prompt(number), **options) for number in numbers]


def use(store: PartStore, tokens: Sequence[int]) -> None:
    """A request that reads the whole prefix: what counts as an access."""
    match = look_up(store, tokens)
    assert match.num_tokens == len(tokens)
    store.close_source(open_source(store, match))


def open_source(store: PartStore, match: StoredMatch) -> PartSource:
    """For a request that asks for the probe column and then for a selection."""
    return store.open_part(match, 0, match.num_tokens, whole=False)


def rows(shape: KVShape, source: PartSource, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads; probe heads come first in these shapes."""
    keys, values = read_rows(source, layer, None)
    assert keys is not None and values is not None
    if not shape.probe_kv_heads:
        return keys, values
    probe = source.read_probe(layer)
    return torch.cat([probe, keys], 1), values


def check_rows(
    store: PartStore,
    tokens: Sequence[int],
    *,
    namespace: str = "",
    quality: Quality = EXACT,
    rows_of: Quality = EXACT,
) -> None:
    """The whole of `tokens` is stored, and is read back right.

    `quality` is what the request takes, `rows_of` what it must get.
    """
    match = look_up(store, tokens, namespace, quality=quality)
    assert match.num_tokens == len(tokens)
    shape = store._shape
    expected = kv.SequenceKVs(shape, namespace, tuple(tokens), rows_of)
    source = open_source(store, match)
    try:
        for layer in range(shape.num_layers):
            keys, values = rows(shape, source, layer)
            assert torch.equal(keys, expected.keys(layer))
            assert torch.equal(values, expected.values(layer))
    finally:
        store.close_source(source)


def lose(bench: Workbench, store: PrefixStore, segment_id: str, *, gone: bool = False) -> None:
    """A segment is damaged or `gone`, a request has found that, and a second look has decided."""
    path = bench.file_of(segment_id)
    if gone:
        path.unlink()
    else:
        kv.flip_byte(path, path.stat().st_size - 4096)
    store.report(SegmentUnreadable(segment_id, "a test"))
    look_again(store)
    segment = store.tree.get(segment_id)
    assert segment is None or segment.state is SegmentState.LOST
    check_store(store)


def purge(store: PrefixStore, tokens: Sequence[int], namespace: str = "") -> None:
    """All that begins with these tokens."""
    order = Purge(store.namespace(namespace), kv.as_tokens(tokens))
    while order.unfinished:
        order.step(store)


def check_index(store: PrefixStore) -> None:
    """Its rows are those of the tree; waits for the disk, and for pending writes."""
    store.writes.drain()
    if not (isinstance(store, PartStore) and store.rewrites["pending"]):
        store.worker.submit(store.worker.journal.record).result()
        indexed = store.worker.submit(store.worker.journal.segments).result()
        # An extra row is that of a file that could not be removed, which was logged.
        for segment in store.tree.segments():
            if segment.on_disk and segment.foreign_dir is None:
                assert indexed[segment.segment_id].file_bytes == segment.file_bytes


def until(store: PrefixStore, condition: Callable[[], object]) -> None:
    """Poll as the scheduler does after each batch."""

    def is_met() -> bool:
        store.poll()
        return bool(condition())

    wait_until(is_met)
    check_store(store)


def look_again(store: PrefixStore) -> None:
    """Until second looks have decided about everything that could not be read."""
    until(store, lambda: not store.summary()["segments_suspect"])


def until_well(store: PrefixStore) -> None:
    """Until the disk has answered again, which failed, and nothing is suspect."""
    until(store, lambda: store.health.state == "ok" and not store.health.suspects)


class Room(FileSystem):
    """A file system with as much room as a test says."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int:
        return self.free

    def leave(self, store: PrefixStore, free: int) -> None:
        """So much is free now, and the store has noticed."""
        self.free = free
        store.health._measured_at = -math.inf
        until(store, lambda: store.health.free_bytes == free)


def path_of(bench: Workbench, match: StoredMatch) -> Path:
    return bench.file_of(match.spans[0].segment.segment_id)


def name_of(store: PrefixStore, tokens: Sequence[int], number: int = 0, **options: Any) -> str:
    """Of a segment that a prompt is found in."""
    return look_up(store, tokens, **options).spans[number].segment.segment_id


def index_in(folder: Path) -> dict[str, StoredSegment]:
    """What the next process finds in the index of a store."""
    return Journal(FileSystem(), folder).segments()


def index_of(bench: Workbench) -> dict[str, StoredSegment]:
    """Of the only store of a directory."""
    (path,) = bench.root.glob("*/journal")
    return index_in(path.parent)


def change_index(root: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> int:
    """By hand, in the only index below a folder; returns how many lines are others now.

    `change` returns a record, None to leave it out.
    """
    (path,) = root.rglob("journal")
    lines = path.read_bytes().splitlines(keepends=True)
    records = [change(decode(line) or {}) for line in lines]
    changed = [b"" if record is None else encode(json.dumps(record).encode()) for record in records]
    path.write_bytes(b"".join(changed))
    return sum(old != new for old, new in zip(lines, changed, strict=True))


def three_prefixes(bench: Workbench, **options: Any) -> PartStore:
    store = bench.open(**options)
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(2, 8), namespace="salt")
    return store


def check_three_prefixes(store: PartStore) -> None:
    check_store(store)
    check_rows(store, prompt(1, 40))
    check_rows(store, prompt(2, 8), namespace="salt")
    assert len(store.tree) == 3
