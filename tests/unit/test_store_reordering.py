"""Stores of parts: segments are reordered in the background, and what is known before a read."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from impress_sglang.paper import store as part_store
from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import read_header
from impress_sglang.storage.writer import WriteAbandoned, write_segment
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.writing import StoreOutcome
from tests.unit import kv_factory as kv
from tests.unit import store_factory as stores
from tests.unit.kv_factory import flip_byte, head_groups_of
from tests.unit.reading import read_rows, wait_for_reads
from tests.unit.store_checks import check_lookahead, check_store
from tests.unit.store_factory import Workbench, check_rows, gb, length, lengths, look_up, prompt

bench = stores.bench_of_each_shape


def select(store: PartStore, tokens: tuple[int, ...], *chosen: int) -> None:
    """A request whose layers all select the same tokens of a stored prefix."""
    match = look_up(store, tokens)
    assert match.num_tokens == len(tokens)
    source = stores.open_source(store, match)
    shape = store._shape
    selected = torch.tensor(sorted(chosen)).expand(head_groups_of(shape), -1)
    for layer in range(shape.num_layers):
        read_rows(source, layer, selected)
        scores = torch.ones(head_groups_of(shape), len(tokens))
        source.record_selection(layer, selected.numpy(), scores)
    store.close_source(source)


def put_selected(bench: Workbench, store: PartStore, tokens: tuple[int, ...], *chosen: int) -> None:
    bench.put(store, tokens)
    select(store, tokens, *chosen)


def finish(store: PartStore) -> None:
    """Poll until nothing is left to reorder, and old files are removed."""
    stores.until(store, lambda: not store.rewrites["pending"])
    store.worker.submit(int).result()


def mapping_of(bench: Workbench, store: PartStore, tokens: Sequence[int]) -> np.ndarray:
    """Mapping lists of the file that holds the first of the tokens."""
    mapping = read_header(stores.path_of(bench, look_up(store, tokens)), FileSystem()).mapping
    assert mapping is not None
    return mapping


def reorder(store: PartStore) -> None:
    assert store.enqueue_rewrites(force=True) > 0
    finish(store)


class Held:
    """Holds every rewrite before it publishes its file, or when it has `published` it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, published: bool) -> None:
        self.published = published
        self.entered, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(part_store, "write_segment", self._write)

    def _write(self, *args: Any, **kwargs: Any) -> None:
        if self.published:
            write_segment(*args, **kwargs)
        self.entered.set()
        assert self.go_on.wait(30)
        if not self.published:
            write_segment(*args, **kwargs)

    def begin(self, store: PartStore) -> None:
        store.enqueue_rewrites(force=True)
        store.poll()
        assert self.entered.wait(30)


@pytest.mark.parametrize("count", [40, 1000])
def test_a_new_file_takes_the_place_of_the_old_one(
    bench: Workbench, store: PartStore, count: int
) -> None:
    """Mapping lists of a long one take more than what the header has left of its last block."""
    put_selected(bench, store, tokens := prompt(1, count), 3, 17, 39)
    old = stores.path_of(bench, look_up(store, tokens))
    used = store.summary()["used_bytes"]
    # What was measured last stands.
    store.health._measured_at, store.health.free_bytes = math.inf, 10**9

    assert store.enqueue_rewrites(force=True) == 1
    assert store.rewrites["pending"] == 1
    finish(store)

    new = stores.path_of(bench, look_up(store, tokens))
    assert new != old and bench.files() == {new.name}
    (segment,) = store.tree.segments()
    assert segment.segment_id == new.stem and segment.info.generation == 1
    assert store.summary()["used_bytes"] == new.stat().st_size == segment.file_bytes
    assert store.health.free_bytes == 10**9 + used - segment.file_bytes
    assert (segment.file_bytes > used) == (count == 1000)
    nothing = dict.fromkeys(store.rewrites, 0)
    done = {"segments": 1, "bytes_written": segment.file_bytes}
    assert store.rewrites == nothing | done
    assert store.stats.bytes_written == used + segment.file_bytes
    check_rows(store, tokens)
    check_rows(bench.reopen(store), tokens)


def test_what_a_request_waits_for_stays_when_it_is_reordered(bench: Workbench) -> None:
    store = bench.open(lookahead=(lookahead := LookAhead()), ssd_gb=gb(3 * bench.one))
    put_selected(bench, store, prompt(1), 2, 5)
    lookahead.set_expected("waits", look_up(store, prompt(1)).spans)
    reorder(store)
    assert store.rewrites["segments"] == 1
    check_lookahead(lookahead)

    bench.put_all(store, 2, 3, 4)
    assert lengths(store, 1, 3, 4) == [8, 8, 8]
    lookahead.stop_waiting("waits")
    bench.put_all(store, 5, 6, 7)
    assert lengths(store, 1, 5, 6, 7) == [0, 8, 8, 8]


@pytest.mark.parametrize(
    ("key", "expected"),
    [("selected", [0, 1, 2, 3, 4, 5, 6, 7]), ("importance", [1, 2, 3, 4, 5, 0, 6, 7])],
)
def test_the_key_decides_what_the_order_is_by(
    bench: Workbench, key: str, expected: list[int]
) -> None:
    """All tokens are selected, but one has more of the attention."""
    store, tokens = bench.open(reorder_key=key), prompt(1)
    bench.put(store, tokens)
    source = stores.open_source(store, look_up(store, tokens))
    importance = torch.ones(4, 8)
    importance[:, 5] = 7.0
    head_groups = head_groups_of(bench.shape)
    for layer in range(bench.shape.num_layers):
        source.record_selection(layer, np.tile(np.arange(8), (head_groups, 1)), importance)
    store.close_source(source)
    reorder(store)
    assert mapping_of(bench, store, tokens)[0].tolist() == [expected] * head_groups


def test_the_order_stays_inside_the_nodes_of_the_tree(bench: Workbench, store: PartStore) -> None:
    left, right = prompt(1, 40), (*prompt(1, 40)[:21], *prompt(7, 5))
    bench.put(store, left)
    bench.put(store, right)
    select(store, left, 5, 23, 38, 39)

    reorder(store)

    stores.use(store, left)
    mapping = mapping_of(bench, store, left)
    for slots in mapping.reshape(-1, 40):
        assert sorted(slots[:21].tolist()) == list(range(21))
        assert slots[[5, 23, 38, 39]].tolist() == [0, 21, 22, 23]
    check_rows(store, left)
    check_rows(store, right)


@pytest.mark.parametrize("published", [False, True])
def test_a_segment_that_is_lost_meanwhile_stays_lost(
    bench: Workbench, store: PartStore, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its new file is there already."""
    put_selected(bench, store, prompt(1, 20), 3, 17)
    bench.put(store, prompt(2))
    held = Held(monkeypatch, published)
    held.begin(store)

    stores.lose(bench, store, stores.name_of(store, prompt(1, 20)), gone=True)
    assert bench.offer(store, prompt(1, 20)) is StoreOutcome.ACCEPTED
    store.writes.drain()
    held.go_on.set()
    assert store._job is not None
    error = store._job.shares.exception()
    # Else a server that is killed before it looks again would find it at its next start.
    assert published or (isinstance(error, WriteAbandoned) and len(bench.files()) == 2)
    finish(store)

    assert store.rewrites == dict.fromkeys(store.rewrites, 0), "it has not failed"
    check_rows(store, prompt(1, 20))
    check_rows(store, prompt(2))
    assert {s.info.generation for s in store.tree.segments()} == {0}
    assert len(bench.files()) == 2
    assert store.summary()["used_bytes"] == sum(s.file_bytes for s in store.tree.segments())


@pytest.mark.parametrize("reason", ["quota", "free space"])
def test_without_space_it_is_not_begun(bench: Workbench, reason: str) -> None:
    room, quota = stores.Room(), gb(2 * bench.one - 4096)
    store = bench.open(files=room, **({"ssd_gb": quota} if reason == "quota" else {}))
    put_selected(bench, store, prompt(1), 3)
    name = bench.files()
    if reason == "free space":
        room.leave(store, bench.one - 1)

    reorder(store)

    nothing = dict.fromkeys(store.rewrites, 0)
    assert store.rewrites == nothing | {"without_space": 1}
    assert bench.files() == name
    assert store.summary()["used_bytes"] == bench.one
    check_rows(store, prompt(1))


def test_a_damaged_block_costs_the_segment(bench: Workbench, store: PartStore) -> None:
    put_selected(bench, store, prompt(1, 20), 3, 17)
    bench.put(store, prompt(2))
    path = stores.path_of(bench, look_up(store, prompt(1, 20)))
    flip_byte(path, path.stat().st_size - 4096)

    reorder(store)
    stores.look_again(store)

    check_store(store)
    assert store.rewrites["failed"] == 1
    assert store.stats.segments_unreadable == 1
    assert length(store, prompt(1, 20)) == 0
    check_rows(store, prompt(2))
    assert store.summary()["used_bytes"] == bench.one
    assert len(bench.files()) == 1


def test_reordering_begins_at_each_interval_if_reads_were_many(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More bytes of selected tokens than the file has, and then twice as many."""
    now = [1000.0]
    monkeypatch.setattr(part_store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = bench.open(reorder_interval=600.0)
    put_selected(bench, store, tokens := prompt(1, 40), 3, 17, 39)
    (segment,) = store.tree.segments()

    def rewritten(read_bytes: int) -> int:
        assert segment.history is not None
        segment.history.ssd_bytes = read_bytes
        store._read[segment.segment_id] = None
        for seconds in (590, 20):
            now[0] += seconds
            store.poll()
            assert seconds == 20 or not store.rewrites["pending"]
        finish(store)
        return store.rewrites["segments"]

    assert rewritten(segment.file_bytes) == 0
    assert rewritten(segment.file_bytes + 1) == 1
    assert segment.history is not None and segment.history.ssd_bytes == 0
    assert rewritten(2 * segment.file_bytes) == 1
    assert rewritten(2 * segment.file_bytes + 1) == 2
    check_rows(store, tokens)


def test_closing_finishes_the_rewrite_in_work_and_forgets_the_others(bench: Workbench) -> None:
    store = bench.open()
    for number in (1, 2):
        put_selected(bench, store, prompt(number), 3)
    store.enqueue_rewrites(force=True)
    store.poll()

    store = bench.reopen(store)

    generations = [look_up(store, prompt(n)).spans[0].segment.info.generation for n in (1, 2)]
    assert sorted(generations) == [0, 1]
    assert len(bench.files()) == 2
    for number in (1, 2):
        check_rows(store, prompt(number))


TOKENS = prompt(1, 40)
CHUNK_TOKENS = 8


def disk_bytes(bench: Workbench, *columns: int) -> int:
    """Bytes of columns of all layers of a segment."""
    shape, chunks = bench.shape, range(len(TOKENS) // CHUNK_TOKENS)
    sizes = [
        kv.chunk_disk_bytes(shape, column, CHUNK_TOKENS, len(TOKENS), chunk)
        for column in columns
        for chunk in chunks
    ]
    return shape.num_layers * sum(sizes)


def read_layers(store: PartStore, *, only_values: bool = False) -> PartSource:
    """A request that reads all of the stored prefix, and is done."""
    source = stores.open_source(store, look_up(store, TOKENS))
    for layer in range(source.num_layers):
        if only_values:
            read_rows(source, layer, None, keys=False)
        else:
            stores.rows(source.shape, source, layer)
    store.close_source(source)
    return source


@pytest.mark.parametrize("cache", ["device_gb", "host_gb"])
def test_what_is_cached_need_not_come_from_the_ssd(bench: Workbench, cache: str) -> None:
    store = bench.open(**{cache: 0.001})
    bench.put(store, TOKENS)
    keys = kv.columns_of(bench.shape, "keys")

    spans, to_read = look_up(store, TOKENS).spans, store.readers.bytes_to_read
    read_layers(store, only_values=True)
    assert to_read(spans, codes=False) == disk_bytes(bench, kv.PROBE, *keys)

    read_layers(store)
    assert to_read(spans, codes=False) == store.expected_bytes(spans, 0.1) == 0
    assert read_layers(store).stats.ssd_bytes == 0, "which is so"


def test_what_was_read_ahead_is_used_and_counted(bench: Workbench, no_gaps: None) -> None:
    store = bench.open(readahead=0.5)
    bench.put(store, TOKENS)
    source = store.open_part(look_up(store, TOKENS), 0, 40, whole=True)
    store.ahead.add_running(source)
    assert source.next_ahead == source.num_layers
    wait_for_reads(source)

    for layer in range(source.num_layers):
        stores.rows(bench.shape, source, layer)
    store.close_source(source)

    whole = disk_bytes(bench, *kv.columns_of(bench.shape))
    stats = store.stats
    assert stats.bytes_read == stats.bytes_read_ahead == stats.bytes_read_ahead_used == whole


def test_a_prefix_of_which_no_layer_fits_into_the_buffer_cannot_be_read(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.open(buffer_gb=0.0011)
    bench.put(store, TOKENS)
    spans = look_up(store, TOKENS).slice(0, 40)
    assert store.readers.can_read(spans, in_codes=False)
    bench.close(store)
    store = bench.open(buffer_gb=0.0001)
    for _ in range(3):
        assert not store.readers.can_read(spans, in_codes=False)
    assert caplog.text.count("raise --impress-buffer-gb") == 1
