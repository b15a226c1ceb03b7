"""What a request for a stored prefix takes of the scheduler's thread besides its bytes.

A request with the KVs of a large model is found, estimated, opened and planned as in a server:
where pages of the base and units of planes stand, which blocks must be read, what is read ahead,
what enters and leaves the caches. Nothing is read, copied or computed: the drive answers at once
with nothing, and what is copied stays where it is.
Milliseconds of a whole request, best of `--repeat`, on one thread:

    found first     match and estimate of a prefix that nobody has asked for before
    found again     the same for a request that waits
    opened          the source
    layers          all of them

`no cache`: all comes from SSD, every time. `first read`: all comes from SSD, and enters a cache
that has room; what is not there from the start takes its memory of the system. `read again`: the
same after all chunks have left, in memory that is there. `in the cache`: all is found there.
`a cache of 30%`: chunks displace each other.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench.core.options import Option, one_of
from bench.core.report import Result, Table, plain
from impress_sglang.codes.planes.codec import planes_of
from impress_sglang.codes.planes.floors import CodingMeter
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.loops.types import Indices
from impress_sglang.options import BITS
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.pending_read import BlockRuns
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import SegmentInfo
from impress_sglang.store.forecast import ReadForecast
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.store.tree import StoredTree
from impress_sglang.store.versions import SegmentVersions
from impress_sglang.tiers import slab
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.moves import LoadedChunks
from impress_sglang.tiers.placement import Access
from impress_sglang.tiers.rules import ImportanceScore
from impress_sglang.tiers.slab import PageShape
from impress_sglang.transfer import coded
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_slots import CodeWriter, put_codes
from impress_sglang.transfer.coded_span import CodedSpan, most_pages
from impress_sglang.transfer.frames import CODE_PAGE

CPU = torch.device("cpu")
SHAPES = {
    "Llama-3-8B": KVShape(32, 32, 8, 128, 128, torch.bfloat16, (), coded=True),
    "Llama-3-70B": KVShape(80, 64, 8, 128, 128, torch.bfloat16, (), coded=True),
}
# What a cache holds of the prefix.
CACHES = {"no cache": 0.0, "in the cache": 1.01, "a cache of 30%": 0.3}
CHUNK_TOKENS = 64
READAHEAD = 0.2
MOST_BLOCKS = 1 << 18
OPTIONS = (
    Option("prefixes", (32768, 131072), "tokens", quick=(2048,)),
    Option("shapes", tuple(SHAPES), "of models", quick=("Llama-3-8B",), parse=one_of(SHAPES)),
    Option("bits", BITS[0], "per element"),
    Option("repeat", 5, "requests after the first one", quick=1),
)


def run(args: argparse.Namespace) -> Result:
    """Measure all shapes and lengths."""
    torch.set_num_threads(1)
    with _no_copies():
        rows = [
            row
            for name in args.shapes
            for tokens in args.prefixes
            for row in _measure(args, name, SHAPES[name], tokens)
        ]
    return Result({"bits": args.bits, "rows": rows}, [Table(plain(*rows[0]), rows)])


def _measure(
    args: argparse.Namespace, name: str, shape: KVShape, tokens: int
) -> list[dict[str, Any]]:
    rows = []
    for cache, share in CACHES.items():
        # What earlier cases leave is not collected while one is measured.
        gc.collect()
        case = _Case(shape, tokens, share)
        times = [case.request(args.bits) for _ in range(1 + args.repeat)]
        first, again = times[0], _best(times[1:])
        found = {"shape": name, "tokens": tokens, "chunks": case.chunks}
        if share > 1.0:
            rows.append({**found, "state": "first read", **_row(first, again)})
            anew = _best([case.empty().request(args.bits) for _ in range(args.repeat)])
            rows.append({**found, "state": "read again", **_row([first[0], *anew[1:]], again)})
        rows.append({**found, "state": cache, **_row([first[0], *again[1:]], again)})
    return rows


def _best(requests: Sequence[Sequence[float]]) -> list[float]:
    return [min(stage) for stage in zip(*requests, strict=True)]


def _row(times: Sequence[float], again: Sequence[float]) -> dict[str, float]:
    names = ("found first", "found again", "opened", "layers")
    own = dict(zip(names, (times[0], again[0], *times[1:]), strict=True))
    own["whole"] = own["found again"] + own["opened"] + own["layers"]
    return {f"{stage} ms": round(value * 1e3, 2) for stage, value in own.items()}


class _Case:
    """A stored prefix without a file, above it a cache for a share of its codes."""

    def __init__(self, shape: KVShape, tokens: int, share: float) -> None:
        info, layout = _info(shape, tokens), _layout(shape, tokens)
        self._shape, self._file = shape, _NoFile(info)
        self._tokens = np.arange(tokens, dtype=np.int32)
        self._tree = StoredTree()
        self._tree.insert(StoredSegment(info, 0, SegmentState.READY), self._tokens[:0])
        columns = PageShape.of(shape, CHUNK_TOKENS)
        self._memory = StoreMemory(
            _cache(shape, columns, columns.max_chunk_pages(shape), 0.0),
            _cache(shape, CODE_PAGE, most_pages(layout), share * layout.layer_bytes),
            BufferPool(1 << 62),
        )
        self._versions = SegmentVersions(
            shape,
            self._memory.cache,
            self._memory.codes,
            retention=1.0,
            certain=(),
            by_importance=False,
        )
        self._reader = cast("BlockReader", _NoReader())
        self._forecast = ReadForecast(
            shape, self._reader, self._versions, self._memory, CodingMeter(0.0), retention=1.0
        )
        self._writer: CodeWriter = _NoWriter()
        self.chunks = shape.num_layers * (layout.num_pages + layout.total_units)

    def request(self, bits: float) -> tuple[float, float, float]:
        """Seconds to find, open and load a prefix."""
        began = time.perf_counter()
        match = self._tree.match("bench", self._tokens)
        self._forecast.coded_bytes(match.spans).expected(planes_of(bits))
        self._forecast.exact_bytes(match.spans)
        found = time.perf_counter()
        source = self._open(match, planes_of(bits))
        ahead = ReadAhead(self._memory.pool, READAHEAD)
        ahead.join(source)
        opened = time.perf_counter()
        shape = self._shape
        rows = torch.zeros(SINK_TOKENS, shape.num_kv_heads, shape.key_dim, dtype=torch.bfloat16)
        places = torch.arange(len(self._tokens))
        for layer in range(self._shape.num_layers):
            ahead.top_up()
            put_codes(self._writer, source, source.read(layer), rows, rows, places)
        loaded = time.perf_counter()
        ahead.leave(source)
        source.close()
        return found - began, opened - found, loaded - opened

    def empty(self) -> Self:
        """Remove all chunks from the cache."""
        self._memory.codes.placement.drop(np.arange(self.chunks))
        return self

    def _open(self, match: StoredMatch, planes: int) -> CodedSource:
        (stored,), codes = match.spans, self._memory.codes
        codes.placement.advance()
        base = self._versions.codes(self._versions.of(stored.segment))
        span = CodedSpan(self._file, stored.start, stored.stop, base)
        return CodedSource([span], self._reader, self._memory.pool, codes, planes)


def _info(shape: KVShape, tokens: int) -> SegmentInfo:
    return SegmentInfo(
        "segment", "", "bench", "", 0, np.arange(tokens, dtype=np.int32), shape, CHUNK_TOKENS
    )


def _layout(shape: KVShape, tokens: int) -> Any:
    return _info(shape, tokens).layout().codes[0]


def _cache(shape: KVShape, page: PageShape, most: int, layer_bytes: float) -> ChunkCache:
    size, rule = int(layer_bytes * shape.num_layers), ImportanceScore(200.0)
    return _Undisturbed(page, most, rule, device=CPU, device_bytes=size, host_bytes=0)


@contextlib.contextmanager
def _no_copies() -> Iterator[None]:
    """Blocks are not taken from where they are."""
    # As many as the largest layer has, which nobody writes.
    nothing = torch.empty(MOST_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)

    def take(cache: ChunkCache, tiers: Any, frames: Indices, memory: Any) -> Tensor:
        return nothing[: len(frames)]

    # Caches are larger than this machine, and nothing is written to them.
    unwritten = mock.patch.object(slab, "_host_memory", lambda size, pin: AlignedMemory(size))
    with unwritten, mock.patch.object(coded, "take_frames", take):
        yield


class _Undisturbed(ChunkCache):
    """A cache that decides, and whose pages hold nothing."""

    def settle(self, access: Access, loaded: Sequence[LoadedChunks]) -> None:
        """Nothing moves."""


class _NoFile(OpenSegment):
    def __init__(self, info: SegmentInfo) -> None:
        self.info, self.layout = info, info.layout()
        self.floors = np.zeros(info.floors_shape, np.uint8)
        self.sinks = np.zeros(info.sinks_shape, np.uint8)
        self.fits = np.zeros(info.fits_shape, np.float32)

    def check_blocks(self, *arguments: Any) -> None:
        """All is well."""

    def close(self) -> None:
        """There is nothing to close."""


class _NoRead:
    done, error = True, None

    def __init__(self, num_bytes: int, ahead: bool) -> None:
        self.num_bytes, self.ahead = num_bytes, ahead

    def arrived(self) -> None:
        """It has."""


class _NoReader:
    cost = SimpleNamespace(gap_bytes=0)

    def submit(self, runs: BlockRuns, *, ahead: bool) -> _NoRead:
        return _NoRead(int((runs.stops - runs.starts).sum()), ahead)

    def cancel(self, read: _NoRead) -> tuple[Any, Any]:
        return np.empty(0, np.int64), np.empty(0, np.int64)


class _NoWriter:
    def restore_base(self, *arguments: Any) -> None:
        """There are no slots."""

    raise_units = restore_base
