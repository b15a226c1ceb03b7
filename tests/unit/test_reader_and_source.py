"""Where a prefix's KVs come from: one contract for every source, then costs, caches and damage.

Files are read with O_DIRECT where the file system has it, and through the page cache as well.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage import reader as reader_module
from impress_sglang.storage.direct_io import supports_direct_io
from impress_sglang.storage.layout import KVShape, Stream
from impress_sglang.storage.read_cost import ReadCost
from impress_sglang.storage.reader import ChunkReader
from impress_sglang.storage.segment import MappingLists
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.rules import ImportanceScore, LeastFrequentlyUsed, LeastRecentlyUsed
from impress_sglang.transfer.plan import SourceSpan
from impress_sglang.transfer.source import (
    MemorySource,
    PrefixSource,
    ReadStats,
    SegmentSource,
    Staging,
)
from tests.unit.kv_factory import (
    KEYS,
    PROBE,
    VALUES,
    chunk_disk_bytes,
    flip_byte,
    kv_of,
    lane_of,
    lanes_of,
    make_cache,
    make_info,
    make_shape,
    open_span,
    random_kvs,
    random_mapping,
    row_size,
    rows_in,
    rows_of,
    sketch_of,
    streams_of,
    tokens_in_row,
    write_kvs,
)

BLOCK = 4096
# Tiny heads leave most of a chunk's stride to padding; the large ones fill it exactly, or have
# several blocks to a chunk whose ends cut through rows, or several blocks to a row.
SHAPES = {
    "gqa-float32": make_shape(query_heads=8, kv_heads=4, key_dim=16, value_dim=8, probe=(1, 2)),
    "mha-bfloat16": make_shape(
        query_heads=6, kv_heads=6, key_dim=16, value_dim=16, dtype=torch.bfloat16, probe=(0, 1, 2)
    ),
    "tiny-float16": make_shape(
        query_heads=4, kv_heads=2, key_dim=1, value_dim=3, dtype=torch.float16, probe=(1,)
    ),
    "full-stride-bfloat16": make_shape(
        query_heads=8, kv_heads=2, key_dim=256, value_dim=256, dtype=torch.bfloat16, probe=(0,)
    ),
    "cut-rows-float32": make_shape(
        query_heads=3, kv_heads=3, key_dim=128, value_dim=160, probe=(1,)
    ),
    "long-rows-float32": make_shape(query_heads=2, key_dim=500, value_dim=1500),
    "mqa-no-other-keys": make_shape(query_heads=4, kv_heads=1, key_dim=32, probe=(0,)),
    "all-probed-float16": make_shape(kv_heads=2, dtype=torch.float16, probe=(0, 1)),
    "sketch-float32": make_shape(key_dim=16, sketch_bits=4),
    "sketch-bfloat16": make_shape(key_dim=16, dtype=torch.bfloat16, sketch_bits=4),
    "sketch-2-cut-rows": make_shape(
        query_heads=3, kv_heads=3, key_dim=128, value_dim=160, sketch_bits=2
    ),
    "sketch-8-long-rows": make_shape(
        query_heads=2, key_dim=1000, value_dim=1500, dtype=torch.float16, sketch_bits=8
    ),
    "sketch-full-stride": make_shape(
        query_heads=8, key_dim=256, value_dim=256, dtype=torch.bfloat16, sketch_bits=4
    ),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of a segment of `num_tokens` tokens."""

    num_tokens: int
    chunk_tokens: int
    start: int
    stop: int


# Starts and stops inside chunks and at their edges, the last, short chunk, a single token, and
# segments of another chunk size.
LAYOUTS = {
    "one-segment": [Part(77, 8, 0, 77)],
    "one-short-segment": [Part(5, 8, 0, 5)],
    "tail-of-a-segment": [Part(77, 8, 13, 77)],
    "middle-of-a-segment": [Part(77, 8, 13, 30)],
    "several-segments": [
        Part(40, 8, 0, 21),
        Part(33, 8, 5, 33),
        Part(64, 16, 17, 18),
        Part(24, 24, 0, 24),
        Part(50, 8, 47, 50),
    ],
}
SEVERAL = LAYOUTS["several-segments"]

RULES = {
    "LRU": LeastRecentlyUsed,
    "LFU": LeastFrequentlyUsed,
    "score": lambda: ImportanceScore(half_life=2.0),
}


@dataclasses.dataclass(frozen=True)
class CacheKind:
    """Room on the device and on the host in chunks of values; what is largest in a page."""

    device: int = 0
    host: int = 0
    rule: str = "LRU"
    page_tokens: int = 24

    def make(self, shape: KVShape) -> ChunkCache:
        return make_cache(
            shape,
            device_chunks=self.device,
            host_chunks=self.host,
            chunk_tokens=self.page_tokens,
            rule=RULES[self.rule](),
        )


NO_CACHE = CacheKind()
# With pages of 8 tokens the chunks of longer segments do not fit, and are never cached.
CACHES = {
    "room on the device": CacheKind(device=500),
    "room on the host": CacheKind(host=500),
    "room on both": CacheKind(device=4, host=500),
    "tiny device": CacheKind(device=2, page_tokens=8),
    "tiny host": CacheKind(host=2, page_tokens=8),
    "tiny": CacheKind(device=1, host=2),
    "tiny LFU": CacheKind(device=2, host=3, rule="LFU", page_tokens=8),
    "tiny score": CacheKind(device=2, host=3, rule="score", page_tokens=8),
}


class Case:
    """A source, the KVs that it must give, and what each read must cost.

    `sketches` [L, m, G, D] are what is left of the keys in the probe stream, if it has sketches.
    """

    def __init__(
        self,
        shape: KVShape,
        parts: Sequence[Part],
        keys: Tensor,
        values: Tensor,
        sketches: Tensor | None = None,
    ) -> None:
        self.shape, self.parts, self.keys, self.values = shape, parts, keys, values
        self.sketches = sketches
        self.streams, self.kv_streams = streams_of(shape), kv_of(shape)
        self.last = self.streams[-1]
        self.num_tokens = keys.shape[1]
        self.source: PrefixSource
        self.staging = Staging()
        self.cache: ChunkCache | None = None
        self.spans: list[SourceSpan] = []
        self.mappings: list[MappingLists | None] = [None] * len(parts)
        self.paths: list[Path] = []

    @property
    def stats(self) -> ReadStats:
        return self.source.stats

    def expected(self, layer: int, stream: Stream, tokens: Tensor | None = None) -> Tensor:
        """Of the probe stream all rows, whatever the tokens."""
        if stream == PROBE and self.sketches is not None:
            return self.sketches[layer]
        everything = torch.arange(self.num_tokens)
        picked = everything if tokens is None or stream == PROBE else tokens
        return rows_of(self.shape, self.keys, self.values, layer, stream, picked)

    def read(
        self, layer: int, streams: Sequence[Stream] | None = None, tokens: Tensor | None = None
    ) -> dict[Stream, Tensor]:
        """All of the probe stream, if it is among the streams, and these tokens of the others."""
        streams = self.streams if streams is None else streams
        found = {PROBE: self.source.read_probe(layer)} if PROBE in streams else {}
        wanted = {stream: tokens for stream in streams if stream != PROBE}
        return found | (self.source.read(layer, wanted) if wanted else {})

    def check(
        self,
        layer: int,
        streams: Sequence[Stream] | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Read as a new request: the rows are the stored bits, and the caches are sound."""
        if self.cache is not None:
            self.cache.placement.advance()
        found = self.read(layer, streams, tokens)
        assert set(found) == set(self.streams if streams is None else streams)
        for stream, rows in found.items():
            self.check_rows(rows, layer, stream, tokens)
        if self.cache is not None:
            self.cache.check_integrity()

    def check_rows(
        self, rows: Tensor, layer: int, stream: Stream, tokens: Tensor | None = None
    ) -> None:
        expected = self.expected(layer, stream, tokens)
        sketched = stream == PROBE and self.shape.sketch_bits
        assert rows.dtype == (torch.float32 if sketched else self.shape.dtype)
        assert rows.device.type == "cpu"
        assert rows.shape == expected.shape
        assert torch.equal(rows, expected), stream

    def check_lanes(self, layer: int, wanted: dict[Stream, Tensor | None]) -> None:
        """Read other tokens of each stream, at once."""
        if self.cache is not None:
            self.cache.placement.advance()
        found = self.source.read(layer, wanted)
        assert list(found) == list(wanted)
        for stream, tokens in wanted.items():
            self.check_rows(found[stream], layer, stream, tokens)
        if self.cache is not None:
            self.cache.check_integrity()

    def rows(self, layer: int, stream: Stream, tokens: Tensor | None) -> list[tuple[int, int]]:
        """(part, row on disk) of each token; of the probe stream all rows, in logical order."""
        picked = range(self.num_tokens)
        if tokens is not None and stream != PROBE:
            picked = tokens.tolist()
        places = [
            (number, token)
            for number, part in enumerate(self.parts)
            for token in range(part.start, part.stop)
        ]
        rows = []
        for number, token in (places[t] for t in picked):
            mapping = self.mappings[number]
            if stream == PROBE:
                rows.append((number, token // tokens_in_row(self.shape, PROBE)))
            elif mapping is None:
                rows.append((number, token))
            else:
                lane = lane_of(self.shape, stream)
                rows.append((number, int(mapping[layer][lane][token])))
        return sorted(set(rows)) if stream == PROBE else rows

    def blocks(
        self, layer: int, stream: Stream, tokens: Tensor | None = None
    ) -> set[tuple[int, int, int]]:
        """(part, chunk, block) that hold a byte of a wanted row."""
        size, found = row_size(self.shape, stream), set()
        for number, row in self.rows(layer, stream, tokens) if size else ():
            chunk, place = divmod(row, self.parts[number].chunk_tokens)
            last = (place * size + size - 1) // BLOCK
            found |= {(number, chunk, block) for block in range(place * size // BLOCK, last + 1)}
        return found

    def chunks(self, layer: int, stream: Stream, tokens: Tensor | None = None) -> list[int]:
        """Bytes on disk of each chunk that holds a wanted row."""
        touched = {(number, chunk) for number, chunk, _ in self.blocks(layer, stream, tokens)}
        return [
            chunk_disk_bytes(
                self.shape,
                stream,
                self.parts[number].chunk_tokens,
                self.parts[number].num_tokens,
                chunk,
            )
            for number, chunk in touched
        ]

    def reopen(self, reader: ChunkReader) -> None:
        """Give the ids of the chunks back, and take them in another order."""
        assert self.cache is not None
        self.close()
        for span in self.spans:
            self.cache.detach(span.base, span.segment.layout)
        self.cache.check_integrity()
        again = [
            open_span(path, self.cache, part.start, part.stop)
            for path, part in zip(reversed(self.paths), reversed(self.parts), strict=True)
        ]
        self.spans = again[::-1]
        self.source = SegmentSource(self.shape, self.spans, reader, self.staging, self.cache)

    def close(self) -> None:
        for span in self.spans:
            span.segment.close()


def open_case(
    directory: Path,
    shape: KVShape,
    parts: Sequence[Part],
    reader: ChunkReader,
    *,
    cache: ChunkCache | None = None,
    reordered: bool = False,
    direct: bool = False,
) -> Case:
    cache = cache or NO_CACHE.make(shape)
    spans, keys, values, sketches, paths, mappings = [], [], [], [], [], []
    for number, part in enumerate(parts):
        info = make_info(
            shape,
            range(part.num_tokens),
            chunk_tokens=part.chunk_tokens,
            segment_id=f"segment{number}",
            generation=int(reordered),
        )
        own_keys, own_values = random_kvs(shape, part.num_tokens, seed=number)
        mappings.append(random_mapping(info, number) if reordered else None)
        paths.append(
            write_kvs(directory, info, own_keys, own_values, direct=direct, mapping=mappings[-1])
        )
        spans.append(open_span(paths[-1], cache, part.start, part.stop, direct=direct))
        keys.append(own_keys[:, part.start : part.stop])
        values.append(own_values[:, part.start : part.stop])
        if shape.sketch_bits:
            whole = torch.stack([sketch_of(own, shape.sketch_bits) for own in own_keys])
            sketches.append(whole[:, part.start : part.stop])
    joined = torch.cat(sketches, 1) if sketches else None
    case = Case(shape, parts, torch.cat(keys, 1), torch.cat(values, 1), joined)
    case.paths, case.spans, case.mappings, case.cache = paths, spans, mappings, cache
    case.source = SegmentSource(shape, spans, reader, case.staging, cache)
    return case


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Nothing here need survive the power, and the tensors are too small for two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reader() -> Iterator[ChunkReader]:
    reader = ChunkReader(3)
    yield reader
    reader.close()


# "layout, options: shape"
UNCACHED = [
    *(f"one-segment: {shape}" for shape in SHAPES),
    *(f"several-segments, reordered: {shape}" for shape in SHAPES),
    "one-short-segment: gqa-float32",
    "tail-of-a-segment: full-stride-bfloat16",
    "middle-of-a-segment: gqa-float32",
    "several-segments: cut-rows-float32",
    "several-segments, O_DIRECT: gqa-float32",
    "several-segments, O_DIRECT, reordered: full-stride-bfloat16",
    "one-short-segment: sketch-bfloat16",
    "tail-of-a-segment: sketch-full-stride",
    "tail-of-a-segment: sketch-float32",
    "middle-of-a-segment: sketch-float32",
    "middle-of-a-segment, reordered: sketch-2-cut-rows",
    "several-segments: sketch-2-cut-rows",
    "several-segments, O_DIRECT, reordered: sketch-bfloat16",
]
CACHED = [
    *(f"several-segments, {cache}: gqa-float32" for cache in CACHES),
    *(f"several-segments, {cache}, reordered: cut-rows-float32" for cache in CACHES),
    "one-segment, tiny: long-rows-float32",
    "several-segments, tiny, reordered: mqa-no-other-keys",
    "several-segments, tiny: tiny-float16",
    "several-segments, tiny, O_DIRECT: full-stride-bfloat16",
    *(f"several-segments, {cache}, reordered: sketch-bfloat16" for cache in CACHES),
    "several-segments, room on both: sketch-2-cut-rows",
    "several-segments, tiny, reordered: sketch-2-cut-rows",
    "middle-of-a-segment, tiny LFU, reordered: sketch-8-long-rows",
    "several-segments, tiny, O_DIRECT: sketch-full-stride",
]


def opened(param: str, directory: Path, reader: ChunkReader) -> Case:
    kind, shape_name = param.split(": ")
    shape, (name, *options) = SHAPES[shape_name], kind.split(", ")
    if name == "memory":
        keys, values = random_kvs(shape, 77, seed=9)
        # A recomputed prefix has all keys: they are better than a sketch of them.
        sketches = keys.float() if shape.sketch_bits else None
        case = Case(shape, LAYOUTS["one-segment"], keys, values, sketches)
        case.source = MemorySource(shape, keys, values)
        return case
    direct = "O_DIRECT" in options
    if direct and not supports_direct_io(directory):
        pytest.skip("this file system has no O_DIRECT")
    cache = next((CACHES[option] for option in options if option in CACHES), NO_CACHE)
    return open_case(
        directory,
        shape,
        LAYOUTS[name],
        reader,
        cache=cache.make(shape),
        reordered="reordered" in options,
        direct=direct,
    )


@pytest.fixture(
    scope="module",
    params=[
        "memory: gqa-float32",
        "memory: mqa-no-other-keys",
        "memory: sketch-float32",
        "memory: sketch-bfloat16",
        *UNCACHED,
        *CACHED,
    ],
)
def case(
    request: pytest.FixtureRequest, reader: ChunkReader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """Each test goes on with the caches that the one before has left."""
    case = opened(request.param, tmp_path_factory.mktemp("segments"), reader)
    yield case
    case.close()


@pytest.fixture(scope="module", params=UNCACHED)
def uncached(
    request: pytest.FixtureRequest, reader: ChunkReader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    case = opened(request.param, tmp_path_factory.mktemp("segments"), reader)
    yield case
    case.close()


@pytest.fixture
def no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is read that is not wanted."""
    monkeypatch.setattr(ReadCost, "gap_bytes", 0)


def random_tokens(case: Case, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(case.num_tokens, generator=generator)[:count].sort().values


def poison(staging: Staging) -> None:
    """Fill the memory that reads land in with NaN of every floating-point type."""
    for stream in range(9):
        staging.view(stream, 1 << 20)[:] = b"\xff" * (1 << 20)


def check_everything(case: Case) -> None:
    for layer in range(case.shape.num_layers):
        case.check(layer)


def test_gives_all_tokens_of_every_stream(case: Case) -> None:
    assert case.source.num_tokens == case.num_tokens
    check_everything(case)
    check_everything(case)


def test_gives_each_stream_alone_and_in_any_order(case: Case) -> None:
    for stream in case.streams:
        case.check(1, [stream])
    case.check(0, [case.last, PROBE], random_tokens(case, 5, 0))
    case.check(0, case.kv_streams[::-1], random_tokens(case, 5, 0))


def test_gives_random_tokens_of_every_stream(case: Case) -> None:
    for seed, share in enumerate((0.1, 0.7, 0.05, 0.3)):
        case.check(seed % 2, tokens=random_tokens(case, max(1, int(share * case.num_tokens)), seed))


def test_gives_other_tokens_of_each_stream_at_once(case: Case) -> None:
    """Each lane has its own selection, and some streams may be wanted whole."""
    for seed in range(4):
        wanted: dict[Stream, Tensor | None] = {}
        for stream in case.kv_streams:
            count = 1 + (5 * seed + 3 * stream) % case.num_tokens
            whole = seed == 3 and stream % 2 == 0
            wanted[stream] = None if whole else random_tokens(case, count, 10 * seed + stream)
        case.check_lanes(seed % 2, wanted)


def test_gives_the_same_tokens_to_the_keys_and_values_of_a_lane(case: Case) -> None:
    """As the loader asks: one tensor for both."""
    own = [random_tokens(case, 1 + 4 * n, n) for n in range(lanes_of(case.shape))]
    own = [tokens[: case.num_tokens] for tokens in own]
    case.check_lanes(0, {s: own[lane_of(case.shape, s)] for s in case.kv_streams})


def test_gives_any_single_token(case: Case) -> None:
    for token in range(0, case.num_tokens, 2 if case.paths else 10):
        stream = case.kv_streams[token // 2 % len(case.kv_streams)]
        case.check(token % 2, [stream], torch.tensor([token]))


def test_gives_unbroken_runs_of_tokens(case: Case) -> None:
    for first in range(0, case.num_tokens, 14):
        for stop in range(first + 1, case.num_tokens + 1, 19):
            case.check(0, [case.last], torch.arange(first, stop))


def test_old_bytes_of_the_staging_memory_do_not_leak(case: Case) -> None:
    for tokens in (None, random_tokens(case, 3, 1), torch.tensor([case.num_tokens - 1])):
        poison(case.staging)
        case.check(1, tokens=tokens)


def test_rows_stay_valid_while_other_streams_are_read(case: Case) -> None:
    """Probing reads keys first; the rest of the layer follows while they are in use."""
    probe = case.source.read_probe(0)
    keys = case.source.read(0, dict.fromkeys(case.shape.key_streams))
    case.check(1, case.shape.value_streams)

    case.check_rows(probe, 0, PROBE)
    for stream, rows in keys.items():
        case.check_rows(rows, 0, stream)


def read_costs(case: Case) -> Iterator[tuple[Stream, Tensor, int]]:
    """Reads of few and many tokens, and the bytes that each took from SSD."""
    for seed, count in enumerate((1, 2, 5, case.num_tokens // 2, case.num_tokens)):
        tokens = random_tokens(case, max(1, count), seed)
        for stream in case.streams:
            before = case.stats.ssd_bytes
            case.check(0, [stream], tokens)
            yield stream, tokens, case.stats.ssd_bytes - before


@pytest.mark.usefixtures("no_gaps")
def test_costs_exactly_the_blocks_that_hold_wanted_rows(uncached: Case) -> None:
    for stream, tokens, cost in read_costs(uncached):
        assert cost == BLOCK * len(uncached.blocks(0, stream, tokens))


@pytest.mark.parametrize("gap", [1, 8192])
def test_costs_no_more_than_the_chunks_that_it_touches(
    uncached: Case, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadCost, "gap_bytes", gap)

    for stream, tokens, cost in read_costs(uncached):
        needed = BLOCK * len(uncached.blocks(0, stream, tokens))
        assert needed <= cost <= sum(uncached.chunks(0, stream, tokens))
        assert gap >= BLOCK or cost == needed


def test_a_large_gap_is_read_through_inside_a_chunk(
    reader: ChunkReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 1,920 bytes: rows 0 and 7 are in blocks 0 and 3 of a chunk of 4."""
    case = open_case(tmp_path, SHAPES["cut-rows-float32"], LAYOUTS["one-segment"], reader)
    for gap, blocks in ((8191, 2), (8192, 4)):
        monkeypatch.setattr(ReadCost, "gap_bytes", gap)
        before = case.stats.ssd_bytes
        case.check(0, [case.last], torch.tensor([8, 15]))
        assert case.stats.ssd_bytes - before == blocks * BLOCK
    case.close()


@pytest.mark.parametrize("gap", [0, 1 << 20])
def test_reads_each_byte_once_when_all_streams_are_read_whole(
    uncached: Case, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadCost, "gap_bytes", gap)
    before = uncached.stats.ssd_bytes

    uncached.check(0)

    cost = uncached.stats.ssd_bytes - before
    needed = sum(len(uncached.blocks(0, stream)) for stream in uncached.streams) * BLOCK
    whole = sum(sum(uncached.chunks(0, stream)) for stream in uncached.streams)
    assert needed <= cost <= whole
    if gap == 0 or (len(uncached.parts) == 1 and uncached.mappings[0] is None):
        assert cost == needed
    if all(part.stop - part.start == part.num_tokens for part in uncached.parts):
        assert cost == whole


def test_accesses_and_needed_bytes_are_counted(uncached: Case, reader: ChunkReader) -> None:
    assert uncached.cache is not None
    tokens = random_tokens(uncached, min(7, uncached.num_tokens), 1)
    uncached.source = SegmentSource(
        uncached.shape, uncached.spans, reader, uncached.staging, uncached.cache
    )

    uncached.check(0, tokens=tokens)

    streams = uncached.streams
    chunks = {stream: len(uncached.chunks(0, stream, tokens)) for stream in streams}
    needed = sum(
        len(uncached.rows(0, stream, tokens)) * row_size(uncached.shape, stream)
        for stream in streams
    )
    assert dataclasses.replace(uncached.stats, ssd_bytes=0) == ReadStats(
        ssd_needed_bytes=needed,
        h2d_bytes=needed,
        ssd_chunks=sum(chunks.values()),
        selected_chunks=sum(chunks.values()) - chunks[PROBE],
    )


@pytest.fixture(
    params=[
        f"{name}, reordered: {shape}"
        for name in CACHES
        if name.startswith("room")
        for shape in ("cut-rows-float32", "sketch-2-cut-rows")
    ]
)
def roomy(request: pytest.FixtureRequest, reader: ChunkReader, tmp_path: Path) -> Iterator[Case]:
    """Nothing cached yet, and room for all."""
    param = f"several-segments, {request.param}"
    case = opened(param, tmp_path, reader)
    yield case
    case.close()


def test_a_second_read_comes_from_the_caches_alone(roomy: Case, reads: list[int]) -> None:
    check_everything(roomy)
    first = dataclasses.replace(roomy.stats)
    chunks = sum(len(roomy.chunks(layer, s)) for layer in (0, 1) for s in roomy.streams)
    assert (first.ssd_chunks, first.host_chunks, first.device_chunks) == (chunks, 0, 0)
    reads.clear()

    check_everything(roomy)

    stats = roomy.stats
    assert reads == []
    assert stats.ssd_bytes == first.ssd_bytes
    assert stats.ssd_needed_bytes == first.ssd_needed_bytes
    assert stats.ssd_chunks == first.ssd_chunks
    assert stats.host_chunks + stats.device_chunks == chunks
    assert roomy.cache is not None
    if not roomy.cache.placement.capacity[Tier.HOST]:
        assert stats.device_chunks == chunks
    if not roomy.cache.placement.capacity[Tier.DEVICE]:
        assert stats.host_chunks == chunks


@pytest.mark.usefixtures("no_gaps")
def test_a_chunk_that_will_be_cached_is_read_whole(roomy: Case) -> None:
    tokens, last = random_tokens(roomy, 4, 1), roomy.last

    roomy.check(0, [last], tokens)

    whole = sum(roomy.chunks(0, last, tokens))
    if not roomy.shape.sketch_bits:
        assert whole > BLOCK * len(roomy.blocks(0, last, tokens)), "else nothing is shown"
    assert roomy.stats.ssd_bytes == whole
    rows = [roomy.rows(0, last, torch.tensor([token]))[0] for token in range(roomy.num_tokens)]
    cached = {(n, row // roomy.parts[n].chunk_tokens) for n, row in roomy.rows(0, last, tokens)}
    alike = [
        t for t, (n, row) in enumerate(rows) if (n, row // roomy.parts[n].chunk_tokens) in cached
    ]
    assert len(alike) > 4
    roomy.check(0, [last], torch.tensor(alike))
    assert roomy.stats.ssd_bytes == whole, "other rows of the same chunks are cached as well"


@pytest.mark.usefixtures("no_gaps")
def test_a_chunk_that_will_not_be_cached_is_read_in_part(
    reader: ChunkReader, tmp_path: Path
) -> None:
    """The device has one chunk, which is used as often as any other."""
    shape = SHAPES["cut-rows-float32"]
    cache = CacheKind(device=1, rule="LFU", page_tokens=8).make(shape)
    case = open_case(tmp_path, shape, LAYOUTS["one-segment"], reader, cache=cache)
    case.check(0, [VALUES], torch.tensor([0]))
    before = case.stats.ssd_bytes

    case.check(0, [VALUES], torch.tensor([8]))

    assert case.stats.ssd_bytes - before == BLOCK
    assert (case.stats.ssd_chunks, case.stats.device_chunks) == (2, 0)
    case.close()


@pytest.mark.parametrize("name", [name for name in CACHES if name.startswith("tiny")])
@pytest.mark.parametrize("shape", ["cut-rows-float32", "sketch-bfloat16"])
def test_tiny_caches_evict_and_serve(
    name: str, shape: str, reader: ChunkReader, tmp_path: Path
) -> None:
    """Guards the contract above: chunks do move, and are found where they went."""
    case = opened(f"several-segments, {name}, reordered: {shape}", tmp_path, reader)
    for seed in range(12):
        tokens = random_tokens(case, 2, seed % 5)
        case.check(0, case.kv_streams, tokens)
        case.check(0, case.kv_streams, tokens)

    assert case.cache is not None
    placement = case.cache.placement
    assert placement.stats.dropped > 0
    for tier, hits in (
        (Tier.HOST, case.stats.host_chunks),
        (Tier.DEVICE, case.stats.device_chunks),
    ):
        assert (hits > 0) == (placement.capacity[tier] > 0)
    case.close()


@settings(max_examples=80)
@given(data=st.data())
def test_rows_are_the_stored_bits_whatever_moves_between_tiers(
    tmp_path_factory: pytest.TempPathFactory, reader: ChunkReader, data: st.DataObject
) -> None:
    """Interleaved reads, requests, damage that comes and goes, and ids given to other chunks."""
    shape = SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))]
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        num_tokens = data.draw(st.integers(1, 60))
        start = data.draw(st.integers(0, num_tokens - 1))
        stop = data.draw(st.integers(start + 1, num_tokens))
        parts.append(Part(num_tokens, 8 * data.draw(st.integers(1, 3)), start, stop))
    cache = make_cache(
        shape,
        device_chunks=data.draw(st.integers(0, 8)),
        host_chunks=data.draw(st.integers(0, 8)),
        chunk_tokens=data.draw(st.sampled_from([8, 16])),
        rule=RULES[data.draw(st.sampled_from(sorted(RULES)))](),
    )
    reordered = data.draw(st.booleans())
    directory = tmp_path_factory.mktemp("any")
    case = open_case(directory, shape, parts, reader, cache=cache, reordered=reordered)
    poison(case.staging)
    damaged: tuple[Path, int] | None = None
    for _ in range(data.draw(st.integers(1, 20))):
        step = data.draw(st.sampled_from(["read"] * 5 + ["request", "damage", "reopen"]))
        if step == "request":
            cache.placement.advance()
        elif step == "reopen":
            case.reopen(reader)
        elif step == "damage" and damaged is None:
            number = data.draw(st.integers(0, len(parts) - 1))
            layout = case.spans[number].segment.layout
            place = data.draw(st.integers(layout.header_bytes, layout.file_bytes - 1))
            damaged = (case.paths[number], place)
            flip_byte(*damaged)
        elif step == "damage" and damaged is not None:
            flip_byte(*damaged)
            damaged = None
        else:
            layer = data.draw(st.integers(0, shape.num_layers - 1))
            streams = st.sets(st.sampled_from(case.kv_streams), min_size=1)
            tokens = st.none() | st.sets(st.integers(0, case.num_tokens - 1), min_size=1)
            wanted = {
                stream: None if chosen is None else torch.tensor(sorted(chosen))
                for stream in sorted(data.draw(streams))
                for chosen in [data.draw(tokens)]
            }
            probes = data.draw(st.booleans())
            try:
                found = {PROBE: case.source.read_probe(layer)} if probes else {}
                found |= case.source.read(layer, wanted)
            except ChunkUnreadable as error:
                assert damaged is not None
                assert error.segment_id == damaged[0].stem
            else:
                for stream, rows in found.items():
                    assert torch.equal(rows, case.expected(layer, stream, wanted.get(stream)))
            cache.check_integrity()
    if damaged is not None:
        flip_byte(*damaged)
    check_everything(case)
    case.close()


@pytest.mark.parametrize("name", ["cut-rows-float32", "sketch-2-cut-rows"])
def test_two_sources_share_the_caches_and_the_staging_memory(
    reader: ChunkReader, tmp_path: Path, name: str
) -> None:
    """Two requests that take turns, on the same segments and on others."""
    shape = SHAPES[name]
    room = 12 if shape.sketch_bits else 3
    cache = CacheKind(device=room, host=room).make(shape)
    cases = []
    for folder, reordered in (("first", False), ("second", True)):
        (tmp_path / folder).mkdir()
        cases.append(
            open_case(tmp_path / folder, shape, SEVERAL, reader, cache=cache, reordered=reordered)
        )
    again = SegmentSource(shape, cases[0].spans, reader, cases[1].staging, cache)
    for seed in range(8):
        for case in cases:
            case.check(seed % 2, case.kv_streams, random_tokens(case, 9, seed // 2))
        cases[0].check(seed % 2, [PROBE])
        tokens = random_tokens(cases[0], 9, seed)
        last = cases[0].last
        (rows,) = again.read(seed % 2, {last: tokens}).values()
        assert torch.equal(rows, cases[0].expected(seed % 2, last, tokens))

    assert again.stats.device_chunks + again.stats.host_chunks > 0
    for case in cases:
        case.close()


@pytest.fixture
def small(reader: ChunkReader, tmp_path: Path) -> Callable[..., Case]:
    """20 tokens in chunks of 8; rows of 32, 32 and 64 bytes, every chunk one block."""

    def make(**room: int) -> Case:
        cache = make_cache(make_shape(), **room)
        return open_case(tmp_path, make_shape(), [Part(20, 8, 0, 20)], reader, cache=cache)

    return make


def probe_and_load(case: Case) -> None:
    """What the loader does where the probe heads agree on tokens 1, 2 and 17."""
    tokens = torch.tensor([1, 2, 17])
    case.check(0, [PROBE])
    case.check(0, [KEYS, VALUES], tokens)
    case.source.note_selection(0, [tokens], torch.ones(2, 20))


# 20 rows of 32 bytes, and 3 of 32 + 64 bytes, in 3 and 2 + 2 chunks.
FIRST_TIME = ReadStats(
    ssd_bytes=7 * BLOCK,
    ssd_needed_bytes=20 * 32 + 3 * 96,
    h2d_bytes=20 * 32 + 3 * 96,
    ssd_chunks=7,
    selected_chunks=4,
    important_bytes=3 * 128,
)


def test_counters_without_caches(small: Callable[..., Case]) -> None:
    case = small()

    probe_and_load(case)

    assert case.stats == FIRST_TIME
    assert (case.stats.chunks_accessed, case.stats.chunks_loaded) == (7, 7)
    assert case.spans[0].history.ssd_bytes == 4 * BLOCK, "what was selected, not what was probed"
    case.close()


def test_counters_with_room_on_the_device(small: Callable[..., Case]) -> None:
    """Pages of 256 bytes: chunks of values take two, but for the last one, others take one."""
    case = small(device_chunks=20)

    probe_and_load(case)
    first = dataclasses.replace(FIRST_TIME, h2d_bytes=FIRST_TIME.h2d_bytes + 8 * 256)
    assert case.stats == first
    probe_and_load(case)

    assert case.stats == dataclasses.replace(
        first,
        device_chunks=7,
        selected_chunks=8,
        important_bytes=2 * 3 * 128,
        important_device_bytes=3 * 128,
    )
    assert (case.stats.chunks_accessed, case.stats.chunks_loaded) == (14, 7)
    assert case.spans[0].history.ssd_bytes == 4 * BLOCK
    case.close()


def test_counters_with_room_on_the_host(small: Callable[..., Case]) -> None:
    case = small(host_chunks=20)

    probe_and_load(case)
    assert case.stats == FIRST_TIME
    probe_and_load(case)

    assert case.stats == dataclasses.replace(
        FIRST_TIME,
        host_chunks=7,
        h2d_bytes=2 * FIRST_TIME.h2d_bytes,
        selected_chunks=8,
        important_bytes=2 * 3 * 128,
    )
    assert (case.stats.chunks_accessed, case.stats.chunks_loaded) == (14, 14)
    case.close()


def test_a_hit_is_a_selected_row_that_was_on_the_device(small: Callable[..., Case]) -> None:
    """Tokens 1 and 2 are in the one chunk that has room there, token 17 is not."""
    case, tokens = small(device_chunks=1), torch.tensor([1, 2, 17])
    case.check(0, [VALUES], torch.tensor([1]))
    case.source.note_selection(0, [torch.tensor([1])], torch.ones(2, 20))
    assert (case.stats.important_bytes, case.stats.important_device_bytes) == (64, 0)

    case.check(0, [VALUES], tokens)
    case.source.note_selection(0, [tokens], torch.ones(2, 20))

    assert (case.stats.important_bytes, case.stats.important_device_bytes) == (4 * 64, 2 * 64)
    case.check(0, [VALUES])
    case.source.note_whole(0)
    assert (case.stats.important_bytes, case.stats.important_device_bytes) == (24 * 64, 10 * 64)
    case.close()


def test_a_selection_is_counted_once(small: Callable[..., Case]) -> None:
    case = small()
    probe_and_load(case)
    before = dataclasses.replace(case.stats)

    case.source.note_whole(0)

    assert case.stats == before
    case.close()


SMALL_SKETCH = make_shape(sketch_bits=4)


@pytest.fixture
def small_sketch(reader: ChunkReader, tmp_path: Path) -> Callable[..., Case]:
    """20 tokens, 8 to a row of sketches of 64 bytes; rows of 32 bytes, every chunk one block."""

    def make(**room: int) -> Case:
        cache = make_cache(SMALL_SKETCH, **room)
        return open_case(tmp_path, SMALL_SKETCH, [Part(20, 8, 0, 20)], reader, cache=cache)

    return make


def sketch_and_load(case: Case) -> None:
    """What the loader does where head 0 takes tokens 1, 2 and 17, and head 1 tokens 3, 4 and 5."""
    own = [torch.tensor([1, 2, 17]), torch.tensor([3, 4, 5])]
    case.check(0, [PROBE])
    case.check_lanes(0, {stream: own[lane_of(case.shape, stream)] for stream in (1, 2, 3, 4)})
    case.source.note_selection(0, own, torch.ones(4, 20))


# 3 rows of sketches in one chunk, and 3 rows of keys and of values of each head in 2 and 1 chunks.
FIRST_SKETCH = ReadStats(
    ssd_bytes=(1 + 2 * (2 + 1)) * BLOCK,
    ssd_needed_bytes=3 * 64 + 3 * 4 * 32,
    h2d_bytes=3 * 64 + 3 * 4 * 32,
    ssd_chunks=7,
    selected_chunks=6,
    important_bytes=3 * 4 * 32,
)


def test_counters_of_sketches_without_caches(small_sketch: Callable[..., Case]) -> None:
    case = small_sketch()

    sketch_and_load(case)

    assert case.stats == FIRST_SKETCH
    assert case.spans[0].history.ssd_bytes == 6 * BLOCK, "what was selected, not the sketches"
    case.close()


def test_counters_of_sketches_with_room_on_the_device(small_sketch: Callable[..., Case]) -> None:
    """Pages of 256 bytes: each chunk takes one; sketches are no KVs, so they are no hits."""
    case = small_sketch(device_chunks=20)

    sketch_and_load(case)
    first = dataclasses.replace(FIRST_SKETCH, h2d_bytes=FIRST_SKETCH.h2d_bytes + 7 * 256)
    assert case.stats == first
    sketch_and_load(case)

    assert case.stats == dataclasses.replace(
        first,
        device_chunks=7,
        selected_chunks=12,
        important_bytes=2 * 3 * 4 * 32,
        important_device_bytes=3 * 4 * 32,
    )
    case.close()


def test_a_hit_of_a_lane_is_one_of_its_own_selection(small_sketch: Callable[..., Case]) -> None:
    """Values of head 1: there is room for two chunks, the first of which is there by then."""
    case = small_sketch(device_chunks=1)
    one, other = torch.tensor([9, 10]), torch.tensor([3, 4, 12])
    case.check(0, [4], torch.tensor([1]))
    case.source.note_selection(0, [torch.empty(0, dtype=torch.int64), torch.tensor([1])], None)
    assert (case.stats.important_bytes, case.stats.important_device_bytes) == (32, 0)

    case.check_lanes(0, {4: other})
    case.source.note_selection(0, [one, other], None)

    assert (case.stats.important_bytes, case.stats.important_device_bytes) == (4 * 32, 2 * 32)
    case.check(0, [4])
    case.source.note_whole(0)
    assert (case.stats.important_bytes, case.stats.important_device_bytes) == (24 * 32, 18 * 32)
    case.close()


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("start", range(20))
def test_a_part_of_a_sketched_segment_may_begin_inside_a_row(
    reader: ChunkReader, tmp_path: Path, start: int, reordered: bool
) -> None:
    """8 tokens share a row of sketches; the request uses a part, and another segment follows."""
    for stop in (start + 1, start + 7, start + 8, start + 9, 45):
        directory = tmp_path / str(stop)
        directory.mkdir()
        parts = [Part(45, 8, start, stop), Part(13, 8, start % 13, 13)]
        case = open_case(directory, SMALL_SKETCH, parts, reader, reordered=reordered)
        for layer in range(2):
            case.check(layer)
            case.check(layer, tokens=random_tokens(case, 1, layer))
        assert case.source.read_probe(0).shape == (case.num_tokens, 2, 8)
        case.close()


def test_stats_add_up_field_by_field() -> None:
    names = [field.name for field in dataclasses.fields(ReadStats)]
    left, right = ReadStats(*range(len(names))), ReadStats(*range(100, 100 + len(names)))

    left.add(right)

    assert [getattr(left, name) for name in names] == [100 + 2 * i for i in range(len(names))]
    found = left.as_dict()
    chunks = {tier: found[f"{tier}_chunks"] for tier in ("device", "host", "ssd")}
    assert found.pop("chunks_accessed") == sum(chunks.values())
    assert found.pop("chunks_loaded") == chunks["host"] + chunks["ssd"]
    assert found == dataclasses.asdict(left)


@pytest.fixture(
    params=[
        "in order: gqa-float32",
        "reordered: gqa-float32",
        "in order: sketch-float32",
        "reordered: sketch-bfloat16",
    ]
)
def several(
    request: pytest.FixtureRequest, reader: ChunkReader, tmp_path: Path, no_gaps: None
) -> Iterator[Case]:
    order, shape = request.param.split(": ")
    case = open_case(tmp_path, SHAPES[shape], SEVERAL, reader, reordered=order == "reordered")
    yield case
    case.close()


def test_each_segment_notes_its_own_tokens(several: Case) -> None:
    """In logical order, whatever the order on disk, and each lane apart."""
    lanes = lanes_of(several.shape)
    selected = [random_tokens(several, 20 - lane, 3 + lane) for lane in range(lanes)]

    several.check(1, [several.last], selected[-1])
    scores = torch.ones(several.shape.num_query_heads, several.num_tokens)
    several.source.note_selection(1, selected, scores)

    noted = []
    for span, part in zip(several.spans, several.parts, strict=True):
        average = span.history.average
        assert average.shape == (2, lanes, part.num_tokens)
        assert not average[0].any(), "another layer"
        assert not average[1, :, : part.start].any() and not average[1, :, part.stop :].any()
        noted.append(average[1, :, part.start : part.stop])
    found = [np.flatnonzero(own).tolist() for own in np.concatenate(noted, 1)]
    assert found == [own.tolist() for own in selected]


def test_a_layer_that_is_used_whole_counts_as_an_access_of_every_token(several: Case) -> None:
    lanes = lanes_of(several.shape)
    several.check(0)
    several.source.note_whole(0)
    scores = torch.ones(several.shape.num_query_heads, several.num_tokens)
    several.source.note_selection(0, [torch.tensor([0])] * lanes, scores)

    first = True
    for span, part in zip(several.spans, several.parts, strict=True):
        inside = [part.start <= token < part.stop for token in range(part.num_tokens)]
        expected = np.where(inside, 0.5, 0.0)
        if first:
            expected[part.start], first = 1.0, False
        for own in span.history.average[0]:
            # Half of 255 steps is none.
            np.testing.assert_allclose(own, expected, rtol=0, atol=0.51 / 255)
        assert not span.history.average[1].any()
        assert span.history.accesses.tolist() == [2 * here for here in inside]


Noted = tuple[int, int, int, int, list[int], list[list[float]] | None]


def listened(case: Case, reader: ChunkReader) -> tuple[SegmentSource, list[Noted]]:
    """A source of tokens 3 and 4 and then 0 to 2 of a segment, and what their histories hear."""
    heard: list[Noted] = []

    class Listener:
        def note(
            self,
            layer: int,
            lane: int,
            start: int,
            count: int,
            selected: np.ndarray,
            scores: Tensor | None,
        ) -> None:
            told = None if scores is None else scores.tolist()
            heard.append((layer, lane, start, count, selected.tolist(), told))

    def part(start: int, stop: int) -> SourceSpan:
        listener: object = Listener()
        return dataclasses.replace(case.spans[0], start=start, stop=stop, history=listener)

    assert case.cache is not None
    spans = [part(3, 5), part(0, 3)]
    return SegmentSource(case.shape, spans, reader, Staging(), case.cache), heard


def test_each_segment_notes_its_own_scores(small: Callable[..., Case], reader: ChunkReader) -> None:
    case = small()
    source, heard = listened(case, reader)
    scores = torch.arange(10.0).view(2, 5)

    source.note_selection(1, [torch.tensor([1, 2, 4])], scores)

    assert heard == [
        (1, 0, 3, 2, [1], [[0.0, 1.0], [5.0, 6.0]]),
        (1, 0, 0, 3, [0, 2], [[2.0, 3.0, 4.0], [7.0, 8.0, 9.0]]),
    ]
    case.close()


def test_each_lane_notes_the_scores_of_its_query_heads(
    small_sketch: Callable[..., Case], reader: ChunkReader
) -> None:
    """4 query heads, 2 KV heads: the scores of two for each lane."""
    case = small_sketch()
    source, heard = listened(case, reader)
    scores = torch.arange(20.0).view(4, 5)

    source.note_selection(0, [torch.tensor([1, 2, 4]), torch.tensor([0])], scores)
    source.note_selection(1, [torch.tensor([0]), torch.tensor([4])], None)

    assert heard == [
        (0, 0, 3, 2, [1], [[0.0, 1.0], [5.0, 6.0]]),
        (0, 0, 0, 3, [0, 2], [[2.0, 3.0, 4.0], [7.0, 8.0, 9.0]]),
        (0, 1, 3, 2, [0], [[10.0, 11.0], [15.0, 16.0]]),
        (0, 1, 0, 3, [], [[12.0, 13.0, 14.0], [17.0, 18.0, 19.0]]),
        (1, 0, 3, 2, [0], None),
        (1, 0, 0, 3, [], None),
        (1, 1, 3, 2, [], None),
        (1, 1, 0, 3, [2], None),
    ]
    case.close()


@pytest.mark.parametrize("target", [4096, 3 * 4096, 10 * 4096])
def test_size_of_single_reads_changes_nothing(
    several: Case, monkeypatch: pytest.MonkeyPatch, target: int
) -> None:
    """Runs are cut into many reads in parallel: same rows, same bytes."""
    monkeypatch.setattr(reader_module, "TARGET_READ_BYTES", target)
    poison(several.staging)

    check_everything(several)
    for stream, tokens, cost in read_costs(several):
        assert cost == BLOCK * len(several.blocks(0, stream, tokens))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every single read from now on."""
    sizes: list[int] = []
    preadv = os.preadv

    def count(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(len(views[0]))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr("os.preadv", count)
    return sizes


@pytest.mark.parametrize("target", [4096, 8192])
def test_single_reads_are_no_larger_than_told(
    several: Case, reads: list[int], monkeypatch: pytest.MonkeyPatch, target: int
) -> None:
    monkeypatch.setattr(reader_module, "TARGET_READ_BYTES", target)

    several.source.read(0, {several.last: None})

    assert max(reads) == target
    assert sum(reads) == several.stats.ssd_bytes


@pytest.mark.parametrize("name", ["gqa-float32", "sketch-float32"])
def test_neighbouring_chunks_are_one_read(
    reader: ChunkReader, tmp_path: Path, reads: list[int], name: str
) -> None:
    case = open_case(tmp_path, SHAPES[name], SEVERAL, reader)

    case.source.read(0, {case.last: None})

    assert len(reads) == len(case.parts), "one unbroken run in each segment"
    assert sum(reads) == case.stats.ssd_bytes
    case.close()


def test_the_reader_learns_from_its_reads(tmp_path: Path) -> None:
    own = ChunkReader(2)
    before = own.cost.seconds_per_piece, own.cost.bytes_per_second
    case = open_case(tmp_path, SHAPES["gqa-float32"], SEVERAL, own)

    check_everything(case)

    assert (own.cost.seconds_per_piece, own.cost.bytes_per_second) != before
    case.close()
    own.close()


def test_source_names_its_segments_in_order(several: Case) -> None:
    assert isinstance(several.source, SegmentSource)
    assert several.source.segment_ids == [f"segment{n}" for n in range(5)]


def all_chunks(shape: KVShape, part: Part, path: Path) -> Iterator[tuple[int, Stream, int, int]]:
    """(layer, stream, chunk, offset) of every chunk, found from sizes alone."""
    sizes = {
        (stream, chunk): chunk_disk_bytes(shape, stream, part.chunk_tokens, part.num_tokens, chunk)
        for stream in streams_of(shape)
        for chunk in range(-(-rows_in(shape, stream, part.num_tokens) // part.chunk_tokens))
    }
    offset = path.stat().st_size - shape.num_layers * sum(sizes.values())
    for layer in range(shape.num_layers):
        for (stream, chunk), size in sizes.items():
            if size:
                yield layer, stream, chunk, offset
            offset += size


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_byte_in_any_chunk_is_found_and_only_there(several: Case, place: str) -> None:
    """The first or the last byte of each chunk of a segment, one after the other."""
    part, path, found = several.parts[1], several.paths[1], 0
    for layer, stream, chunk, offset in list(all_chunks(several.shape, part, path)):
        total = rows_in(several.shape, stream, part.num_tokens)
        length = min(part.chunk_tokens, total - chunk * part.chunk_tokens)
        length *= row_size(several.shape, stream)
        bad = offset if place == "first" else offset + length - 1
        rows = several.rows(layer, stream, None)
        # Each chunk is one block here.
        inside = [t for t, (n, row) in enumerate(rows) if n == 1 and row // 8 == chunk]
        outside = torch.tensor([t for t in range(several.num_tokens) if t not in inside])

        flip_byte(path, bad)
        if not inside:
            several.check(layer)
            flip_byte(path, bad)
            continue
        found += 1

        for tokens in (None, torch.tensor(inside[:1])):
            with pytest.raises(ChunkUnreadable) as caught:
                several.read(layer, [stream], tokens)
            assert caught.value.segment_id == "segment1"
            assert f"block at {offset} " in str(caught.value)
        for other in several.streams:
            if other != stream or other != PROBE:
                several.check(layer, [other], outside if other == stream else None)
        several.check(1 - layer)
        flip_byte(path, bad)
    assert found > 20, "nearly every chunk of the segment has tokens of the request"
    check_everything(several)


@pytest.fixture(
    params=[
        "in order: cut-rows-float32",
        "reordered: cut-rows-float32",
        "reordered: sketch-2-cut-rows",
    ]
)
def blocks_of_rows(
    request: pytest.FixtureRequest, reader: ChunkReader, tmp_path: Path, no_gaps: None
) -> Iterator[Case]:
    """Chunks of several blocks, whose ends cut through rows."""
    order, shape = request.param.split(": ")
    parts = [Part(16, 8, 0, 16), Part(30, 8, 3, 30)]
    case = open_case(tmp_path, SHAPES[shape], parts, reader, reordered=order == "reordered")
    yield case
    case.close()


def test_a_flipped_byte_hurts_the_rows_of_its_block_alone(blocks_of_rows: Case) -> None:
    case = blocks_of_rows
    places = [p for p in all_chunks(case.shape, case.parts[1], case.paths[1]) if p[0] == 1]
    for layer, stream, chunk, offset in places:
        if stream == PROBE:
            continue  # it is always read whole
        for block in range(row_size(case.shape, stream) * 8 // BLOCK):
            bad = (1, chunk, block)
            touching = [
                token
                for token in range(case.num_tokens)
                if bad in case.blocks(layer, stream, torch.tensor([token]))
            ]
            others = torch.tensor([t for t in range(case.num_tokens) if t not in touching])
            flip_byte(case.paths[1], offset + block * BLOCK + 1000)

            case.check(layer, [stream], others)
            for token in touching:
                with pytest.raises(ChunkUnreadable, match=f"block at {offset + block * BLOCK} "):
                    case.source.read(layer, {stream: torch.tensor([token])})

            flip_byte(case.paths[1], offset + block * BLOCK + 1000)
    check_everything(case)


def test_nothing_is_cached_of_an_access_that_failed(roomy: Case) -> None:
    """Not even its good chunks, and not the good blocks of the bad one."""
    assert roomy.cache is not None
    placement = roomy.cache.placement
    path = roomy.paths[1]
    offset = next(
        offset
        for layer, stream, _, offset in all_chunks(roomy.shape, roomy.parts[1], path)
        if layer == 0 and stream == roomy.last
    )
    roomy.check(1)
    before = {tier: placement.cached_chunks(tier) for tier in (Tier.HOST, Tier.DEVICE)}
    assert sum(before.values()) > 0

    flip_byte(path, offset)
    for _ in range(2):
        with pytest.raises(ChunkUnreadable):
            roomy.source.read(0, dict.fromkeys(roomy.kv_streams))
        roomy.cache.check_integrity()
        # What made room for the access went with it.
        assert placement.cached_chunks(Tier.HOST) <= before[Tier.HOST]
        assert placement.cached_chunks(Tier.DEVICE) <= before[Tier.DEVICE]
    flip_byte(path, offset)

    stats = dataclasses.replace(roomy.stats)
    roomy.check(0)
    assert roomy.stats.ssd_chunks - stats.ssd_chunks == sum(
        len(roomy.chunks(0, stream)) for stream in roomy.streams
    )
    check_everything(roomy)


def test_a_cached_chunk_is_read_while_its_file_is_damaged(roomy: Case) -> None:
    check_everything(roomy)
    for number, path in enumerate(roomy.paths):
        for _, _, _, offset in all_chunks(roomy.shape, roomy.parts[number], path):
            flip_byte(path, offset)

    check_everything(roomy)


@pytest.mark.parametrize("name", [name for name in CACHES if name.startswith("tiny")])
@pytest.mark.parametrize("shape", ["cut-rows-float32", "sketch-2-cut-rows"])
def test_caches_stay_right_after_failures_in_between(
    name: str, shape: str, reader: ChunkReader, tmp_path: Path
) -> None:
    """What an access would have moved is dropped, and its pages hold other chunks later."""
    case = opened(f"several-segments, {name}, reordered: {shape}", tmp_path, reader)
    assert case.cache is not None
    failures = 0
    for seed in range(16):
        number = seed % 2
        places = list(all_chunks(case.shape, case.parts[number], case.paths[number]))
        damaged = [offset for layer, _, chunk, offset in places if layer == 0 and chunk < 3]
        for offset in damaged:
            flip_byte(case.paths[number], offset)
        case.cache.placement.advance()
        tokens = random_tokens(case, 6, seed // 3)
        try:
            found = case.read(0, None, tokens)
        except ChunkUnreadable:
            failures += 1
        else:
            for stream, rows in found.items():
                assert torch.equal(rows, case.expected(0, stream, tokens))
        case.cache.check_integrity()
        for offset in damaged:
            flip_byte(case.paths[number], offset)
        case.check(0, tokens=random_tokens(case, 3, seed // 2))
    check_everything(case)
    assert failures > 3
    case.close()


def test_damage_in_several_segments_names_one_of_them(several: Case) -> None:
    for number in (1, 3):
        for _, _, _, offset in all_chunks(
            several.shape, several.parts[number], several.paths[number]
        ):
            flip_byte(several.paths[number], offset)

    with pytest.raises(ChunkUnreadable) as caught:
        several.read(0)

    assert caught.value.segment_id in ("segment1", "segment3")


def test_two_blocks_that_changed_places_are_found(several: Case) -> None:
    """Right bytes with a right checksum, but of another place in the same stream."""
    path = several.paths[1]
    places = {
        chunk: offset
        for layer, stream, chunk, offset in all_chunks(several.shape, several.parts[1], path)
        if layer == 0 and stream == several.last
    }
    data = bytearray(path.read_bytes())
    first, second = (slice(places[c], places[c] + 4096) for c in (1, 2))
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)

    with pytest.raises(ChunkUnreadable, match="segment1"):
        several.source.read(0, {several.last: None})


def open_and_read_everything(path: Path, shape: KVShape, direct: bool) -> None:
    reader = ChunkReader(2)
    cache = make_cache(shape)
    try:
        span = open_span(path, cache, direct=direct)
        try:
            source = SegmentSource(shape, [span], reader, Staging(), cache)
            for layer in range(shape.num_layers):
                source.read_probe(layer)
                source.read(layer, dict.fromkeys(kv_of(shape)))
        finally:
            span.segment.close()
    finally:
        reader.close()


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "one byte short": cut(lambda size: size - 1),
    "one block short": cut(lambda size: size - 4096),
    "half": cut(lambda size: size // 2),
    "header only": cut(lambda size: 4096),
    "part of a header": cut(lambda size: 100),
    "empty": cut(lambda size: 0),
    "removed": Path.unlink,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", ["full-stride-bfloat16", "sketch-full-stride"])
def test_a_short_or_missing_file_is_unreadable(
    tmp_path: Path, damage: str, direct: bool, name: str
) -> None:
    if direct and not supports_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    shape = SHAPES[name]
    info = make_info(shape, range(32), segment_id="c0ffee")
    path = write_kvs(tmp_path, info, *random_kvs(shape, 32, seed=1))
    open_and_read_everything(path, shape, direct)

    DAMAGE[damage](path)

    with pytest.raises(ChunkUnreadable) as caught:
        open_and_read_everything(path, shape, direct)
    assert caught.value.segment_id == "c0ffee"


@pytest.mark.parametrize("size", [1, 4096, 4097, 20_000])
def test_a_file_that_shrinks_while_it_is_open_is_unreadable(several: Case, size: int) -> None:
    path = several.paths[3]
    os.truncate(path, path.stat().st_size - size)

    with pytest.raises(ChunkUnreadable) as caught:
        for layer in range(2):
            several.read(layer)

    assert caught.value.segment_id == "segment3"


def test_a_file_that_is_removed_while_it_is_open_can_still_be_read(several: Case) -> None:
    """An eviction must not disturb a request that reads."""
    for path in several.paths:
        path.unlink()

    check_everything(several)


def test_a_failed_read_is_unreadable(several: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)

    with pytest.raises(ChunkUnreadable, match="Input/output error"):
        several.source.read(0, {several.last: None})
    with pytest.raises(ChunkUnreadable, match="Input/output error"):
        several.source.read_probe(0)


def test_source_works_again_after_an_unreadable_chunk(several: Case) -> None:
    offset = next(all_chunks(several.shape, several.parts[0], several.paths[0]))[3]
    flip_byte(several.paths[0], offset)
    with pytest.raises(ChunkUnreadable):
        several.read(0)

    flip_byte(several.paths[0], offset)

    check_everything(several)
