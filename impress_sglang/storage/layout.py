"""Layout of the bytes of a segment: pure arithmetic, no I/O. See docs/format.md.

Per layer a segment has columns, each cut into chunks of `chunk_tokens` rows (a row is a token): a
probe column, and the keys and values of each head group. After these come all keys and values of
the layer again in a few bits, in pages (`PagedGroups`) of groups, or with a basis of rows:

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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import GROUP_TOKENS, GroupLayout
from impress_sglang.loops.types import Indices

BLOCK_BYTES = 4096

# Number of a column within its layer, in the order on disk; see `KVShape.heads`.
Column = int
PROBE: Column = 0


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class KVShape:
    """Shape of a model's KV on this rank, and how a layer of it is cut into columns.

    `probe_kv_heads` are the KV heads whose keys are stored apart; heads count from 0. With
    `code_bits` above 0, codes of all keys and values with this many bits per element follow the
    columns: by the basis with the digest `basis`, whose bytes of a token in each layer are
    `row_bytes_of_layers`, or without a basis. If not `exact`, there are only codes: the columns are
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

    @property
    def first_raw(self) -> int:
        """The first raw layer; the number of layers if there is none."""
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
        """KV heads of each head group; empty if only codes are stored."""
        heads = range(self.num_kv_heads if self.exact else 0)
        return (tuple(heads),) if self.probe_kv_heads else tuple((head,) for head in heads)

    @property
    def key_columns(self) -> range:
        """Columns of keys, one per head group, without the keys in the probe column."""
        return range(1, 1 + len(self.head_groups))

    @property
    def value_columns(self) -> range:
        """Columns of values, one per head group."""
        return range(1 + len(self.head_groups), 1 + 2 * len(self.head_groups))

    def head_group_of(self, column: Column) -> int:
        """The head group of a column of keys or values."""
        assert column != PROBE
        return (column - 1) % len(self.head_groups)

    @functools.cached_property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """KV heads of all columns, in storage order: of the probe column, those of the keys of each
        head group, and of its values."""
        if not self.probe_kv_heads:
            return ((), *self.head_groups, *self.head_groups)
        return (self.probe_kv_heads, self.other_kv_heads, *self.head_groups)

    def head_dim(self, column: Column) -> int:
        """Elements of one head's vector in a column."""
        return self.value_dim if column in self.value_columns else self.key_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of all keys and values of a token in a layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def rows_of(self, keys: Tensor, values: Tensor) -> Tensor:
        """Join all keys [t, G, Dk] and then all values [t, G, Dv] of tokens: uint8 [t, bytes]."""
        return torch.cat([keys.flatten(1), values.flatten(1)], 1).view(torch.uint8)

    def kvs_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split such rows into keys [..., G, Dk] and values [..., G, Dv], without a copy."""
        key_bytes = self.num_kv_heads * self.key_dim * self.dtype.itemsize
        both = rows.tensor_split([key_bytes], -1)
        keys, values = (
            rows.view(self.dtype).unflatten(-1, (self.num_kv_heads, -1)) for rows in both
        )
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


class PagedGroups(NamedTuple):
    """A part of a layer: groups of equal size, of a number of tokens each, in pages that begin at a
    block. The groups of a page stand one after another; the last page has the remaining ones.
    """

    num_tokens: int
    group_tokens: int
    group_bytes: int
    page_groups: int

    @property
    def num_groups(self) -> int:
        """Number of groups, the last of which may have fewer tokens."""
        return -(-self.num_tokens // self.group_tokens)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.page_groups * self.group_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; the last one may be shorter."""
        return round_up(self.page_groups * self.group_bytes, BLOCK_BYTES)

    @property
    def num_pages(self) -> int:
        return -(-self.num_groups // self.page_groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_offset(self.num_pages)

    def page_offset(self, page: int) -> int:
        """Byte where a page begins, or where the last one ends."""
        whole = min(page, self.num_pages - 1)
        rest = (self.num_groups - whole * self.page_groups) * self.group_bytes * (page > whole)
        return whole * self.page_bytes + round_up(rest, BLOCK_BYTES)

    def group_offset(self, group: int) -> int:
        """Byte where a group begins."""
        page, place = divmod(group, self.page_groups)
        return page * self.page_bytes + place * self.group_bytes

    def put_groups(self, groups: Tensor, memory: Tensor) -> None:
        """Write all groups, uint8 [groups, group_bytes], into uint8 [num_bytes], with zeros."""
        if groups.numel() < len(memory):
            memory.zero_()
        count = self.num_pages - 1
        pages, rest = groups.tensor_split([count * self.page_groups])
        whole = self._whole(memory, count)
        # Torch takes longer to copy bytes.
        whole.numpy()[:] = pages.reshape(whole.shape).numpy()
        memory[count * self.page_bytes :][: rest.numel()] = rest.reshape(-1)

    def groups_in(self, memory: Tensor) -> Tensor:
        """Return the groups, uint8 [n, group_bytes], of some pages; the last page may be shorter.

        Padding of a shorter page may appear as groups after the last one.
        """
        size = self.page_groups * self.group_bytes
        if size == self.page_bytes:
            joined = memory[: len(memory) // self.group_bytes * self.group_bytes]
        else:
            count, rest = divmod(len(memory), self.page_bytes)
            more = min(size, rest // self.group_bytes * self.group_bytes)
            joined = memory.new_empty(count * size + more)
            joined[: count * size].view(count, size).copy_(self._whole(memory, count))
            joined[count * size :] = memory[len(memory) - rest :][:more]
        return joined.view(-1, self.group_bytes)

    def _whole(self, memory: Tensor, count: int) -> Tensor:
        """The groups of the first pages of some memory, uint8 [count, bytes]."""
        pages = memory[: count * self.page_bytes].view(count, self.page_bytes)
        return pages[:, : self.page_groups * self.group_bytes]


@functools.lru_cache(maxsize=16)
def page_groups_for(sizes: Sequence[int], *, grain: int, max_groups: int, padding: float) -> int:
    """Choose the groups of a page: the lowest multiple of `grain` that leaves little padding.

    `sizes` are bytes of a group in each layer; pages of all layers have equally many groups. At
    most the share `padding` of whole pages is padding, unless that takes more than `max_groups`.
    """
    for count in range(grain, max_groups, grain):
        pages = sum(round_up(count * size, BLOCK_BYTES) for size in sizes)
        if pages - count * sum(sizes) <= padding * pages:
            return count
    return max_groups


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of some parts of a layer, in the order on disk, int64 [chunks] each.

    `first` is the first block of each chunk, counted from that of the first chunk, `count` its
    blocks, `rows` its groups, which in columns are rows, and `row_bytes` the bytes of a group.
    """

    first: Indices
    count: Indices
    rows: Indices
    row_bytes: Indices


class Parts(tuple[PagedGroups, ...]):
    """Parts of a layer that stand one after another: its columns, its codes, or rows. Their pages
    are chunks: what is cached and counted."""

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Byte offset of each part, and the end of the last one."""
        return tuple(itertools.accumulate((pages.num_bytes for pages in self), initial=0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return self.starts[-1]

    @property
    def num_chunks(self) -> int:
        return sum(pages.num_pages for pages in self)

    @functools.cached_property
    def chunks(self) -> Chunks:
        pages = [part.num_pages for part in self]
        numbers = [np.arange(count) for count in pages]
        page_groups, groups, group_bytes = (
            np.repeat([getattr(part, name) for part in self], pages)
            for name in ("page_groups", "num_groups", "group_bytes")
        )
        rows = np.minimum(page_groups, groups - np.concatenate(numbers) * page_groups)
        count = -(-rows * group_bytes // BLOCK_BYTES)
        return Chunks(np.cumsum(count) - count, count, rows, group_bytes)


# Cached with its computed properties.
_parts = functools.lru_cache(maxsize=512)(Parts)


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

    @property
    def num_chunks(self) -> int:
        """Chunks of one column of one layer."""
        return self.rows.num_pages

    @functools.cached_property
    def columns(self) -> Parts:
        """The columns of each layer: a page is a chunk, and a group a row."""
        shape = self.shape
        dims = (len(heads) * shape.head_dim(column) for column, heads in enumerate(shape.heads))
        return _parts(tuple(self._chunks(dim * shape.dtype.itemsize) for dim in dims))

    @functools.cached_property
    def rows(self) -> PagedGroups:
        """The rows of each raw layer."""
        return self._chunks(self.shape.token_bytes)

    def _chunks(self, row_bytes: int) -> PagedGroups:
        return PagedGroups(self.num_tokens, 1, row_bytes, self.chunk_tokens)

    @functools.cached_property
    def codes(self) -> tuple[PagedGroups, ...]:
        """Pages of the codes of each layer that has codes, with equally many tokens per page."""
        shape, sizes = self.shape, self.shape.code_bytes
        if shape.basis:
            count = page_groups_for(sizes, grain=64, max_groups=1024, padding=1 / 64)
        else:
            count = page_groups_for(sizes[:1], grain=1, max_groups=8, padding=1 / 128)
        tokens = 1 if shape.basis else GROUP_TOKENS
        pages = {size: PagedGroups(self.num_tokens, tokens, size, count) for size in set(sizes)}
        return tuple(pages[size] for size in sizes)

    @functools.cached_property
    def _kinds(self) -> tuple[tuple[Parts, ...], tuple[Parts, ...]]:
        """Columns of each layer, and codes of each layer; in raw layers both are its rows."""
        first, raw = self.shape.first_raw, (_parts((self.rows,)),) * self.shape.raw_layers
        codes = [_parts((pages,)) for pages in self.codes] or [_parts(())] * first
        return ((self.columns,) * first + raw, (*codes, *raw))

    @functools.cached_property
    def _layer_starts(self) -> tuple[int, ...]:
        """Byte offset of each layer from the end of the header, and the end of the last one."""
        first, (columns, codes) = self.shape.first_raw, self._kinds
        sizes = [column.num_bytes for column in columns]
        sizes[:first] = (a + b.num_bytes for a, b in zip(sizes, codes[:first], strict=False))
        return tuple(itertools.accumulate(sizes, initial=0))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer: its columns and its codes, or its rows."""
        return self._layer_starts[layer + 1] - self._layer_starts[layer]

    @property
    def max_layer_bytes(self) -> int:
        """Bytes of the largest layer."""
        return max(map(self.layer_bytes, range(self.shape.num_layers)))

    @property
    def file_bytes(self) -> int:
        """Size of the segment file."""
        return self.header_bytes + self._layer_starts[-1]

    def layer_offset(self, layer: int) -> int:
        """Offset of a layer in the file."""
        return self.header_bytes + self._layer_starts[layer]

    def parts(self, layer: int, *, codes: bool) -> Parts:
        """Return the columns of a layer, or its codes; if it is raw, its rows in both cases."""
        return self._kinds[codes][layer]

    def place(self, layer: int, *, codes: bool) -> tuple[int, int]:
        """Return the offset of the parts of a layer in the file, and their bytes."""
        size = self._kinds[codes][layer].num_bytes
        # Codes come last.
        return self.layer_offset(layer) + (self.layer_bytes(layer) - size) * codes, size

    def num_bytes(self, layers: slice = slice(None), *, codes: bool) -> int:
        """Bytes of the parts of some layers."""
        return sum(layer.num_bytes for layer in self._kinds[codes][layers])

    def max_bytes(self, *, codes: bool) -> int:
        """Bytes of the parts of the largest layer."""
        return max(layer.num_bytes for layer in self._kinds[codes])

    @functools.cached_property
    def first_chunks(self) -> tuple[tuple[int, ...], ...]:
        """For columns and codes: the number of the first chunk of each layer among all of the kind,
        and the number of these."""
        return tuple(
            tuple(itertools.accumulate((layer.num_chunks for layer in kind), initial=0))
            for kind in self._kinds
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of `BLOCK_BYTES` after the header: entries of the checksum table."""
        return self._layer_starts[-1] // BLOCK_BYTES
