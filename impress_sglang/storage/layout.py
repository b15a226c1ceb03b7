"""Where each byte of a segment is: pure arithmetic, no I/O. See docs/format.md.

Per layer a segment has columns, each cut into chunks of `chunk_tokens` rows (a row is a token): a
probe column, and the keys and values of each head group. Behind these come all keys and values of
the layer again in a few bits, in pages (`codes.pages.Pages`) of groups, or with a basis of rows:

    header | layer 0: probe, keys of group 0, 1, ..., values of group 0, 1, ..., codes | layer 1 ...

In the last `raw_layers` a row has all keys and then all values of a token, in chunks as those of
columns. With probe heads (as in the paper), the probe column has their keys, and a single head
group the other keys and all values. Without, it is empty, and each KV head is a head group.

A column is contiguous, so that neighbouring chunks are one read. Chunks start at multiples of
`BLOCK_BYTES` in the file, as O_DIRECT requires; the last one of a column has the remaining rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import GROUP_TOKENS, GroupLayout
from impress_sglang.codes.pages import Pages, page_groups_for

BLOCK_BYTES = 4096

# Number of a column within its layer, in the order on disk; see `KVShape.columns`.
Column = int
PROBE: Column = 0


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class KVShape:
    """Shape of a model's KV on this rank, and how a layer of it is cut into columns.

    `probe_kv_heads` are the KV heads whose keys are stored apart; heads count from 0. With
    `code_bits` above 0, all keys and values follow behind the columns in codes of so many bits per
    element: by the basis with the digest `basis`, of which `row_bytes_of_layers` are the bytes of a
    token in each layer, or without a basis. If not `exact`, there are only codes: the columns are
    empty. The last `raw_layers` have neither.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    probe_kv_heads: tuple[int, ...]
    code_bits: float = 0.0
    exact: bool = True
    basis: str = ""
    row_bytes_of_layers: tuple[int, ...] = ()
    raw_layers: int = 0

    def __post_init__(self) -> None:
        assert self.num_query_heads % self.num_kv_heads == 0
        assert self.probe_kv_heads == tuple(sorted(set(self.probe_kv_heads)))
        assert all(0 <= head < self.num_kv_heads for head in self.probe_kv_heads)
        assert 0 <= self.raw_layers < self.num_layers
        assert len(self.row_bytes_of_layers) == (self.first_raw if self.basis else 0)
        assert self.coded or not self.basis
        assert self.exact or (self.coded and not self.probe_kv_heads)
        assert not (self.raw_layers and self.probe_kv_heads)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> KVShape:
        """The shape that has these `fields`."""
        dtype = getattr(torch, fields["dtype"])
        tuples = {name: tuple(fields[name]) for name in ("probe_kv_heads", "row_bytes_of_layers")}
        return cls(**{**fields, "dtype": dtype, **tuples})

    @property
    def first_raw(self) -> int:
        """The first layer that is kept as it is; the number of layers if none is."""
        return self.num_layers - self.raw_layers

    @property
    def coded(self) -> bool:
        """Whether there are codes."""
        return self.code_bits > 0

    @functools.cached_property
    def group_layout(self) -> GroupLayout:
        """The groups of codes without a basis."""
        rate = int(self.code_bits)
        return GroupLayout(self.num_kv_heads, self.key_dim, self.value_dim, rate)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @functools.cached_property
    def other_kv_heads(self) -> tuple[int, ...]:
        """KV heads that are not probe heads."""
        return tuple(h for h in range(self.num_kv_heads) if h not in self.probe_kv_heads)

    @functools.cached_property
    def head_groups(self) -> tuple[tuple[int, ...], ...]:
        """KV heads of each head group; none if nothing is stored exactly."""
        heads = range(self.num_kv_heads if self.exact else 0)
        return (tuple(heads),) if self.probe_kv_heads else tuple((head,) for head in heads)

    @property
    def num_head_groups(self) -> int:
        """Number of head groups of a layer."""
        return len(self.head_groups)

    @property
    def columns(self) -> range:
        """All columns of a layer: probe, keys of each head group, values of each head group."""
        return range(1 + 2 * self.num_head_groups)

    @property
    def key_columns(self) -> range:
        """Columns of keys, one per head group, without the keys in the probe column."""
        return range(1, 1 + self.num_head_groups)

    @property
    def value_columns(self) -> range:
        """Columns of values, one per head group."""
        return range(1 + self.num_head_groups, 1 + 2 * self.num_head_groups)

    def head_group_of(self, column: Column) -> int:
        """The head group of a column of keys or values."""
        assert column != PROBE
        return (column - 1) % self.num_head_groups

    def heads(self, column: Column) -> tuple[int, ...]:
        """KV heads that a column holds, in storage order."""
        return self._heads[column]

    def head_dim(self, column: Column) -> int:
        """Elements of one head's vector in a column."""
        return self.value_dim if column in self.value_columns else self.key_dim

    def row_bytes(self, column: Column) -> int:
        """Bytes of one row in a column."""
        return len(self._heads[column]) * self.head_dim(column) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of all keys and values of a token in a layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def rows_of(self, keys: Tensor, values: Tensor) -> Tensor:
        """All keys [t, G, Dk] and then all values [t, G, Dv] of each token, uint8 [t, bytes]."""
        return torch.cat([keys.flatten(1), values.flatten(1)], 1).view(torch.uint8)

    def kvs_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., G, Dk] and values [..., G, Dv] that are in such rows, not copied."""
        key_bytes = self.num_kv_heads * self.key_dim * self.dtype.itemsize
        both = rows.tensor_split([key_bytes], -1)
        keys, values = (own.view(self.dtype).unflatten(-1, (self.num_kv_heads, -1)) for own in both)
        return keys, values

    @functools.cached_property
    def code_bytes(self) -> tuple[int, ...]:
        """Bytes of a group of codes in each layer that has some; with a basis, of a token."""
        if self.basis or not self.coded:
            return self.row_bytes_of_layers
        return (self.group_layout.group_bytes,) * self.first_raw

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """The shape as JSON-compatible values."""
        return {**dataclasses.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}

    @functools.cached_property
    def _heads(self) -> tuple[tuple[int, ...], ...]:
        if not self.probe_kv_heads:
            return ((), *self.head_groups, *self.head_groups)
        return (self.probe_kv_heads, self.other_kv_heads, *self.head_groups)


@dataclasses.dataclass(frozen=True)
class SegmentLayout:
    """Offsets and sizes, in bytes, of everything in a segment of `num_tokens` tokens."""

    shape: KVShape
    chunk_tokens: int
    num_tokens: int
    header_bytes: int

    def __post_init__(self) -> None:
        assert self.num_tokens > 0
        assert self.header_bytes % BLOCK_BYTES == 0

    @functools.cached_property
    def num_chunks(self) -> int:
        """Chunks of one column of one layer."""
        return -(-self.num_tokens // self.chunk_tokens)

    @functools.cached_property
    def columns(self) -> tuple[Pages, ...]:
        """The columns of each layer: a page is a chunk, and a group a row."""
        return tuple(map(self._chunks, map(self.shape.row_bytes, self.shape.columns)))

    @functools.cached_property
    def rows(self) -> Pages:
        """The rows of each raw layer."""
        return self._chunks(self.shape.token_bytes)

    def _chunks(self, row_bytes: int) -> Pages:
        return Pages(self.num_tokens, 1, row_bytes, self.chunk_tokens, BLOCK_BYTES)

    @functools.cached_property
    def column_starts(self) -> tuple[int, ...]:
        """Where each column begins in its layer, and where the last one ends, in bytes."""
        return tuple(itertools.accumulate((own.num_bytes for own in self.columns), initial=0))

    @property
    def columns_bytes(self) -> int:
        """Bytes of all columns of a layer that has some."""
        return self.column_starts[-1]

    @functools.cached_property
    def codes(self) -> tuple[Pages, ...]:
        """Pages of the codes of each layer that has some, with as many tokens in each page."""
        shape = self.shape
        if not shape.coded:
            return ()
        tokens, sizes = 1 if shape.basis else GROUP_TOKENS, shape.code_bytes
        if shape.basis:
            count = page_groups_for(sizes, BLOCK_BYTES, grain=64, most=1024, padding=1 / 64)
        else:
            count = page_groups_for(sizes[:1], BLOCK_BYTES, grain=1, most=8, padding=1 / 128)
        pages = {own: Pages(self.num_tokens, tokens, own, count, BLOCK_BYTES) for own in set(sizes)}
        return tuple(pages[own] for own in sizes)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer: its columns and its codes, or its rows."""
        return self._layer_starts[layer + 1] - self._layer_starts[layer]

    @property
    def most_layer_bytes(self) -> int:
        """Bytes of the largest layer."""
        return max(map(self.layer_bytes, range(self.shape.num_layers)))

    @functools.cached_property
    def _layer_starts(self) -> tuple[int, ...]:
        """Where each layer begins, counted from the end of the header, and where the last ends."""
        columns, codes = self._sizes
        first = self.shape.first_raw
        sizes = [*map(sum, zip(columns[:first], codes[:first], strict=True)), *columns[first:]]
        return tuple(itertools.accumulate(sizes, initial=0))

    @functools.cached_property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of the columns of each layer, and of its codes; of raw layers of their rows."""
        raw = (self.rows.num_bytes,) * self.shape.raw_layers
        codes = tuple(own.num_bytes for own in self.codes) or (0,) * self.shape.first_raw
        return (self.columns_bytes,) * self.shape.first_raw + raw, codes + raw

    @property
    def file_bytes(self) -> int:
        """Size of the segment file."""
        return self.header_bytes + self._layer_starts[-1]

    def layer_offset(self, layer: int) -> int:
        """Offset of a layer in the file."""
        return self.header_bytes + self._layer_starts[layer]

    def parts(self, layer: int, *, codes: bool) -> tuple[Pages, ...]:
        """The columns of a layer, or its codes; if it is raw, its rows in both cases."""
        if layer >= self.shape.first_raw:
            return (self.rows,)
        return self.codes[layer : layer + 1] if codes else self.columns

    def place(self, layer: int, *, codes: bool) -> tuple[int, int]:
        """Where the parts of a layer begin in the file, and their bytes."""
        size = self._sizes[codes][layer]
        # Codes come last.
        return self.layer_offset(layer) + (self.layer_bytes(layer) - size) * codes, size

    def num_bytes(self, layers: slice, *, codes: bool) -> int:
        """Bytes of the parts of some layers."""
        return sum(self._sizes[codes][layers])

    def most_bytes(self, *, codes: bool) -> int:
        """Bytes of the parts of the largest layer."""
        return max(self._sizes[codes])

    def first_chunk(self, layer: int, *, codes: bool) -> int:
        """Number of the first chunk of a layer among all chunks of its kind of parts."""
        raw = max(layer - self.shape.first_raw, 0)
        count = self.codes[0].num_pages if codes else self.layer_chunks
        return (layer - raw) * count + raw * self.rows.num_pages

    def chunk_index(self, layer: int, column: Column, chunk: int) -> int:
        """Position of a chunk among all chunks of the segment."""
        return layer * self.layer_chunks + column * self.num_chunks + chunk

    @property
    def layer_chunks(self) -> int:
        """Chunks of all columns of one layer."""
        return len(self.shape.columns) * self.num_chunks

    @property
    def total_chunks(self) -> int:
        """Chunks of all columns of all layers."""
        return self.shape.num_layers * self.layer_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks of `BLOCK_BYTES` after the header: entries of the checksum table."""
        return self._layer_starts[-1] // BLOCK_BYTES
