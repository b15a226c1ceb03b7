"""What a store knows before it reads, what it reads to measure, and reads that nobody waits for."""

from __future__ import annotations

import time

import pytest

from bench.core.emulation import SlowFileSystem
from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from tests.unit import kv_factory as kv
from tests.unit import store_factory as stores
from tests.unit.reading import read_rows, wait_for_reads
from tests.unit.store_factory import Workbench, look_up, prompt

bench = stores.bench_of_each_shape

TOKENS = prompt(1, 40)
CHUNK_TOKENS = 8


def disk_bytes(bench: Workbench, *columns: int, num_tokens: int = len(TOKENS)) -> int:
    """Bytes of columns of all layers of a segment."""
    shape = bench.shape
    sizes = [
        kv.chunk_disk_bytes(shape, column, CHUNK_TOKENS, num_tokens, chunk)
        for column in columns
        for chunk in range(-(-num_tokens // CHUNK_TOKENS))
    ]
    return shape.num_layers * sum(sizes)


def bytes_of(store: PartStore, *, start: int = 0, retention: float = 1.0) -> float:
    spans = look_up(store, TOKENS).slice(start, len(TOKENS))
    if retention == 1.0:
        return store.segments.bytes_to_read(spans, codes=False)
    return store.expected_bytes(spans, retention)


def read_layers(store: PartStore, *, probe: bool = True, keys: bool = True) -> PartSource:
    """A request that reads all of the stored prefix, and is done."""
    source = stores.open_source(store, look_up(store, TOKENS))
    for layer in range(source.num_layers):
        if probe and source._shape.probe_kv_heads:
            source.read_probe(layer)
        read_rows(source, layer, None, keys=keys)
    store.close_source(source)
    return source


@pytest.mark.parametrize("cache", ["device_gb", "host_gb"])
def test_what_is_cached_need_not_come_from_the_ssd(bench: Workbench, cache: str) -> None:
    store = bench.open(**{cache: 0.001})
    bench.put(store, TOKENS)
    values = [column for column in kv.kv_of(bench.shape) if kv.holds_values(bench.shape, column)]
    keys = [column for column in kv.kv_of(bench.shape) if column not in values]

    read_layers(store, probe=False, keys=False)
    assert bytes_of(store) == disk_bytes(bench, kv.PROBE, *keys)

    read_layers(store)
    assert bytes_of(store) == bytes_of(store, retention=0.1) == 0
    assert read_layers(store).stats.ssd_bytes == 0, "which is so"


def slow_store(bench: Workbench) -> PartStore:
    """Reads take some tenths of a second, and begin without delay."""
    store = bench.open(files=SlowFileSystem(1.0), readahead=0.5)
    bench.put(store, prompt(1, 200))
    return store


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_is_closed_cleanly_while_a_source_is_read_ahead(
    bench: Workbench, waits: bool
) -> None:
    """A server that ends closes its sources first, whatever they are doing."""
    store = slow_store(bench)
    match = look_up(store, prompt(1, 200))
    source = store.open_part(match, 0, 200, whole=True)
    if waits:
        store.ahead.wait(source)
    else:
        store.ahead.join(source)
    assert source.is_reading and source.next_ahead == source.num_layers
    began = time.monotonic()

    store.close_source(source)
    bench.close(store)
    assert not source.is_reading

    whole = disk_bytes(bench, *kv.columns_of(bench.shape), num_tokens=200)
    assert time.monotonic() - began < whole / 1e6, "what is not begun is not read"
    assert store.stats.bytes_read_ahead < whole


def test_what_was_read_ahead_is_used_and_counted(bench: Workbench, no_gaps: None) -> None:
    store = bench.open(readahead=0.5)
    bench.put(store, TOKENS)
    source = store.open_part(look_up(store, TOKENS), 0, 40, whole=True)
    store.ahead.join(source)
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
    assert store.segments.can_read(spans, in_codes=False)
    bench.close(store)
    store = bench.open(buffer_gb=0.0001)
    for _ in range(3):
        assert not store.segments.can_read(spans, in_codes=False)
    assert caplog.text.count("raise --impress-buffer-gb") == 1
