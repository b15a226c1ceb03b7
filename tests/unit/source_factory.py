"""Sources on segment files, the KVs that they must give, and what each read must cost."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.codes.coding import Rows
from impress_sglang.paper.history import TokenHistory
from impress_sglang.paper.source import PartSource
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import Column, KVShape, SegmentLayout
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import OpenSegment
from impress_sglang.tiers import rules
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.rules import ImportanceScore, LeastRecentlyUsed, ReplacementRule
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.codecs import plain_codec
from impress_sglang.transfer.filling import fill
from impress_sglang.transfer.sources import OpenSpan, StoredSource, WholeSource
from impress_sglang.transfer.wanted import max_pages, pages_per_chunk
from tests.unit import codes_factory
from tests.unit import kv_factory as kv
from tests.unit.kv_factory import BLOCK
from tests.unit.reading import Pools, read_rows
from tests.unit.store_checks import check_placement

CUT_ROWS = kv.make_shape(query_heads=3, kv_heads=3, key_dim=128, value_dim=160, probe=(1,))
# Tiny heads leave most of a chunk's stride to padding; the large ones fill it exactly, or have
# several blocks to a chunk whose ends cut through rows, or several blocks to a row.
SHAPES = {
    "gqa-float32": kv.make_shape(query_heads=8, kv_heads=4, key_dim=16, value_dim=8, probe=(1, 2)),
    "mha-bfloat16": kv.make_shape(
        query_heads=6, kv_heads=6, key_dim=16, value_dim=16, dtype=torch.bfloat16, probe=(0, 1, 2)
    ),
    "tiny-float16": kv.make_shape(
        query_heads=4, kv_heads=2, key_dim=1, value_dim=3, dtype=torch.float16, probe=(1,)
    ),
    "full-stride": kv.make_shape(
        query_heads=8, kv_heads=2, key_dim=256, value_dim=256, dtype=torch.bfloat16
    ),
    "cut-rows": CUT_ROWS,
    "long-rows": kv.make_shape(query_heads=2, key_dim=500, value_dim=1500),
    "mqa-no-other-keys": kv.make_shape(query_heads=4, kv_heads=1, key_dim=32),
    "all-probed-float16": kv.make_shape(kv_heads=2, dtype=torch.float16, probe=(0, 1)),
}
# And without a probe column.
SHAPES |= {
    f"no-probe-{name}": dataclasses.replace(SHAPES[name], probe_kv_heads=())
    for name in ("gqa-float32", "mha-bfloat16", "full-stride", "cut-rows", "long-rows")
}
CODED = kv.make_shape(
    layers=3, query_heads=6, kv_heads=2, key_dim=64, value_dim=32, probe=(), coded=True, raw=1
)


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of a segment of `num_tokens` tokens."""

    num_tokens: int
    start: int = 0
    stop: int | None = None
    chunk_tokens: int = 8


# Starts and stops inside chunks and at their edges, the last, short chunk, a single token, and
# segments of another chunk size.
SEVERAL = (
    Part(40, stop=21),
    Part(33, start=5),
    Part(64, 17, 18, chunk_tokens=16),
    Part(24, chunk_tokens=24),
    Part(50, start=47),
)

RULES = {
    "LRU": LeastRecentlyUsed,
    "LFU": rules.LeastFrequentlyUsed,
    "score": lambda: ImportanceScore(half_life=2.0),
}


# What can be asked for: the probe column, and keys and values of all head groups.
KINDS = ("probe", "keys", "values")
KVS = ("keys", "values")


class Case(abc.ABC):
    """Parts of segments, their KVs, and the source of one request after another.

    Each request finds the caches as the one before has left them.
    """

    source: StoredSource

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part],
        reader: BlockReader,
        shape: KVShape,
        *,
        codes: bool = False,
        reordered: bool = False,
        direct: bool = False,
        device_pages: int = 0,
        host_pages: int = 0,
        cached_tokens: int = 8,
        rule: ReplacementRule | None = None,
    ) -> None:
        """Chunks of more than `cached_tokens` are not cached."""
        self.shape, self.parts, self.codes = shape, parts, codes
        self._reader, self._direct = reader, direct
        self.pool, widest = BufferPool(64 << 20), SegmentLayout(shape, cached_tokens, 1, BLOCK)
        self.cache = ChunkCache(
            BLOCK,
            max_pages(widest),
            rule or LeastRecentlyUsed(),
            device=torch.device("cpu"),
            device_bytes=device_pages * BLOCK,
            host_bytes=host_pages * BLOCK,
        )
        # Of whole segments.
        self.kvs, self.mappings, self.paths = [], [], []
        for number, part in enumerate(parts):
            info = kv.make_info(
                shape,
                range(part.num_tokens),
                chunk_tokens=part.chunk_tokens,
                segment_id=f"segment{number}",
                generation=int(reordered),
            )
            kvs = kv.random_kvs(shape, part.num_tokens, seed=number)
            mapping = kv.random_mapping(info, number) if reordered else None
            self.paths.append(kv.write_kvs(folder, info, *kvs, direct=direct, mapping=mapping))
            self.kvs.append(kvs)
            self.mappings.append(mapping)
        self.spans = [self._span(number) for number in range(len(parts))]
        self.num_tokens = sum(len(tokens) for _, tokens, _ in self.spans)
        self.source = self.make_source()

    def _span(self, number: int) -> OpenSpan:
        part = self.parts[number]
        segment = OpenSegment(self.paths[number], FileSystem(), direct=self._direct)
        segment.reader = self._reader
        base = self.cache.placement.attach(pages_per_chunk(segment.layout, codes=self.codes))
        return segment, range(part.num_tokens)[part.start : part.stop], base

    @abc.abstractmethod
    def make_source(self) -> StoredSource:
        """For another request."""

    def request(self) -> None:
        """Another request begins: the source of the one before is closed."""
        self.source.close()
        self.cache.placement.advance()
        self.source = self.make_source()

    def close(self) -> None:
        self.source.close()
        for segment, _, _ in self.spans:
            segment.close()


class PartCase(Case):
    """Of rows in columns, and what reading them must cost."""

    source: PartSource

    def make_source(self, *, whole: bool = False) -> PartSource:
        sizes = self.shape.num_layers, kv.head_groups_of(self.shape)
        self.histories = [
            TokenHistory(*sizes, part.num_tokens, by_importance=True) for part in self.parts
        ]
        return PartSource(self.spans, self.histories, self.pool, self.cache, whole=whole)

    def expected(self, layer: int, kind: str, tokens: Tensor | None = None) -> Tensor:
        """Rows as any source must give them, head by head; of the probe column all rows."""
        shape, side = self.shape, int(kind == "values")
        spans = zip(self.kvs, self.spans, strict=True)
        whole = torch.cat([kvs[side][layer, span.start : span.stop] for kvs, (_, span, _) in spans])
        probe, everyone = list(shape.probe_kv_heads), range(shape.num_kv_heads)
        others = [head for head in everyone if head not in probe]
        heads = {"probe": probe, "keys": others, "values": [*everyone]}[kind]
        if tokens is None or kind == "probe":
            tokens = torch.arange(self.num_tokens)[None]
        return whole[tokens.expand(shape.num_kv_heads, -1)[heads].T, heads]

    def check(
        self, layer: int, kinds: Collection[str] = KINDS, tokens: Tensor | None = None
    ) -> None:
        """Read as a new request: the rows are the stored bits, and the caches are sound."""
        self.request()
        self.check_more(layer, kinds, tokens)

    def check_more(
        self, layer: int, kinds: Collection[str] = KINDS, tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Read in the request that is under way: all of the probe column, if it is among the kinds,
        and these tokens of the others; what it gave."""
        found = {}
        if "probe" in kinds and self.shape.probe_kv_heads:
            found["probe"] = self.source.read_probe(layer)
        wanted = {kind: kind in kinds for kind in KVS}
        if any(wanted.values()):
            rows = read_rows(self.source, layer, tokens, **wanted)
            found |= {kind: kvs for kind, kvs in zip(KVS, rows, strict=True) if kvs is not None}
            assert all(kind in found for kind in KVS if wanted[kind])
        self.check_rows(found, layer, tokens)
        check_placement(self.cache.placement)
        return found

    def check_rows(
        self, found: dict[str, Tensor], layer: int, tokens: Tensor | None = None
    ) -> None:
        for kind, rows in found.items():
            assert rows.dtype == self.shape.dtype
            assert torch.equal(rows, self.expected(layer, kind, tokens)), kind

    def check_everything(self) -> None:
        for layer in range(self.shape.num_layers):
            self.check(layer)

    def _rows(self, layer: int, column: Column, tokens: Tensor | None) -> list[tuple[int, int]]:
        """(part, row on disk) of each wanted token; of the probe column, all are."""
        places = [(number, t) for number, (_, span, _) in enumerate(self.spans) for t in span]
        if column == kv.PROBE:
            return places
        head_group = kv.head_group_of(self.shape, column)
        if tokens is not None:
            places = [places[token] for token in tokens[head_group].tolist()]
        return [
            (number, token if mapping is None else int(mapping[layer, head_group, token]))
            for number, token in places
            for mapping in [self.mappings[number]]
        ]

    def blocks(
        self, layer: int, kinds: Collection[str] = KINDS, tokens: Tensor | None = None
    ) -> int:
        """How many hold a byte of a wanted row."""
        found = set()
        for column in kv.columns_of(self.shape, *kinds):
            size = kv.row_size(self.shape, column)
            for number, row in self._rows(layer, column, tokens) if size else ():
                chunk, place = divmod(row, self.parts[number].chunk_tokens)
                last = (place * size + size - 1) // BLOCK
                blocks = range(place * size // BLOCK, last + 1)
                found |= {(number, column, chunk, block) for block in blocks}
        return len(found)

    def reopen(self) -> None:
        """Give the ids of the chunks back, and take them in another order."""
        self.close()
        for segment, _, base in self.spans:
            self.cache.placement.detach(base, segment.layout.first_chunks[False][-1])
        check_placement(self.cache.placement)
        for number in reversed(range(len(self.parts))):
            self.spans[number] = self._span(number)
        self.source = self.make_source()


def draw_case(
    data: st.DataObject,
    folder: Path,
    reader: BlockReader,
    *,
    pages: Sequence[int] = (0, 1, 3, 10, 40),
) -> PartCase:
    """Any shape, parts of segments, caches and order; few or many rows are expected."""
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        num_tokens = data.draw(st.integers(1, 60))
        start = data.draw(st.integers(0, num_tokens - 1))
        stop = data.draw(st.integers(start + 1, num_tokens))
        parts.append(Part(num_tokens, start, stop, 8 * data.draw(st.integers(1, 3))))
    return PartCase(
        folder,
        parts,
        reader,
        SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))],
        reordered=data.draw(st.booleans()),
        direct=data.draw(st.booleans()) and FileSystem().supports_direct_io(folder),
        device_pages=data.draw(st.sampled_from(pages)),
        host_pages=data.draw(st.sampled_from(pages)),
        cached_tokens=data.draw(st.sampled_from([8, 16, 24])),
        rule=RULES[data.draw(st.sampled_from(sorted(RULES)))](),
    )


def random_tokens(case: PartCase, count: int, seed: int) -> Tensor:
    """[head groups, count], ascending in each head group, other ones in each."""
    generator = torch.Generator().manual_seed(seed)
    head_groups = range(kv.head_groups_of(case.shape))
    picked = [torch.randperm(case.num_tokens, generator=generator)[:count] for _ in head_groups]
    return torch.stack(picked).sort(1).values


class CodedCase(Case):
    """Of codes or whole columns, and slots that they are restored into."""

    source: WholeSource

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part],
        reader: BlockReader,
        shape: KVShape = CODED,
        *,
        codes: bool = True,
        **caches: Any,
    ) -> None:
        super().__init__(folder, parts, reader, shape, codes=codes, **caches)
        layers = range(shape.num_layers)
        self._rows = [[self._restored(layer, kvs) for layer in layers] for kvs in self.kvs]
        self.slots = torch.randperm(self.num_tokens + 5)[: self.num_tokens]
        self.pools = Pools(shape, self.num_tokens + 5)

    def make_source(self) -> WholeSource:
        return self.open(self.spans)

    def open(self, spans: Sequence[OpenSpan]) -> WholeSource:
        return WholeSource(spans, self.pool, self.cache, codes=self.codes)

    def load(self, layer: int, *, kernels: bool = False) -> None:
        """The request under way loads a layer into its slots."""
        codec, rows = plain_codec(self.shape, kernels=kernels), Rows(*self.pools(layer), self.slots)
        fill(layer, self.source, self.source.read(layer), rows, codec)

    def _restored(self, layer: int, kvs: tuple[Tensor, Tensor]) -> list[Tensor]:
        rows = [whole[layer] for whole in kvs]
        in_codes = self.codes and layer < self.shape.first_raw
        rate = int(self.shape.code_bits)
        return codes_factory.in_codes(rows, rate) if in_codes else [exact.float() for exact in rows]

    def expected(self, layer: int, spans: Sequence[OpenSpan]) -> list[Tensor]:
        """Keys and values [m, G, D] of the tokens of some spans."""
        found: list[list[Tensor]] = [[], []]
        for segment, tokens, _ in spans:
            number = int(segment.segment_id.removeprefix("segment"))
            for parts, rows in zip(found, self._rows[number][layer], strict=True):
                parts.append(rows[tokens.start : tokens.stop])
        return [torch.cat(parts) for parts in found]

    def check(self, layer: int) -> None:
        """The slots hold what codes say, and no others were touched."""
        self.pools.check(layer, self.slots, self.expected(layer, self.spans))
