"""The store of prefixes on SSD, from an offer to the rows that are read back."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ChunkUnreadable, ConfigError, StoreInUseError
from impress_sglang.management import store as store_module
from impress_sglang.management.store import PrefixStore, StoreOutcome
from impress_sglang.management.tree import StoredMatch
from impress_sglang.storage.layout import Stream
from impress_sglang.storage.writer import LayerReader
from impress_sglang.transfer.source import SegmentSource, Want
from tests.unit.kv_factory import (
    IDENTITY,
    SequenceKVs,
    as_tokens,
    flip_byte,
    make_info,
    make_shape,
    random_kvs,
    write_kvs,
)

SHAPE = make_shape()
# Up to 8 tokens: one header, and one disk block for each of 3 streams of 2 layers.
ONE = 7 * 4096
OTHER_IDENTITY = "f" * 32


def prompt(number: int, length: int = 8) -> tuple[int, ...]:
    """Tokens that no other prompt begins with."""
    return tuple(100 * number + position for position in range(length))


class Workbench:
    """Stores on one directory, and the short way to offer and look up."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: list[tuple[int, ...]] = []
        self._open: list[PrefixStore] = []

    def open(self, identity: str = IDENTITY, **options: Any) -> PrefixStore:
        defaults = {"ssd_gb": 1.0, "min_free_gb": 0.0, "chunk_tokens": 8, "io_threads": 2}
        config = ImpressConfig(ssd_dir=str(self.root), **(defaults | options))
        store = PrefixStore(config, identity, SHAPE)
        self._open.append(store)
        return store

    def close(self, store: PrefixStore) -> None:
        self._open.remove(store)
        store.check_integrity()
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
        approximate: bool = False,
        available_from: int = 0,
        min_tokens: int = 1,
        read_layers: Callable[[int], LayerReader] | None = None,
    ) -> StoreOutcome:
        kvs = SequenceKVs(SHAPE, namespace, tuple(tokens), approximate)
        outcome = store.offer(
            namespace,
            as_tokens(tokens),
            read_layers or kvs.read_from,
            lambda: self.done.append(tuple(tokens)),
            available_from=available_from,
            approximate=approximate,
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


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "kv")
    yield bench
    bench.close_all()


@pytest.fixture
def store(bench: Workbench) -> PrefixStore:
    return bench.open()


def gb(num_bytes: int) -> float:
    """A quota with room for so many bytes, and less than a disk block more."""
    return (num_bytes + 1000) / 1e9


def look_up(
    store: PrefixStore, tokens: Sequence[int], namespace: str = "", *, approximate: bool = False
) -> StoredMatch:
    return store.match(namespace, as_tokens(tokens), allow_approximate=approximate)


def length(store: PrefixStore, tokens: Sequence[int], **options: Any) -> int:
    return look_up(store, tokens, **options).num_tokens


def use(store: PrefixStore, tokens: Sequence[int]) -> None:
    """A request that reads the whole prefix: what counts as an access."""
    match = look_up(store, tokens)
    assert match.num_tokens == len(tokens)
    store.close_source(store.open_source(match, 0, match.num_tokens))


def rows(source: SegmentSource, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads; probe heads come first in these shapes."""
    probe, other, values = source.read(layer, [Want(stream) for stream in Stream])
    return torch.cat([probe, other], 1), values


def check_rows(
    store: PrefixStore,
    tokens: Sequence[int],
    *,
    namespace: str = "",
    approximate: bool = False,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """The whole of `tokens` is stored, and [start, stop) of it is read back right."""
    match = look_up(store, tokens, namespace, approximate=approximate)
    assert match.num_tokens == len(tokens)
    stop = len(tokens) if stop is None else stop
    expected = SequenceKVs(SHAPE, namespace, tuple(tokens))
    source = store.open_source(match, start, stop)
    try:
        for layer in range(SHAPE.num_layers):
            keys, values = rows(source, layer)
            assert torch.equal(keys, expected.keys(layer)[start:stop])
            assert torch.equal(values, expected.values(layer)[start:stop])
    finally:
        store.close_source(source)


def path_of(bench: Workbench, match: StoredMatch, number: int = 0) -> Path:
    name = match.spans[number].segment.segment_id
    (path,) = bench.root.glob(f"*/segments/*/{name}.kv")
    return path


# ---- offers and rows


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 200])
def test_an_offered_prefix_is_found_and_its_rows_are_right(
    bench: Workbench, store: PrefixStore, count: int
) -> None:
    tokens = prompt(1, count)

    assert bench.offer(store, tokens) is StoreOutcome.ACCEPTED
    store.drain()

    store.check_integrity()
    check_rows(store, tokens)
    assert length(store, [*tokens, 7, 8]) == count
    assert length(store, [9999, *tokens]) == 0


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 20), (8, 16), (19, 30), (29, 30)])
def test_a_part_of_a_match_can_be_opened(
    bench: Workbench, store: PrefixStore, start: int, stop: int
) -> None:
    """Tokens before `start` are still in the device pool; the part crosses two segments."""
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 30))

    check_rows(store, prompt(1, 30), start=start, stop=stop)


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


def test_a_prefix_that_is_still_written_is_not_found(bench: Workbench, store: PrefixStore) -> None:
    tokens = prompt(1)
    gate = Gate(SequenceKVs(SHAPE, "", tokens))

    assert bench.offer(store, tokens, read_layers=gate) is StoreOutcome.ACCEPTED

    assert store.is_writing
    assert length(store, tokens) == 0
    assert bench.done == []
    gate.opened.set()
    store.drain()
    assert not store.is_writing
    assert bench.done == [tokens]
    check_rows(store, tokens)


def test_finished_writes_are_taken_in_by_a_later_match(
    bench: Workbench, store: PrefixStore
) -> None:
    """Nobody calls `drain` while serving."""
    tokens = prompt(1)
    bench.offer(store, tokens)
    deadline = threading.Event()
    for _ in range(2000):
        if length(store, tokens):
            break
        deadline.wait(0.005)

    check_rows(store, tokens)
    assert bench.done == [tokens]


def test_the_callback_runs_once_on_the_callers_thread(store: PrefixStore) -> None:
    threads: list[int] = []
    kvs = SequenceKVs(SHAPE, "", prompt(1))
    store.offer(
        "",
        as_tokens(kvs.tokens),
        kvs.read_from,
        lambda: threads.append(threading.get_ident()),
        approximate=False,
        min_tokens=1,
    )
    store.drain()
    store.poll()
    store.drain()

    assert threads == [threading.get_ident()]


def test_a_prefix_that_is_stored_is_known(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1, 20))

    for known in (prompt(1, 20), prompt(1, 19), prompt(1, 3)):
        assert bench.offer(store, known) is StoreOutcome.KNOWN
    assert len(bench.files()) == 1
    assert bench.done == [prompt(1, 20)], "a refused offer has no callback"


def test_two_offers_of_one_prefix_are_one_write(bench: Workbench, store: PrefixStore) -> None:
    tokens = prompt(1)
    gate = Gate(SequenceKVs(SHAPE, "", tokens))

    first = bench.offer(store, tokens, read_layers=gate)
    second = bench.offer(store, tokens, read_layers=gate)
    gate.opened.set()
    store.drain()

    assert (first, second) == (StoreOutcome.ACCEPTED, StoreOutcome.KNOWN)
    assert gate.starts == [0], "the second reader was never made"
    assert len(bench.files()) == 1
    assert store.stats.segments_written == 1


@pytest.mark.parametrize(("new", "expected"), [(4, StoreOutcome.KNOWN), (5, StoreOutcome.ACCEPTED)])
def test_a_short_rest_is_not_worth_a_file(
    bench: Workbench, store: PrefixStore, new: int, expected: StoreOutcome
) -> None:
    bench.put(store, prompt(1, 20))

    assert bench.offer(store, prompt(1, 20 + new), min_tokens=5) is expected


def test_kvs_that_the_reader_lacks_must_be_stored(bench: Workbench, store: PrefixStore) -> None:
    """The request has KVs from token 8 on only."""
    tokens = prompt(1, 20)

    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.UNREACHABLE
    assert bench.files() == set() and bench.done == []
    bench.put(store, prompt(1, 7))
    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.UNREACHABLE
    bench.put(store, prompt(1, 8))
    bench.put(store, tokens, available_from=8)
    check_rows(store, tokens)


def test_an_extension_is_a_second_segment(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1, 13))
    kvs = SequenceKVs(SHAPE, "", prompt(1, 40))
    gate = Gate(kvs)
    gate.opened.set()

    bench.put(store, kvs.tokens, read_layers=gate)

    assert gate.starts == [13], "only what is new is read"
    assert [len(span) for span in look_up(store, kvs.tokens).spans] == [13, 27]
    check_rows(store, kvs.tokens)
    check_rows(store, prompt(1, 13))


def test_an_extension_of_a_prefix_that_is_still_written(
    bench: Workbench, store: PrefixStore
) -> None:
    gate = Gate(SequenceKVs(SHAPE, "", prompt(1, 13)))
    bench.offer(store, prompt(1, 13), read_layers=gate)

    assert bench.offer(store, prompt(1, 40), available_from=13) is StoreOutcome.ACCEPTED
    assert length(store, prompt(1, 40)) == 0
    gate.opened.set()
    store.drain()

    check_rows(store, prompt(1, 40))


def test_prompts_that_part_in_the_middle_share_what_is_before(
    bench: Workbench, store: PrefixStore
) -> None:
    left = prompt(1, 40)
    right = (*left[:21], *prompt(7, 30))
    bench.put(store, left)
    bench.put(store, right)

    check_rows(store, left)
    check_rows(store, right)
    assert [len(span) for span in look_up(store, right).spans] == [21, 30]
    assert len(bench.files()) == 2


def test_namespaces_are_apart(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1), namespace="salt-1")
    assert length(store, prompt(1), namespace="salt-2") == 0
    assert length(store, prompt(1)) == 0

    bench.put(store, prompt(1), namespace="salt-2")

    check_rows(store, prompt(1), namespace="salt-1")
    check_rows(store, prompt(1), namespace="salt-2")


def test_approximate_kvs_are_found_only_where_they_are_allowed(
    bench: Workbench, store: PrefixStore
) -> None:
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40), approximate=True, available_from=13)

    assert length(store, prompt(1, 40)) == 13
    match = look_up(store, prompt(1, 40), approximate=True)
    assert (match.num_tokens, match.approximate) == (40, True)
    source = store.open_source(match, 0, 40)
    kvs = SequenceKVs(SHAPE, "", prompt(1, 40), approximate=True)
    assert torch.equal(rows(source, 0)[0][13:], kvs.keys(0)[13:])
    store.close_source(source)


def test_exact_kvs_can_be_stored_beside_approximate_ones(
    bench: Workbench, store: PrefixStore
) -> None:
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40), approximate=True, available_from=13)

    bench.put(store, prompt(1, 40))

    check_rows(store, prompt(1, 40))
    check_rows(store, prompt(1, 40), approximate=True)
    assert bench.offer(store, prompt(1, 40), approximate=True) is StoreOutcome.KNOWN


def test_a_write_that_fails_is_counted_logged_and_forgotten(
    bench: Workbench, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(layer: int) -> tuple[Tensor, Tensor]:
        raise OSError(errno.EIO, "the device is gone")

    outcome = bench.offer(store, prompt(1), read_layers=lambda start: fail)
    assert outcome is StoreOutcome.ACCEPTED
    with caplog.at_level(logging.WARNING):
        store.drain()

    store.check_integrity()
    assert "the device is gone" in caplog.text
    assert store.stats.segments_failed == 1
    assert store.stats.segments_written == 0
    assert bench.done == [prompt(1)], "its KVs are not needed any more"
    assert length(store, prompt(1)) == 0
    assert store.summary()["used_bytes"] == 0
    bench.put(store, prompt(1))
    check_rows(store, prompt(1))


def test_what_builds_on_a_failed_write_is_given_up_too(
    bench: Workbench, store: PrefixStore
) -> None:
    entered, opened = threading.Event(), threading.Event()

    def fail(layer: int) -> tuple[Tensor, Tensor]:
        entered.set()
        assert opened.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    bench.offer(store, prompt(1, 13), read_layers=lambda start: fail)
    assert entered.wait(30)
    assert bench.offer(store, prompt(1, 40)) is StoreOutcome.ACCEPTED
    assert bench.offer(store, prompt(2)) is StoreOutcome.ACCEPTED
    opened.set()
    store.drain()

    store.check_integrity()
    assert bench.done == [prompt(1, 13), prompt(1, 40), prompt(2)]
    assert length(store, prompt(1, 40)) == 0
    check_rows(store, prompt(2))
    store = bench.reopen(store)
    assert [len(s.info.tokens) for s in store.tree.segments()] == [8]
    assert len(bench.files()) == 1


def test_a_row_that_cannot_be_recorded_is_a_failed_write(
    bench: Workbench, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store_module.Catalog, "add", full)
    bench.offer(store, prompt(1))
    store.drain()
    monkeypatch.undo()

    store.check_integrity()
    assert store.stats.segments_failed == 1
    assert length(store, prompt(1)) == 0
    bench.close(store)
    assert bench.files() == set()


def test_stats_count_what_was_written_and_read(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1, 40))
    source = store.open_source(look_up(store, prompt(1, 40)), 0, 40)
    source.read(0, [Want(Stream.VALUES)])
    source.read(0, [Want(Stream.VALUES, torch.tensor([0, 39]))])
    store.close_source(source)

    # 5 chunks of a disk block in each stream.
    size = 4096 * (1 + 2 * 3 * 5)
    assert store.stats.segments_written == 1
    assert store.stats.bytes_written == size
    assert store.stats.chunks_read == 7
    assert store.stats.bytes_read == 7 * 4096
    summary = store.summary()
    assert summary["segments"] == 1
    assert summary["used_bytes"] == size
    assert summary["writes_pending"] == 0
    (path,) = bench.root.rglob("*.kv")
    assert path.stat().st_size == size


# ---- quota and free space


def test_the_least_recently_used_prefix_goes_first(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(3 * ONE))
    for number in (1, 2, 3):
        bench.put(store, prompt(number))
    use(store, prompt(1))

    bench.put(store, prompt(4))

    assert [length(store, prompt(n)) for n in (1, 2, 3, 4)] == [8, 0, 8, 8]
    assert store.stats.segments_evicted == 1
    use(store, prompt(3))
    bench.put(store, prompt(5))
    assert [length(store, prompt(n)) for n in (1, 3, 4, 5)] == [0, 8, 8, 8]
    bench.close(store)
    assert len(bench.files()) == 3


def test_only_reading_counts_as_use(bench: Workbench) -> None:
    """A look-up happens for every waiting request, again and again."""
    store = bench.open(ssd_gb=gb(2 * ONE))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    for _ in range(5):
        look_up(store, prompt(1))

    bench.put(store, prompt(3))

    assert [length(store, prompt(n)) for n in (1, 2, 3)] == [0, 8, 8]


def test_a_prefix_that_others_build_on_goes_after_them(bench: Workbench) -> None:
    """a <- b, and c, which is the latest: b goes first, although a is as old; then a."""
    store = bench.open(ssd_gb=gb(3 * ONE))
    a, b, c = prompt(1, 8), prompt(1, 16), prompt(3)
    bench.put(store, a)
    bench.put(store, b)
    bench.put(store, c)

    bench.put(store, prompt(4))

    assert [length(store, tokens) for tokens in (b, c, prompt(4))] == [8, 8, 8]
    bench.put(store, prompt(5))
    assert [length(store, t) for t in (b, c, prompt(4), prompt(5))] == [0, 8, 8, 8]


def test_a_large_offer_evicts_several(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(4 * ONE))
    for number in (1, 2, 3, 4):
        bench.put(store, prompt(number))

    # 16 tokens are two chunks a stream: 13 disk blocks, almost two of the small segments.
    bench.put(store, prompt(5, 16))

    assert [length(store, prompt(n)) for n in (1, 2, 3, 4)] == [0, 0, 8, 8]
    check_rows(store, prompt(5, 16))


def test_the_prefix_that_an_offer_extends_is_not_evicted_for_it(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(2 * ONE))
    bench.put(store, prompt(1, 8))
    bench.put(store, prompt(2))

    bench.put(store, prompt(1, 16))

    check_rows(store, prompt(1, 16))
    assert length(store, prompt(2)) == 0


def test_nothing_that_is_read_is_evicted(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(2 * ONE))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    first = store.open_source(look_up(store, prompt(1)), 0, 8)
    again = store.open_source(look_up(store, prompt(1)), 0, 8)

    bench.put(store, prompt(3))
    assert [length(store, prompt(n)) for n in (1, 2, 3)] == [8, 0, 8]
    store.close_source(first)
    bench.put(store, prompt(4))
    assert [length(store, prompt(n)) for n in (1, 3, 4)] == [8, 0, 8], "one reader is left"
    assert torch.equal(rows(again, 1)[1], SequenceKVs(SHAPE, "", prompt(1)).values(1))
    store.close_source(again)
    use(store, prompt(4))
    bench.put(store, prompt(5))
    assert [length(store, prompt(n)) for n in (1, 4, 5)] == [0, 8, 8]


def test_nothing_that_is_written_is_evicted(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(ONE))
    gate = Gate(SequenceKVs(SHAPE, "", prompt(1)))
    bench.offer(store, prompt(1), read_layers=gate)

    assert bench.offer(store, prompt(2)) is StoreOutcome.NO_SPACE
    gate.opened.set()
    store.drain()

    check_rows(store, prompt(1))
    bench.put(store, prompt(2))
    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]


def test_an_offer_without_space_is_a_value(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(ONE))
    made: list[int] = []

    outcome = bench.offer(store, prompt(1, 9), read_layers=lambda start: made.append(start))  # type: ignore[arg-type,return-value]

    assert outcome is StoreOutcome.NO_SPACE
    assert store.stats.offers_without_space == 1
    assert made == [] and bench.done == []
    assert store.summary()["used_bytes"] == 0
    assert bench.files() == set()


def test_an_offer_that_can_never_fit_evicts_nothing(bench: Workbench) -> None:
    """One huge prompt must not cost all others their stored prefixes, and then be refused."""
    store = bench.open(ssd_gb=gb(3 * ONE))
    for number in (1, 2, 3):
        bench.put(store, prompt(number))

    assert bench.offer(store, prompt(9, 1000)) is StoreOutcome.NO_SPACE

    assert [length(store, prompt(n)) for n in (1, 2, 3)] == [8, 8, 8]


def test_the_quota_holds_over_a_long_run(bench: Workbench) -> None:
    """Prompts of several lengths come back in turns; extensions, evictions and misses mix."""
    quota = 5 * ONE + 3 * 4096
    store = bench.open(ssd_gb=gb(quota))
    outcomes = []
    for number in range(30):
        outcomes.append(bench.offer(store, prompt(number % 11, 5 + number % 13)))
        store.drain()
        store.check_integrity()
        assert store.summary()["used_bytes"] <= quota + 1000
    bench.close(store)

    assert outcomes.count(StoreOutcome.ACCEPTED) > 20
    assert store.stats.segments_evicted > 10
    on_disk = sum(path.stat().st_size for path in bench.root.rglob("*.kv"))
    assert on_disk == store.summary()["used_bytes"]


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(store_module, "free_bytes", lambda directory: num_bytes)


def test_the_free_space_floor_is_kept(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = bench.open(min_free_gb=0.001)
    set_free(monkeypatch, 1_000_000 + ONE - 1)
    assert bench.offer(store, prompt(1)) is StoreOutcome.NO_SPACE

    set_free(monkeypatch, 1_000_000 + ONE)

    assert bench.offer(store, prompt(1)) is StoreOutcome.ACCEPTED
    assert store.stats.offers_without_space == 1


def test_bytes_that_are_still_written_are_not_free(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.open()
    set_free(monkeypatch, 2 * ONE)
    gates = [Gate(SequenceKVs(SHAPE, "", prompt(n))) for n in (1, 2, 3)]

    outcomes = [
        bench.offer(store, prompt(n), read_layers=gate)
        for n, gate in zip((1, 2, 3), gates, strict=True)
    ]
    for gate in gates:
        gate.opened.set()

    assert outcomes == [StoreOutcome.ACCEPTED, StoreOutcome.ACCEPTED, StoreOutcome.NO_SPACE]


def test_a_full_file_system_makes_room_by_eviction(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.open()
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    set_free(monkeypatch, 100)

    assert bench.offer(store, prompt(3)) is StoreOutcome.ACCEPTED

    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]


# ---- after a restart


def three_prefixes(bench: Workbench) -> PrefixStore:
    store = bench.open()
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(2, 8), namespace="salt")
    return store


def check_three_prefixes(store: PrefixStore) -> None:
    store.check_integrity()
    check_rows(store, prompt(1, 40))
    check_rows(store, prompt(2, 8), namespace="salt")
    assert len(store.tree) == 3


def test_everything_is_found_after_a_restart(bench: Workbench) -> None:
    store = three_prefixes(bench)
    used = store.summary()["used_bytes"]

    store = bench.reopen(store)

    check_three_prefixes(store)
    assert store.summary()["used_bytes"] == used
    bench.put(store, prompt(1, 60))
    check_rows(store, prompt(1, 60))


def overwrite(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = os.urandom(len(data[start:stop]))
    path.write_bytes(data)


CATALOG_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(20_000)),
    "text": lambda path: path.write_text("this is not a database\n" * 100),
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "header": lambda path: overwrite(path, 0, 100),
    "first page": lambda path: overwrite(path, 100, 4096),
    "last page": lambda path: overwrite(path, path.stat().st_size - 4096, path.stat().st_size),
    "garbage in the log": lambda path: path.with_name(path.name + "-wal").write_bytes(
        os.urandom(5000)
    ),
}


@pytest.mark.parametrize("damage", CATALOG_DAMAGE)
def test_everything_is_found_without_the_index(bench: Workbench, damage: str) -> None:
    bench.close(three_prefixes(bench))
    (catalog,) = bench.root.glob("*/catalog.sqlite")

    CATALOG_DAMAGE[damage](catalog)

    store = bench.open()
    check_three_prefixes(store)
    check_three_prefixes(bench.reopen(store))


def rewrite_rows(catalog: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(catalog)
    with connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


def is_served(store: PrefixStore, tokens: Sequence[int], namespace: str = "") -> bool:
    match = look_up(store, tokens, namespace)
    if not match.num_tokens:
        return False
    try:
        store.close_source(store.open_source(match, 0, match.num_tokens))
    except ChunkUnreadable as error:
        store.drop(error.segment_id)
        return False
    return True


def test_a_row_with_other_tokens_than_its_file_is_not_believed(bench: Workbench) -> None:
    """Rows have no checksum: a bit that flips in one must not lend KVs to other tokens."""
    store = bench.open()
    bench.put(store, prompt(1, 13))
    bench.close(store)
    (catalog,) = bench.root.glob("*/catalog.sqlite")
    wrong = prompt(7, 13)
    rewrite_rows(catalog, "UPDATE segments SET tokens = ?", as_tokens(wrong).tobytes())

    assert not is_served(bench.open(), wrong)


def test_a_row_with_another_namespace_than_its_file_is_not_believed(bench: Workbench) -> None:
    store = bench.open()
    bench.put(store, prompt(1, 13))
    assert is_served(store, prompt(1, 13)), "guards the tests here: it can be served"
    bench.close(store)
    (catalog,) = bench.root.glob("*/catalog.sqlite")
    rewrite_rows(catalog, "UPDATE segments SET namespace = ?", "salt")

    assert not is_served(bench.open(), prompt(1, 13), "salt")


def test_a_row_that_calls_approximate_kvs_exact_is_not_believed(bench: Workbench) -> None:
    store = bench.open()
    bench.put(store, prompt(1, 13), approximate=True)
    bench.close(store)
    (catalog,) = bench.root.glob("*/catalog.sqlite")
    rewrite_rows(catalog, "UPDATE segments SET approximate = 0")

    assert not is_served(bench.open(), prompt(1, 13))


def test_what_a_killed_process_leaves_unfinished_is_removed(bench: Workbench) -> None:
    store = three_prefixes(bench)
    folder = path_of(bench, look_up(store, prompt(1, 40))).parent
    bench.close(store)
    (folder / "abcd.kv.tmp").write_bytes(bytes(5000))

    store = bench.open()

    assert not (folder / "abcd.kv.tmp").exists()
    check_three_prefixes(store)


def test_a_file_without_a_row_is_adopted(bench: Workbench) -> None:
    bench.close(three_prefixes(bench))
    (catalog,) = bench.root.glob("*/catalog.sqlite")
    rewrite_rows(catalog, "DELETE FROM segments WHERE prefix_len = 13")

    store = bench.open()

    check_three_prefixes(store)


def test_a_row_without_a_file_is_dropped(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    store = three_prefixes(bench)
    path = path_of(bench, look_up(store, prompt(2, 8), "salt"))
    bench.close(store)
    path.unlink()

    store = bench.open()

    store.check_integrity()
    assert path.stem in caplog.text
    assert len(store.tree) == 2
    assert length(store, prompt(2, 8), namespace="salt") == 0
    check_rows(store, prompt(1, 40))
    caplog.clear()
    bench.reopen(store)
    assert path.stem not in caplog.text, "said once"


def test_a_prefix_whose_beginning_is_gone_is_removed(bench: Workbench) -> None:
    store = three_prefixes(bench)
    path = path_of(bench, look_up(store, prompt(1, 40)))
    bench.close(store)
    path.unlink()

    store = bench.open()

    store.check_integrity()
    assert [length(store, prompt(1, 40)), len(store.tree)] == [0, 1]
    bench.close(store)
    assert len(bench.files()) == 1
    bench.put(bench.open(), prompt(1, 40))


@pytest.mark.parametrize("change", [-1, -4096, 1, 4096])
@pytest.mark.parametrize("with_row", [True, False])
def test_a_file_of_a_wrong_size_is_removed(bench: Workbench, change: int, with_row: bool) -> None:
    store = three_prefixes(bench)
    path = path_of(bench, look_up(store, prompt(2, 8), "salt"))
    bench.close(store)
    os.truncate(path, path.stat().st_size + change)
    if not with_row:
        next(bench.root.glob("*/catalog.sqlite")).unlink()

    store = bench.open()

    store.check_integrity()
    assert length(store, prompt(2, 8), namespace="salt") == 0
    assert not path.exists()
    check_rows(store, prompt(1, 40))


def test_a_damaged_file_without_a_row_is_removed(bench: Workbench) -> None:
    store = three_prefixes(bench)
    path = path_of(bench, look_up(store, prompt(2, 8), "salt"))
    bench.close(store)
    next(bench.root.glob("*/catalog.sqlite")).unlink()
    flip_byte(path, 50)

    store = bench.open()

    assert len(store.tree) == 2
    assert not path.exists()


def test_a_file_of_another_model_is_not_adopted(bench: Workbench) -> None:
    store = bench.open()
    bench.put(store, prompt(1))
    folder = path_of(bench, look_up(store, prompt(1))).parent
    info = dataclasses.replace(
        make_info(SHAPE, prompt(5), segment_id="cafe"), identity=OTHER_IDENTITY
    )
    bench.close(store)
    write_kvs(folder, info, *random_kvs(SHAPE, 8, seed=1))

    store = bench.open()

    assert len(store.tree) == 1
    assert "cafe.kv" not in bench.files()


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_copy_of_a_segment_under_another_name_does_no_harm(
    bench: Workbench, with_rows: bool
) -> None:
    store = bench.open()
    bench.put(store, prompt(1))
    path = path_of(bench, look_up(store, prompt(1)))
    bench.close(store)
    for name in ("0", "z"):
        path.with_name(f"{name}{path.name}").write_bytes(path.read_bytes())
    if not with_rows:
        next(bench.root.glob("*/catalog.sqlite")).unlink()

    store = bench.reopen(bench.open())

    check_rows(store, prompt(1))
    assert store.summary()["used_bytes"] == ONE


def test_files_that_are_none_of_ours_stay(bench: Workbench) -> None:
    bench.close(three_prefixes(bench))
    (segments,) = bench.root.glob("*/segments")
    (segments / "README").write_text("mine")
    (bench.root / "notes.txt").write_text("mine")

    check_three_prefixes(bench.open())

    assert (segments / "README").exists() and (bench.root / "notes.txt").exists()


def test_a_smaller_quota_after_a_restart_evicts_with_the_next_offer(bench: Workbench) -> None:
    store = bench.open()
    for number in (1, 2, 3, 4):
        bench.put(store, prompt(number))

    store = bench.reopen(store, ssd_gb=gb(2 * ONE))
    bench.put(store, prompt(5))

    assert [length(store, prompt(n)) for n in (1, 2, 3, 4, 5)] == [0, 0, 0, 8, 8]


def test_the_order_of_use_survives_a_restart(bench: Workbench) -> None:
    store = bench.open()
    for number in (1, 2, 3):
        bench.put(store, prompt(number))
    use(store, prompt(1))

    store = bench.reopen(store, ssd_gb=gb(3 * ONE))
    bench.put(store, prompt(4))
    bench.put(store, prompt(5))

    assert [length(store, prompt(n)) for n in (1, 2, 3, 4, 5)] == [8, 0, 0, 8, 8]


def test_another_chunk_size_after_a_restart(bench: Workbench) -> None:
    """Each segment keeps the chunks that it was written with."""
    store = three_prefixes(bench)

    store = bench.reopen(store, chunk_tokens=24)

    check_three_prefixes(store)
    bench.put(store, prompt(1, 100))
    check_rows(store, prompt(1, 100))


# ---- directories and other models


def test_two_stores_of_one_model_cannot_share_a_directory(
    bench: Workbench, store: PrefixStore
) -> None:
    with pytest.raises(StoreInUseError, match="--impress-ssd-dir"):
        bench.open()

    bench.close(store)
    bench.open()


def test_two_models_can_share_a_directory(bench: Workbench, store: PrefixStore) -> None:
    other = bench.open(OTHER_IDENTITY)
    bench.put(store, prompt(1))

    assert length(other, prompt(1)) == 0
    assert length(store, prompt(1)) == 8


def test_a_directory_that_cannot_be_written_is_a_config_error(bench: Workbench) -> None:
    bench.root.write_text("a file")

    with pytest.raises(ConfigError, match="--impress-ssd-dir"):
        bench.open()


def old_model(bench: Workbench, identity: str, num_bytes: int, age: int) -> Path:
    """The folder of a model that is not served."""
    folder = bench.root / identity
    (folder / "segments" / "ab").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "segments" / "ab" / "abcd.kv").write_bytes(bytes(num_bytes))
    os.utime(folder, (1_700_000_000 - age, 1_700_000_000 - age))
    return folder


def test_other_models_count_in_the_quota_and_go_first(bench: Workbench) -> None:
    newer = old_model(bench, "1" * 32, ONE, age=10)
    older = old_model(bench, "2" * 32, ONE, age=20)
    store = bench.open(ssd_gb=gb(4 * ONE))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    assert store.summary()["other_models_bytes"] == 2 * ONE
    assert older.exists()

    bench.put(store, prompt(3))
    assert not older.exists() and newer.exists()
    assert store.summary()["other_models_bytes"] == ONE
    bench.put(store, prompt(4))
    assert not newer.exists()
    assert store.stats.segments_evicted == 0
    bench.put(store, prompt(5))
    assert [length(store, prompt(n)) for n in range(1, 6)] == [0, 8, 8, 8, 8]


def test_the_folder_of_a_model_that_is_served_is_not_removed(bench: Workbench) -> None:
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, prompt(1))
    store = bench.open(ssd_gb=gb(2 * ONE))
    bench.put(store, prompt(1))

    bench.put(store, prompt(2))

    check_rows(other, prompt(1))
    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]


def test_the_folder_of_another_model_may_vanish(bench: Workbench) -> None:
    """Another server, or its user, has removed it; an offer must not fail for that."""
    folder = old_model(bench, "1" * 32, ONE, age=10)
    store = bench.open(ssd_gb=gb(2 * ONE))
    bench.put(store, prompt(1))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()

    bench.put(store, prompt(2))

    assert length(store, prompt(2)) == 8
    assert not folder.exists()


def test_the_folder_of_another_model_that_cannot_be_removed_is_left_alone(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to another user, for example: the offer makes room elsewhere."""
    folder = old_model(bench, "1" * 32, ONE, age=10)
    store = bench.open(ssd_gb=gb(2 * ONE))
    bench.put(store, prompt(1))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    bench.put(store, prompt(2))

    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]
    assert folder.exists()
    assert store.summary()["other_models_bytes"] == ONE


# ---- damage and drops


def test_a_dropped_segment_is_gone_with_all_that_builds_on_it(bench: Workbench) -> None:
    store = three_prefixes(bench)
    first = look_up(store, prompt(1, 40)).spans[0].segment.segment_id

    store.drop(first)

    store.check_integrity()
    assert length(store, prompt(1, 40)) == 0
    check_rows(store, prompt(2, 8), namespace="salt")
    assert store.summary()["used_bytes"] == ONE
    assert store.stats.segments_unreadable == 1
    bench.close(store)
    assert len(bench.files()) == 1


def test_a_drop_keeps_what_is_above(bench: Workbench) -> None:
    store = three_prefixes(bench)

    store.drop(look_up(store, prompt(1, 40)).spans[1].segment.segment_id)

    check_rows(store, prompt(1, 13))
    assert length(store, prompt(1, 40)) == 13


def test_dropping_twice_or_something_unknown_does_nothing(bench: Workbench) -> None:
    store = three_prefixes(bench)
    name = look_up(store, prompt(2, 8), "salt").spans[0].segment.segment_id

    store.drop("unknown")
    store.drop(name)
    store.drop(name)

    store.check_integrity()
    assert store.stats.segments_unreadable == 1


def test_a_segment_can_be_dropped_while_it_is_read(bench: Workbench) -> None:
    store = three_prefixes(bench)
    source = store.open_source(look_up(store, prompt(1, 40)), 0, 40)
    store.drop(source.segment_ids[0])
    store.check_integrity()
    bench.put(store, prompt(1, 40))

    expected = SequenceKVs(SHAPE, "", prompt(1, 40))
    assert torch.equal(rows(source, 1)[0], expected.keys(1))
    store.close_source(source)
    store.check_integrity()
    check_rows(store, prompt(1, 40))


def test_a_segment_can_be_dropped_while_it_is_written(bench: Workbench, store: PrefixStore) -> None:
    gate = Gate(SequenceKVs(SHAPE, "", prompt(1)))
    bench.offer(store, prompt(1), read_layers=gate)
    (segment,) = store.tree.segments()

    store.drop(segment.segment_id)
    store.check_integrity()
    assert store.summary()["used_bytes"] == ONE, "its file is still being written"
    gate.opened.set()
    store.drain()

    store.check_integrity()
    assert bench.done == [prompt(1)]
    assert length(store, prompt(1)) == 0
    assert store.summary()["used_bytes"] == 0
    bench.close(store)
    assert bench.files() == set()


def test_a_prefix_can_be_offered_again_while_its_dropped_segment_is_written(
    bench: Workbench, store: PrefixStore
) -> None:
    gate = Gate(SequenceKVs(SHAPE, "", prompt(1)))
    bench.offer(store, prompt(1), read_layers=gate)
    store.drop(next(store.tree.segments()).segment_id)

    assert bench.offer(store, prompt(1)) is StoreOutcome.ACCEPTED
    gate.opened.set()
    store.drain()

    store.check_integrity()
    check_rows(store, prompt(1))


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_gone_is_unreadable_and_can_be_dropped(
    bench: Workbench, number: int
) -> None:
    store = three_prefixes(bench)
    match = look_up(store, prompt(1, 40))
    path_of(bench, match, number).unlink()
    descriptors = len(os.listdir("/proc/self/fd"))

    with pytest.raises(ChunkUnreadable) as caught:
        store.open_source(match, 0, 40)

    assert caught.value.segment_id == match.spans[number].segment.segment_id
    assert len(os.listdir("/proc/self/fd")) == descriptors, "the other file is closed again"
    store.check_integrity()
    store.drop(caught.value.segment_id)
    store.check_integrity()
    assert length(store, prompt(1, 40)) == (0, 13)[number]
    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))


def test_a_damaged_chunk_is_unreadable_and_the_rest_is_served(bench: Workbench) -> None:
    store = three_prefixes(bench)
    match = look_up(store, prompt(1, 40))
    path = path_of(bench, match, 1)
    flip_byte(path, path.stat().st_size - 4096)
    source = store.open_source(match, 0, 40)

    with pytest.raises(ChunkUnreadable) as caught:
        source.read(1, [Want(Stream.VALUES)])

    assert caught.value.segment_id == path.stem
    store.drop(caught.value.segment_id)
    store.close_source(source)
    store.check_integrity()
    check_rows(store, prompt(1, 13))


def test_a_match_may_be_older_than_an_eviction(bench: Workbench) -> None:
    """Between the match and its use other requests are served, and their offers evict."""
    store = bench.open(ssd_gb=gb(ONE))
    bench.put(store, prompt(1))
    match = look_up(store, prompt(1))
    bench.put(store, prompt(2))

    with pytest.raises(ChunkUnreadable) as caught:
        store.open_source(match, 0, 8)

    store.drop(caught.value.segment_id)
    store.check_integrity()
    check_rows(store, prompt(2))


def test_a_file_that_cannot_be_removed_is_logged(
    bench: Workbench,
    store: PrefixStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench.put(store, prompt(1))
    name = next(store.tree.segments()).segment_id

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    store.drop(name)
    bench.put(store, prompt(2))
    monkeypatch.undo()

    assert name in caplog.text
    check_rows(store, prompt(2))


def test_closing_waits_for_writes(bench: Workbench, store: PrefixStore) -> None:
    for number in range(5):
        bench.offer(store, prompt(number))

    store = bench.reopen(store)

    assert sorted(bench.done) == sorted(prompt(number) for number in range(5))
    for number in range(5):
        check_rows(store, prompt(number))


def test_no_file_stays_open_after_closing(bench: Workbench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = three_prefixes(bench)
    check_three_prefixes(store)

    bench.close(store)

    assert len(os.listdir("/proc/self/fd")) == before
