"""Sources on segment files, the KVs that they must give, and what each read must cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.paper.history import TokenHistory
from impress_sglang.paper.source import PartSource
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import Column, KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import MappingLists
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.rules import ImportanceScore, LeastFrequentlyUsed, LeastRecentlyUsed
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.sources import OpenSpan, ReadStats
from tests.unit import kv_factory as kv
from tests.unit.reading import read_rows
from tests.unit.store_checks import check_placement

BLOCK = 4096
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
    "full-stride-bfloat16": kv.make_shape(
        query_heads=8, kv_heads=2, key_dim=256, value_dim=256, dtype=torch.bfloat16, probe=(0,)
    ),
    "cut-rows-float32": CUT_ROWS,
    "long-rows-float32": kv.make_shape(query_heads=2, key_dim=500, value_dim=1500),
    "mqa-no-other-keys": kv.make_shape(query_heads=4, kv_heads=1, key_dim=32, probe=(0,)),
    "all-probed-float16": kv.make_shape(kv_heads=2, dtype=torch.float16, probe=(0, 1)),
    "no-probe-float32": kv.make_shape(key_dim=16, probe=()),
    "no-probe-bfloat16": kv.make_shape(key_dim=16, dtype=torch.bfloat16, probe=()),
    "no-probe-cut-rows": dataclasses.replace(CUT_ROWS, probe_kv_heads=()),
    "no-probe-long-rows": kv.make_shape(
        query_heads=2, key_dim=1000, value_dim=1500, dtype=torch.float16, probe=()
    ),
    "no-probe-full-stride": kv.make_shape(
        query_heads=8, key_dim=256, value_dim=256, dtype=torch.bfloat16, probe=()
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
SEVERAL = (
    Part(40, 8, 0, 21),
    Part(33, 8, 5, 33),
    Part(64, 16, 17, 18),
    Part(24, 24, 0, 24),
    Part(50, 8, 47, 50),
)

RULES = {
    "LRU": LeastRecentlyUsed,
    "LFU": LeastFrequentlyUsed,
    "score": lambda: ImportanceScore(half_life=2.0),
}


# What can be asked for: the probe column, and keys and values of all head groups.
KINDS = ("probe", "keys", "values")
KVS = ("keys", "values")


class Case:
    """A source, the KVs that it must give, and what each read must cost.

    Each check is a request of its own, with a source of its own, on the caches that the one before
    has left.
    """

    def __init__(self, shape: KVShape, parts: Sequence[Part], keys: Tensor, values: Tensor) -> None:
        self.shape, self.parts, self.keys, self.values = shape, parts, keys, values
        self.kv_columns = kv.kv_of(shape)
        self.num_tokens = keys.shape[1]
        self.source: PartSource
        self.histories: list[TokenHistory] = []
        self.reader: BlockReader
        self.pool = BufferPool(16 << 20)
        self.cache: ChunkCache | None = None
        self.spans: list[OpenSpan] = []
        self.mappings: list[MappingLists | None] = [None] * len(parts)
        self.paths: list[Path] = []
        self._finished = ReadStats()

    @property
    def stats(self) -> ReadStats:
        """What all sources so far have read, without times."""
        stats = dataclasses.replace(self._finished)
        stats.add(self.source.stats)
        return dataclasses.replace(stats, wait_ms=0.0)

    def request(self, *, whole: bool = False) -> None:
        """Another request begins: the source of the one before is closed."""
        assert self.cache is not None
        self.finish()
        self.cache.placement.advance()
        self.source = self.make_source(whole=whole)

    def make_source(self, *, whole: bool = False) -> PartSource:
        assert self.cache is not None
        parts = self.spans, self.histories, self.pool, self.cache
        return PartSource(*parts, whole=whole)

    def finish(self) -> None:
        self.source.close()
        self._finished.add(self.source.stats)
        self.source = self.make_source()

    def kind_columns(self, kind: str) -> list[Column]:
        if kind == "probe":
            return [kv.PROBE]
        return [s for s in self.kv_columns if kv.holds_values(self.shape, s) == (kind == "values")]

    def expected(self, layer: int, kind: str, tokens: Tensor | None = None) -> Tensor:
        """Rows as any source must give them, head by head; of the probe column all rows."""
        whole = self.values[layer] if kind == "values" else self.keys[layer]
        everything = torch.arange(self.num_tokens)
        columns = []
        for column in self.kind_columns(kind):
            picked = everything
            if tokens is not None and kind != "probe":
                picked = tokens[kv.head_group_of(self.shape, column)]
            columns += [whole[picked, head] for head in kv.heads_of(self.shape, column)]
        if not columns:
            count = self.num_tokens if tokens is None else tokens.shape[1]
            return whole.new_empty(count, 0, whole.shape[2])
        return torch.stack(columns, 1)

    def read(
        self, layer: int, kinds: Collection[str] = KINDS, tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        """All of the probe column, if it is among the kinds, and these tokens of the others."""
        found = {}
        if "probe" in self._there(kinds):
            found["probe"] = self.source.read_probe(layer)
        keys, values = "keys" in kinds, "values" in kinds
        if keys or values:
            rows = read_rows(self.source, layer, tokens, keys=keys, values=values)
            found |= {kind: kvs for kind, kvs in zip(KVS, rows, strict=True) if kvs is not None}
        return found

    def _there(self, kinds: Collection[str]) -> set[str]:
        """What can be asked for: a probe column without heads cannot."""
        return set(kinds) - (set() if self.shape.probe_kv_heads else {"probe"})

    def check(
        self, layer: int, kinds: Collection[str] = KINDS, tokens: Tensor | None = None
    ) -> None:
        """Read as a new request: the rows are the stored bits, and the caches are sound."""
        self.request()
        self.check_more(layer, kinds, tokens)

    def check_more(
        self, layer: int, kinds: Collection[str] = KINDS, tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Read in the request that is under way; what it gave."""
        found = self.read(layer, kinds, tokens)
        assert set(found) == self._there(kinds)
        for kind, rows in found.items():
            self.check_rows(rows, layer, kind, tokens)
        if self.cache is not None:
            check_placement(self.cache.placement)
        return found

    def check_rows(self, rows: Tensor, layer: int, kind: str, tokens: Tensor | None = None) -> None:
        expected = self.expected(layer, kind, tokens)
        assert rows.dtype == self.shape.dtype
        assert rows.device.type == "cpu"
        assert rows.shape == expected.shape
        assert torch.equal(rows, expected), kind

    def rows(self, layer: int, column: Column, tokens: Tensor | None) -> list[tuple[int, int]]:
        """(part, row on disk) of each token; of the probe column all rows, in logical order."""
        picked = range(self.num_tokens)
        if tokens is not None and column != kv.PROBE:
            picked = tokens[kv.head_group_of(self.shape, column)].tolist()
        places = [
            (number, token)
            for number, part in enumerate(self.parts)
            for token in range(part.start, part.stop)
        ]
        rows = []
        for number, token in (places[t] for t in picked):
            mapping = self.mappings[number]
            if column == kv.PROBE or mapping is None:
                rows.append((number, token))
            else:
                head_group = kv.head_group_of(self.shape, column)
                rows.append((number, int(mapping[layer][head_group][token])))
        return sorted(set(rows)) if column == kv.PROBE else rows

    def blocks(
        self, layer: int, column: Column, tokens: Tensor | None = None
    ) -> set[tuple[int, int, int]]:
        """(part, chunk, block) that hold a byte of a wanted row."""
        size, found = kv.row_size(self.shape, column), set()
        for number, row in self.rows(layer, column, tokens) if size else ():
            chunk, place = divmod(row, self.parts[number].chunk_tokens)
            last = (place * size + size - 1) // BLOCK
            found |= {(number, chunk, block) for block in range(place * size // BLOCK, last + 1)}
        return found

    def block_bytes(
        self, layer: int, kinds: Collection[str] = KINDS, tokens: Tensor | None = None
    ) -> int:
        """Bytes of all blocks that hold a byte of a wanted row."""
        columns = [column for kind in kinds for column in self.kind_columns(kind)]
        return BLOCK * sum(len(self.blocks(layer, column, tokens)) for column in columns)

    def reopen(self) -> None:
        """Give the ids of the chunks back, and take them in another order."""
        assert self.cache is not None
        self.close()
        for segment, _, base in self.spans:
            self.cache.placement.detach(base, segment.layout.first_chunks[False][-1])
        check_placement(self.cache.placement)
        again = [
            kv.open_span(path, self.cache, self.reader, part.start, part.stop)
            for path, part in zip(reversed(self.paths), reversed(self.parts), strict=True)
        ]
        self.spans = again[::-1]
        self.source = self.make_source()

    def close(self) -> None:
        self.finish()
        for segment, _, _ in self.spans:
            segment.close()


def open_case(
    directory: Path,
    shape: KVShape,
    parts: Sequence[Part],
    reader: BlockReader,
    *,
    cache: ChunkCache | None = None,
    reordered: bool = False,
    direct: bool = False,
) -> Case:
    cache = cache or kv.make_cache(shape)
    spans, keys, values, paths, mappings = [], [], [], [], []
    for number, part in enumerate(parts):
        info = kv.make_info(
            shape,
            range(part.num_tokens),
            chunk_tokens=part.chunk_tokens,
            segment_id=f"segment{number}",
            generation=int(reordered),
        )
        own_keys, own_values = kv.random_kvs(shape, part.num_tokens, seed=number)
        mappings.append(kv.random_mapping(info, number) if reordered else None)
        paths.append(
            kv.write_kvs(directory, info, own_keys, own_values, direct=direct, mapping=mappings[-1])
        )
        place = part.start, part.stop
        spans.append(kv.open_span(paths[-1], cache, reader, *place, direct=direct))
        keys.append(own_keys[:, part.start : part.stop])
        values.append(own_values[:, part.start : part.stop])
    case = Case(shape, parts, torch.cat(keys, 1), torch.cat(values, 1))
    case.paths, case.spans, case.mappings, case.cache = paths, spans, mappings, cache
    case.reader = reader
    case.histories = [history_of(span, by_importance=True) for span in spans]
    case.source = case.make_source()
    return case


def draw_case(
    data: st.DataObject, directory: Path, reader: BlockReader, *, most_chunks: int = 8
) -> Case:
    """Any shape, parts of segments, caches and order; few or many rows are expected."""
    shape = SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))]
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        num_tokens = data.draw(st.integers(1, 60))
        start = data.draw(st.integers(0, num_tokens - 1))
        stop = data.draw(st.integers(start + 1, num_tokens))
        parts.append(Part(num_tokens, 8 * data.draw(st.integers(1, 3)), start, stop))
    # With pages of 8 tokens the chunks of longer segments do not fit, and are never cached.
    cache = kv.make_cache(
        shape,
        device_chunks=data.draw(st.integers(0, most_chunks)),
        host_chunks=data.draw(st.integers(0, most_chunks)),
        chunk_tokens=data.draw(st.sampled_from([8, 16, 24])),
        rule=RULES[data.draw(st.sampled_from(sorted(RULES)))](),
    )
    direct = data.draw(st.booleans()) and FileSystem().supports_direct_io(directory)
    reordered = data.draw(st.booleans())
    return open_case(
        directory, shape, parts, reader, cache=cache, reordered=reordered, direct=direct
    )


def history_of(span: OpenSpan, *, by_importance: bool = False) -> TokenHistory:
    """Nothing is known of any token of a segment."""
    info = span[0].info
    sizes = info.shape.num_layers, kv.head_groups_of(info.shape), info.num_tokens
    return TokenHistory(*sizes, by_importance=by_importance)


def random_tokens(case: Case, count: int, seed: int) -> Tensor:
    """[head groups, count], ascending in each head group, other ones in each."""
    generator = torch.Generator().manual_seed(seed)
    head_groups = range(kv.head_groups_of(case.shape))
    picked = [torch.randperm(case.num_tokens, generator=generator)[:count] for _ in head_groups]
    return torch.stack(picked).sort(1).values


def same_tokens(case: Case, tokens: Sequence[int]) -> Tensor:
    """[head groups, k], the same in each head group."""
    return torch.tensor(list(tokens), dtype=torch.int64).expand(kv.head_groups_of(case.shape), -1)


def poison(case: Case) -> None:
    """Fill the memory that reads land in with NaN of every floating-point type."""
    memory = case.pool.take(case.source.layer_bytes, lambda: None)
    assert memory is not None
    memory.view[:] = b"\xff" * len(memory)
    case.pool.give(memory, [])


def check_everything(case: Case) -> None:
    for layer in range(case.shape.num_layers):
        case.check(layer)


def all_chunks(shape: KVShape, part: Part, path: Path) -> Iterator[tuple[int, Column, int, int]]:
    """(layer, column, chunk, offset) of every chunk, found from sizes alone."""
    sizes = {
        (column, chunk): kv.chunk_disk_bytes(
            shape, column, part.chunk_tokens, part.num_tokens, chunk
        )
        for column in kv.columns_of(shape)
        for chunk in range(-(-part.num_tokens // part.chunk_tokens))
    }
    offset = path.stat().st_size - shape.num_layers * sum(sizes.values())
    for layer in range(shape.num_layers):
        for (column, chunk), size in sizes.items():
            if size:
                yield layer, column, chunk, offset
            offset += size
