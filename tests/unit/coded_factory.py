"""Sources of coded prefixes on segment files, and what their slots must hold, by definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import (
    GROUP_TOKENS,
    LEVELS,
    NUM_PLANES,
    Codes,
    code_keys,
    code_values,
    restore,
)
from impress_sglang.codes.planes.floors import Floors
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.rules import LeastRecentlyUsed, ReplacementRule
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_slots import CodeWriter, code_writer_for, put_codes
from impress_sglang.transfer.coded_span import CodedSpan, cached_pages, most_pages
from impress_sglang.transfer.frames import CODE_PAGE
from tests.unit.kv_factory import make_info, make_shape, random_kvs, write_kvs
from tests.unit.reading import wait_for_reads

SHAPE = make_shape(
    layers=3, query_heads=6, kv_heads=2, key_dim=64, value_dim=32, probe=(), coded=True
)
BLOCK = 4096
# What is in slots that nobody has filled.
EMPTY = -77.0


@dataclasses.dataclass(frozen=True)
class CodedPart:
    """The tokens [start, stop) of a segment."""

    num_tokens: int
    start: int = 0
    stop: int | None = None


def restored(codes: Codes, planes: Tensor, part: slice = slice(None)) -> Tensor:
    """Rows of a part of the tokens, of which each has so many planes."""
    rows = restore(codes, LEVELS[0])[part]
    for count in range(1, NUM_PLANES + 1):
        rows = torch.where(planes >= count, restore(codes, LEVELS[count])[part], rows)
    return rows


def with_sinks(rows: Tensor, exact: Tensor, span: CodedSpan) -> Tensor:
    """Rows of a span, [m, G, D], with the exact ones [t, G, D] of sinks among its tokens."""
    kept = exact[span.start : min(span.stop, SINK_TOKENS)]
    return torch.cat([kept.float(), rows[len(kept) :]])


def gained_of(codes: Codes, plane: int) -> Tensor:
    """What a plane adds to values that have all below it, float32 [t, G, D]: bit by bit."""
    whole = codes.codes.int()
    if codes.sections is None:
        shift = NUM_PLANES - 1 - plane
        return ((whole >> shift & 1) - 0.5) * 2**shift * codes.step.float()[..., None]
    each = torch.arange(len(whole)) // GROUP_TOKENS
    upper, lower = ((codes.sections >> shift & 15)[each] == 1 + plane for shift in (0, 4))
    gained = ((whole >> 2 & 3) - 1.5) * 4 * upper + ((whole & 3) - 1.5) * lower
    return gained * codes.step.float()[each]


def check_pool(pool: Tensor, rows: Tensor, expected: Tensor, *, empty: float = EMPTY) -> None:
    """Rows of a pool hold this, but for a rounding or two, and no others were touched."""
    slack = 2 * torch.finfo(pool.dtype).eps * float(expected.abs().max())
    assert (pool[rows].float() - expected).abs().max() <= slack + 1e-5
    others = torch.ones(len(pool), dtype=torch.bool)
    others[rows] = False
    assert (pool[others] == empty).all()


def levels_of_units(source: CodedSource, layer: int) -> Tensor:
    """Planes that a source reads of all units, int64 [G, units]."""
    own = [
        torch.from_numpy(span.levels(layer, source.planes))[:, None].expand(-1, len(span.units))
        for span in source.spans
    ]
    return torch.cat(own, 1).long()


class CodedCase:
    """A prefix over some segments, its exact KVs [L, m, G, D], and what they are in codes."""

    def __init__(
        self,
        directory: Path,
        parts: Sequence[CodedPart],
        reader: BlockReader,
        *,
        shape: KVShape = SHAPE,
        device_pages: int = 0,
        host_pages: int = 0,
        rule: ReplacementRule | None = None,
        floors: Floors | None = None,
    ) -> None:
        self.shape = shape
        self.reader = reader
        self.pool = BufferPool(64 << 20)
        self.paths, self.spans = [], []
        keys, values, self._codes = [], [], []
        self.exact = []
        self.cache: ChunkCache | None = None
        for number, part in enumerate(parts):
            stop = part.num_tokens if part.stop is None else part.stop
            info = make_info(shape, range(part.num_tokens), segment_id=f"segment{number}")
            own = random_kvs(shape, part.num_tokens, seed=number)
            self.paths.append(write_kvs(directory, info, *own, floors=floors))
            segment = OpenSegment(self.paths[-1], FileSystem(), direct=False)
            layouts = segment.layout.codes
            if self.cache is None:
                self.cache = ChunkCache(
                    CODE_PAGE,
                    most_pages(layouts[0]),
                    rule or LeastRecentlyUsed(),
                    device=torch.device("cpu"),
                    device_bytes=device_pages * BLOCK,
                    host_bytes=host_pages * BLOCK,
                )
            base = self.cache.attach(cached_pages(layouts))
            self.spans.append(CodedSpan(segment, part.start, stop, base))
            self.exact.append(own)
            keys.append(own[0][:, part.start : stop])
            values.append(own[1][:, part.start : stop])
            for layer in range(shape.num_layers):
                codes = code_keys(own[0][layer]), code_values(own[1][layer])
                self._codes.append((number, layer, codes, slice(part.start, stop)))
        self.keys, self.values = torch.cat(keys, 1), torch.cat(values, 1)
        self.num_tokens = self.keys.shape[1]
        self.slots = torch.randperm(self.num_tokens + 5)[: self.num_tokens]
        self.pools = [
            torch.full((self.num_tokens + 5, shape.num_kv_heads, dim), EMPTY, dtype=shape.dtype)
            for dim in (shape.key_dim, shape.value_dim)
            for _ in range(shape.num_layers)
        ]
        self.request()

    def request(self, planes: int = 0) -> None:
        """A new request, for so many planes."""
        if hasattr(self, "source"):
            self.source.close()
        assert self.cache is not None
        self.cache.placement.advance()
        self.source = self.open(self.spans, planes)

    def open(self, spans: Sequence[CodedSpan], planes: int = 0, **how: Any) -> CodedSource:
        """Another source over spans of the case."""
        assert self.cache is not None
        return CodedSource(spans, self.reader, self.pool, self.cache, planes, **how)

    def load(self, layer: int, writer: CodeWriter | None = None) -> None:
        """The request under way loads a layer into its slots."""
        writer = writer or code_writer_for(torch.device("cpu"))
        pools, found = self.layer_pools(layer), self.source.read(layer)
        put_codes(writer, self.source, found, *pools, self.slots)

    def read_ahead(self, waste_budget: float) -> None:
        """All layers, to the end."""
        while self.source.next_ahead < self.shape.num_layers:
            self.source.read_ahead(waste_budget)
        wait_for_reads(self.source)

    def layer_pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pools of keys and of values of a layer."""
        return self.pools[layer], self.pools[len(self.pools) // 2 + layer]

    def levels(self, layer: int) -> Tensor:
        """Planes of all units, int64 [G, units]."""
        return levels_of_units(self.source, layer)

    def expected(self, layer: int, planes: Tensor) -> list[Tensor]:
        """Keys and values [m, G, D] where units, counted through all spans, have these planes."""
        found: list[list[Tensor]] = [[], []]
        first = 0
        for number, own_layer, codes, part in self._codes:
            if own_layer != layer:
                continue
            span = self.spans[number]
            tokens = torch.arange(part.start, part.stop) // span.layout.unit_tokens
            levels = planes[:, tokens - span.units[0] + first].T[..., None]
            first += len(span.units)
            for rows, own, exact in zip(found, codes, self.exact[number], strict=True):
                rows.append(with_sinks(restored(own, levels, part), exact[layer], span))
        return [torch.cat(rows) for rows in found]

    def check(self, layer: int) -> None:
        """The slots hold what the levels say, and no others were touched."""
        expected = self.expected(layer, self.levels(layer))
        for pool, rows in zip(self.layer_pools(layer), expected, strict=True):
            check_pool(pool, self.slots, rows)

    def close(self) -> None:
        self.source.close()
        for span in self.spans:
            span.segment.close()
