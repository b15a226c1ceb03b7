"""Shapes, KVs and segment files for the tests of the core, and sizes by hand."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.groups.energy import QueryMeter
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import Column, KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import MappingLists, SegmentInfo, Tokens
from impress_sglang.storage.writer import LayerReader, write_segment
from impress_sglang.store.prefix_hashes import prefix_digest
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.transfer.codecs import plain_codec

IDENTITY = "0123456789abcdef0123456789abcdef"
BLOCK = 4096
# The columns of a shape with one head group: else there are more, see `columns_of`.
PROBE, KEYS = 0, 1


def make_shape(
    *,
    layers: int = 2,
    query_heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    probe: Sequence[int] = (0,),
    coded: bool = False,
    raw: int = 0,
) -> KVShape:
    """A shape with probe heads; without any it has a head group per head."""
    heads = query_heads, kv_heads
    bits = 6.0 if coded else 0.0
    sizes = layers, *heads, key_dim, value_dim
    return KVShape(*sizes, dtype, tuple(probe), bits, raw_layers=raw)


def as_tokens(tokens: Sequence[int]) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


def make_info(
    shape: KVShape, tokens: Sequence[int], *, chunk_tokens: int = 8, **fields: Any
) -> SegmentInfo:
    usual = {"segment_id": "ab12", "identity": IDENTITY, "namespace": "", "prefix_digest": "d0"}
    place = {**usual, "prefix_len": 0, **fields}
    return SegmentInfo(tokens=as_tokens(tokens), shape=shape, chunk_tokens=chunk_tokens, **place)


def stored_segment(
    name: str,
    tokens: Sequence[int],
    prefix: Sequence[int] = (),
    *,
    shape: KVShape | None = None,
    namespace: str = "",
    state: SegmentState = SegmentState.READY,
    last_access: int = 0,
    **fields: Any,
) -> StoredSegment:
    info = make_info(
        shape or make_shape(),
        tokens,
        segment_id=name,
        namespace=namespace,
        prefix_len=len(prefix),
        prefix_digest=prefix_digest(namespace, as_tokens(prefix)),
        **fields,
    )
    return StoredSegment(info, info.layout().file_bytes, state, last_access=last_access)


def random_mapping(info: SegmentInfo, seed: int) -> MappingLists:
    """Another permutation of the rows for each layer and head group."""
    generator = np.random.default_rng(seed)
    lists = info.shape.num_layers, head_groups_of(info.shape)
    rows = [generator.permutation(info.num_tokens) for _ in np.ndindex(lists)]
    return np.stack(rows).reshape(*lists, -1).astype(info.arrays()["mapping"][0])


def random_kvs(shape: KVShape, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys [L, m, G, Dk] and values [L, m, G, Dv]."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.num_layers, num_tokens, shape.num_kv_heads)
    keys = torch.randn(*size, shape.key_dim, generator=generator)
    values = torch.randn(*size, shape.value_dim, generator=generator)
    return keys.to(shape.dtype), values.to(shape.dtype)


def write_kvs(
    directory: Path,
    info: SegmentInfo,
    keys: Tensor,
    values: Tensor,
    *,
    direct: bool = False,
    mapping: MappingLists | None = None,
) -> Path:
    path, codec = directory / f"{info.segment_id}.kv", plain_codec(info.shape)
    write_segment(
        path,
        info,
        lambda i: (keys[i], values[i]),
        FileSystem(),
        direct=direct,
        mapping=mapping,
        coding=None if codec is None else codec.layer_encoder(info.prefix_len, QueryMeter().energy),
    )
    return path


def head_groups_of(shape: KVShape) -> int:
    """Sets of heads with an order and a selection of their own."""
    return 1 if shape.probe_kv_heads else shape.num_kv_heads * shape.exact


def columns_of(shape: KVShape, *kinds: str) -> list[Column]:
    """Those of a layer, of all kinds without any: the probe column, then keys and then values of
    each head group."""
    count = head_groups_of(shape)
    places = {"probe": [PROBE], "keys": range(1, 1 + count)}
    places["values"] = range(1 + count, 1 + 2 * count)
    return [column for kind in kinds or places for column in places[kind]]


def head_group_of(shape: KVShape, column: Column) -> int:
    return (column - 1) % head_groups_of(shape)


def heads_of(shape: KVShape, column: Column) -> list[int]:
    """KV heads of a column, by its definition."""
    probed, everyone = list(shape.probe_kv_heads), range(shape.num_kv_heads)
    if column == PROBE:
        return probed
    if not probed:
        return [head_group_of(shape, column)]
    return [head for head in everyone if column != KEYS or head not in probed]


def row_size(shape: KVShape, column: Column) -> int:
    dim = shape.value_dim if column in columns_of(shape, "values") else shape.key_dim
    return len(heads_of(shape, column)) * dim * shape.dtype.itemsize


def chunk_disk_bytes(
    shape: KVShape, column: Column, chunk_tokens: int, num_tokens: int, chunk: int
) -> int:
    """Bytes of one chunk on disk: its rows, padded to whole disk blocks."""
    rows = min(chunk_tokens, num_tokens - chunk * chunk_tokens)
    return -(-rows * row_size(shape, column) // BLOCK) * BLOCK


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 0xFF]))


@dataclasses.dataclass(frozen=True)
class SequenceKVs:
    """KVs as a model has them: the row of a token depends on all tokens up to it.

    The namespace and the quality of the KVs count as well, so that a row of another
    sequence, namespace or kind is never equal by chance.
    """

    shape: KVShape
    namespace: str
    tokens: tuple[int, ...]
    quality: Quality = EXACT

    def keys(self, layer: int) -> Tensor:
        """[m, G, Dk]"""
        return self._rows(2 * layer, self.shape.key_dim)

    def values(self, layer: int) -> Tensor:
        """[m, G, Dv]"""
        return self._rows(2 * layer + 1, self.shape.value_dim)

    def read_from(self, start: int) -> LayerReader:
        """A layer reader for the tokens from `start` on."""
        return lambda layer: (self.keys(layer)[start:], self.values(layer)[start:])

    def _rows(self, kind: int, dim: int) -> Tensor:
        state = zlib.crc32(f"{self.namespace}|{self.quality}|{kind}".encode())
        states = []
        for token in self.tokens:
            state = (state * 1_000_003 + token + 1) % ((1 << 61) - 1)
            states.append(state)
        width = self.shape.num_kv_heads * dim
        columns = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = np.array(states, np.uint64)[:, None] * (columns[None, :] | np.uint64(1))
        # Whole numbers up to 250 are the same in every floating-point type.
        numbers = ((mixed >> np.uint64(32)) % np.uint64(251)).astype(np.float32)
        rows = torch.from_numpy(numbers).view(len(self.tokens), self.shape.num_kv_heads, dim)
        return rows.to(self.shape.dtype)
