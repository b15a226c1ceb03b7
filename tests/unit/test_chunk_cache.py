"""The chunk caches: the bytes of a chunk are the same wherever it was moved; and their pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from impress_sglang.errors import ConfigError
from impress_sglang.storage.layout import KVShape, SegmentLayout
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Access, Tier
from tests.unit.kv_factory import make_shape, row_size
from tests.unit.test_placement import GivenPriorities

CPU = torch.device("cpu")
CHUNK = 8
PAGE_BYTES = 64
# Chunks of 3 pages (probe keys) and of 6 (other keys, values).
SHAPE = make_shape(
    layers=2, kv_heads=3, query_heads=3, key_dim=12, value_dim=8, dtype=torch.bfloat16
)
# Keys of 3 pages and values of 2, of each head.
HEAD_GROUPS = dataclasses.replace(SHAPE, probe_kv_heads=())


def make_cache(device_pages: int, host_pages: int, shape: KVShape = SHAPE) -> ChunkCache:
    return ChunkCache(
        PAGE_BYTES,
        6,
        GivenPriorities(),
        device=CPU,
        device_bytes=device_pages * PAGE_BYTES,
        host_bytes=host_pages * PAGE_BYTES,
    )


def attach(cache: ChunkCache, layout: SegmentLayout) -> int:
    """Ids for the chunks of a segment, as if they stood on disk without padding."""
    pages = [
        -(-rows_of(layout, chunk) * row_size(layout.shape, column) // PAGE_BYTES)
        for _ in range(layout.shape.num_layers)
        for column in layout.shape.columns
        for chunk in range(layout.num_chunks)
    ]
    return cache.placement.attach(np.array(pages, np.uint16))


def rows_of(layout: SegmentLayout, chunk: int) -> int:
    return min(layout.chunk_tokens, layout.num_tokens - chunk * layout.chunk_tokens)


class Bench:
    """A cache, and the bytes of every chunk of the segments that are attached."""

    def __init__(self, cache: ChunkCache, shape: KVShape = SHAPE) -> None:
        self.cache = cache
        self.shape = shape
        self.segments: dict[int, SegmentLayout] = {}
        self.bytes: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(7)

    def attach(self, num_tokens: int, chunk_tokens: int = CHUNK) -> int:
        layout = SegmentLayout(self.shape, chunk_tokens, num_tokens, 4096)
        base = attach(self.cache, layout)
        self.segments[base] = layout
        for layer in range(self.shape.num_layers):
            for column in self.shape.columns:
                # The probe column of a shape without probe heads has nothing.
                chunks = layout.num_chunks if self.shape.heads(column) else 0
                for number in range(chunks):
                    chunk = base + layout.chunk_index(layer, column, number)
                    assert chunk not in self.bytes
                    size = rows_of(layout, number) * row_size(self.shape, column)
                    self.bytes[chunk] = self.random(size)
        return base

    def detach(self, base: int) -> None:
        layout = self.segments.pop(base)
        self.cache.placement.detach(base, layout.total_chunks)
        for chunk in range(base, base + layout.total_chunks):
            self.bytes.pop(chunk, None)

    def random(self, size: int) -> Tensor:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)

    def begin(self, worths: dict[int, float]) -> Access:
        """Access, and compare what is cached before anything moves."""
        ids = list(worths)
        before = [int(self.cache.placement.tiers(chunk, 1)[0]) for chunk in ids]
        access = self.cache.access(np.array(ids, np.int64), np.array(list(worths.values())))
        assert access.tiers.tolist() == before
        for number, chunk in enumerate(ids):
            if access.tiers[number] != Tier.SSD:
                place = Tier(access.tiers[number]), access.pages[number]
                found = self.whole(chunk, *place)
                assert torch.equal(found, self.bytes[chunk]), f"chunk {chunk} has other bytes"
        return access

    def whole(self, chunk: int, tier: Tier, pages: np.ndarray) -> Tensor:
        """The bytes of a cached chunk."""
        own = pages[: -(-len(self.bytes[chunk]) // PAGE_BYTES)]
        found = self.cache.slabs[tier].pages[torch.from_numpy(own)]
        return found.view(-1)[: len(self.bytes[chunk])]

    def access(self, worths: dict[int, float], *, padding: int = 500) -> Access:
        access = self.begin(worths)
        kept = np.array(list(worths), np.int64)[access.kept]
        # As they come from disk: behind the rows are the rest of a block and old bytes.
        read = [self.with_rest(self.bytes[chunk], padding) for chunk in kept.tolist()]
        self.cache.settle(access, kept, np.array([own.data_ptr() for own in read], np.int64))
        self.cache.placement.check_integrity()
        return access

    def with_rest(self, chunk: Tensor, padding: int) -> Tensor:
        """A chunk in memory that goes on for a page behind it."""
        return torch.cat([chunk, self.random(padding + PAGE_BYTES)])

    def check_all(self) -> int:
        """Compare all that is cached; returns how many chunks that are."""
        access = self.begin(dict.fromkeys(self.bytes, 1.0))
        self.cache.abandon(access)
        return int((access.tiers != Tier.SSD).sum())


class CacheMachine(RuleBasedStateMachine):
    shape = SHAPE

    @initialize(device=st.integers(0, 30), host=st.integers(0, 30))
    def start(self, device: int, host: int) -> None:
        self.bench = Bench(make_cache(device, host, self.shape), self.shape)
        self.bench.attach(19)

    @precondition(lambda self: len(self.bench.segments) < 4)
    @rule(num_tokens=st.integers(1, 25), chunk_tokens=st.sampled_from([CHUNK, CHUNK, 4, 16]))
    def attach(self, num_tokens: int, chunk_tokens: int) -> None:
        self.bench.attach(num_tokens, chunk_tokens)

    @precondition(lambda self: self.bench.segments)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        self.bench.detach(data.draw(st.sampled_from(sorted(self.bench.segments))))

    def draw_worths(self, data: st.DataObject) -> dict[int, float]:
        chunks = st.sampled_from(sorted(self.bench.bytes))
        return data.draw(st.dictionaries(chunks, st.floats(0.01, 1.0), min_size=1, max_size=9))

    @precondition(lambda self: self.bench.segments)
    @rule(data=st.data(), padding=st.sampled_from([0, 1000]))
    def access(self, data: st.DataObject, padding: int) -> None:
        self.bench.access(self.draw_worths(data), padding=padding)

    @precondition(lambda self: self.bench.segments)
    @rule(data=st.data())
    def access_and_fail_to_read(self, data: st.DataObject) -> None:
        worths = self.draw_worths(data)
        access = self.bench.begin(worths)
        self.bench.cache.abandon(access)

        moved = set(access.moves.chunks.tolist())
        again = self.bench.begin(worths)
        for number, chunk in enumerate(worths):
            assert chunk not in moved or again.tiers[number] == Tier.SSD
        self.bench.cache.abandon(again)

    @precondition(lambda self: self.bench.segments)
    @rule()
    def access_everything(self) -> None:
        self.bench.access(dict.fromkeys(self.bench.bytes, 0.5))

    @invariant()
    def integrity(self) -> None:
        self.bench.cache.placement.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check_all()


class HeadGroupsCacheMachine(CacheMachine):
    shape = HEAD_GROUPS


TestCache = CacheMachine.TestCase
TestHeadGroupsCache = HeadGroupsCacheMachine.TestCase


@pytest.fixture
def bench() -> Bench:
    """Room for one chunk of 6 pages on the device, and for one on the host."""
    bench = Bench(make_cache(6, 6))
    bench.attach(CHUNK)
    return bench


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_cache_that_does_not_fit_is_a_config_error_that_names_size_and_option(tier: str) -> None:
    sizes = {"device_bytes": 0, "host_bytes": 0, f"{tier}_bytes": 1 << 50}
    # Large pages: the table of free ones must not be what does not fit.

    with pytest.raises(ConfigError, match=rf"1125899\.9 GB.*--impress-{tier}-gb"):
        ChunkCache(1 << 38, 1, GivenPriorities(), device=CPU, **sizes)


def test_an_emptied_cache_has_the_pages_and_no_chunks() -> None:
    bench = Bench(make_cache(12, 12))
    base = bench.attach(19)
    worths = {base + chunk: 1.0 for chunk in range(4)}
    bench.access(worths)
    assert bench.check_all()
    old = bench.cache

    bench = Bench(old.emptied(GivenPriorities()))

    bench.cache.placement.check_integrity()
    summary = bench.cache.summary()
    assert bench.cache.placement.capacity == old.placement.capacity
    assert all(summary[tier]["used_bytes"] == 0 for tier in ("device", "host"))
    assert summary["dropped"] == 0
    base = bench.attach(19)
    bench.access({base + chunk: 1.0 for chunk in range(4)})
    bench.access({base + chunk: 1.0 for chunk in range(4)})
    assert bench.check_all()
    old.placement.detach(0, SegmentLayout(SHAPE, CHUNK, 19, 4096).total_chunks)
    assert bench.check_all(), "what is done to the old one does not matter"
