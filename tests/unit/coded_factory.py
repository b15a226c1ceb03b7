"""Sources of coded prefixes on segment files, and what their slots must hold, by definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from impress_sglang.codes.coding import Rows
from impress_sglang.codes.groups.codec import CODE_BITS, GROUP_TOKENS, Codes, code_keys, code_values
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.codecs import plain_codec
from impress_sglang.transfer.filling import fill
from impress_sglang.transfer.sources import OpenSpan, WholeSource
from tests.unit.kv_factory import (
    SequenceKVs,
    cache_of,
    make_info,
    make_shape,
    open_span,
    random_kvs,
    write_kvs,
)

SHAPE = make_shape(
    layers=3, query_heads=6, kv_heads=2, key_dim=64, value_dim=32, probe=(), coded=True, raw=1
)
BLOCK = 4096
# What is in slots that nobody has filled.
EMPTY = -77.0


def restore(codes: Codes) -> Tensor:
    """The values that codes stand for, float32 [t, G, D]: what all restore, by definition."""
    low, step = codes.low.float(), codes.step.float()
    cell = torch.exp2(CODE_BITS - codes.bits.float())
    if codes.bits.ndim:
        groups = torch.arange(len(codes.codes), device=low.device) // GROUP_TOKENS
        low, step, cell = low[groups], step[groups], cell[groups]
    else:
        low, step = low[..., None], step[..., None]
    middle = (codes.codes.float() / cell).floor_().add_(0.5).mul_(cell).sub_(0.5)
    return middle * step + low


def rounded(kvs: SequenceKVs, layer: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of a segment that has the tokens from `start` on, in six bits."""
    exact, num_sinks = kvs.read_from(start)(layer), max(SINK_TOKENS - start, 0)
    rows = restore(code_keys(exact[0], 6)), restore(code_values(exact[1], 6))
    for found, right in zip(rows, exact, strict=True):
        found[:num_sinks] = right[:num_sinks]
    return rows


@dataclasses.dataclass(frozen=True)
class CodedPart:
    """The tokens [start, stop) of a segment."""

    num_tokens: int
    start: int = 0
    stop: int | None = None


def with_sinks(rows: Tensor, exact: Tensor, span: OpenSpan) -> Tensor:
    """Rows of a span, [m, G, D], with the exact ones [t, G, D] of sinks among its tokens."""
    _, tokens, _ = span
    kept = exact[tokens.start : min(tokens.stop, SINK_TOKENS)]
    return torch.cat([kept.float(), rows[len(kept) :]])


def check_pool(pool: Tensor, rows: Tensor, expected: Tensor, *, empty: float = EMPTY) -> None:
    """Rows of a pool hold this, but for a rounding or two, and no others were touched."""
    slack = 2 * torch.finfo(pool.dtype).eps * float(expected.abs().max())
    assert (pool[rows].float() - expected).abs().max() <= slack + 1e-5
    others = torch.ones(len(pool), dtype=torch.bool)
    others[rows] = False
    assert (pool[others] == empty).all()


class Pools:
    """Keys and values [slots, G, D] of each layer, which nobody has filled."""

    def __init__(self, shape: KVShape, num_slots: int) -> None:
        self.keys, self.values = (
            [
                torch.full((num_slots, shape.num_kv_heads, dim), EMPTY, dtype=shape.dtype)
                for _ in range(shape.num_layers)
            ]
            for dim in (shape.key_dim, shape.value_dim)
        )

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer], self.values[layer]

    def rows(self, slots: Tensor) -> list[Tensor]:
        return [pool[slots] for pool in (*self.keys, *self.values)]

    def empty(self, slots: Tensor) -> bool:
        return all(bool((rows == EMPTY).all()) for rows in self.rows(slots))


class CodedCase:
    """A prefix over some segments, and what their KVs are in codes."""

    def __init__(
        self,
        directory: Path,
        parts: Sequence[CodedPart],
        reader: BlockReader,
        *,
        shape: KVShape = SHAPE,
        device_pages: int = 0,
        host_pages: int = 0,
        codes: bool = True,
    ) -> None:
        self.shape = shape
        self._codes = codes
        self.pool = BufferPool(64 << 20)
        self.paths, self.spans = [], []
        self._coded: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.exact = []
        self.cache: ChunkCache | None = None
        for number, part in enumerate(parts):
            info = make_info(shape, range(part.num_tokens), segment_id=f"segment{number}")
            kvs = random_kvs(shape, part.num_tokens, seed=number)
            self.paths.append(write_kvs(directory, info, *kvs))
            if self.cache is None:
                self.cache = cache_of(info.layout(), device_pages * BLOCK, host_pages * BLOCK)
            place = part.start, part.stop
            self.spans.append(open_span(self.paths[-1], self.cache, reader, *place, codes=codes))
            self.exact.append(kvs)
            for layer in range(shape.num_layers):
                coded = (
                    restore(code(whole[layer], int(shape.code_bits)))
                    for code, whole in zip((code_keys, code_values), kvs, strict=True)
                )
                exact = not codes or layer >= shape.first_raw
                found = (whole[layer].float() for whole in kvs) if exact else coded
                self._coded[number, layer] = tuple(found)
        self.num_tokens = sum(len(tokens) for _, tokens, _ in self.spans)
        self.slots = torch.randperm(self.num_tokens + 5)[: self.num_tokens]
        self.pools = Pools(shape, self.num_tokens + 5)
        self.request()

    def request(self) -> None:
        if hasattr(self, "source"):
            self.source.close()
        assert self.cache is not None
        self.cache.placement.advance()
        self.source = self.open(self.spans)

    def open(self, spans: Sequence[OpenSpan]) -> WholeSource:
        """Another source over spans of the case."""
        assert self.cache is not None
        return WholeSource(spans, self.pool, self.cache, codes=self._codes)

    def load(self, layer: int, *, kernels: bool = False) -> None:
        """The request under way loads a layer into its slots."""
        codec, rows = plain_codec(self.shape, kernels=kernels), Rows(*self.pools(layer), self.slots)
        fill(layer, self.source, self.source.read(layer), rows, codec)

    def expected(self, layer: int, spans: Sequence[OpenSpan]) -> list[Tensor]:
        """Keys and values [m, G, D] of the tokens of some spans."""
        found: list[list[Tensor]] = [[], []]
        for span in spans:
            segment, tokens, _ = span
            number = int(segment.segment_id.removeprefix("segment"))
            coded, exact = self._coded[number, layer], self.exact[number]
            for rows, restored, whole in zip(found, coded, exact, strict=True):
                rows.append(with_sinks(restored[tokens.start : tokens.stop], whole[layer], span))
        return [torch.cat(rows) for rows in found]

    def check(self, layer: int) -> None:
        """The slots hold what codes say, and no others were touched."""
        expected = self.expected(layer, self.spans)
        for pool, rows in zip(self.pools(layer), expected, strict=True):
            check_pool(pool, self.slots, rows)

    def close(self) -> None:
        self.source.close()
        for segment, _, _ in self.spans:
            segment.close()
