"""What of a layer of a segment is wanted: chunks, which are pages of its parts, and their blocks.

The parts of a layer are its columns or its codes; both are read, cached and counted alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from impress_sglang.codes.pages import Pages
from impress_sglang.loops.types import Flags, Floats, Indices
from impress_sglang.storage.layout import BLOCK_BYTES, SegmentLayout


@dataclasses.dataclass(frozen=True)
class LayerChunks:
    """The chunks of some parts of a layer, in the order on disk.

    int64 [chunks]: `first` is the block where each begins, counted from that of the first one,
    `count` its blocks, `rows` its groups, which in columns are rows, and `row_bytes` the bytes of
    one.
    """

    first: Indices
    count: Indices
    rows: Indices
    row_bytes: Indices


@functools.lru_cache(maxsize=512)
def chunks_of(parts: tuple[Pages, ...]) -> LayerChunks:
    """The chunks of the parts of a layer."""
    counts, rows = [], []
    for own in parts:
        blocks = np.full(own.num_pages, own.page_bytes // BLOCK_BYTES)
        blocks[-1] = own.num_bytes // BLOCK_BYTES - blocks[:-1].sum()
        groups = np.full(own.num_pages, own.page_groups)
        groups[-1] = own.num_groups - groups[:-1].sum()
        counts.append(blocks)
        rows.append(groups)
    sizes = np.repeat([own.group_bytes for own in parts], [own.num_pages for own in parts])
    count = np.concatenate(counts)
    return LayerChunks(np.cumsum(count) - count, count, np.concatenate(rows), sizes)


@functools.lru_cache(maxsize=256)
def chunk_pages(layout: SegmentLayout, *, codes: bool) -> npt.NDArray[np.uint16]:
    """Pages that each chunk of one kind, of all layers, takes in a cache; a page is a block."""
    layers = range(layout.shape.num_layers)
    counts = [chunks_of(layout.parts(layer, codes=codes)).count for layer in layers]
    return np.concatenate(counts).astype(np.uint16)


def most_pages(layout: SegmentLayout) -> int:
    """Pages of a cache that the largest chunk of any segment of the same shape takes."""
    last = layout.parts(layout.shape.num_layers - 1, codes=False)
    return max(own.page_bytes for own in (*layout.columns, *layout.codes, *last)) // BLOCK_BYTES


class Wanted:
    """Chunks of a layer that are wanted, ascending, and which of their blocks."""

    taken: Flags | None = None
    """Of all blocks of `chunks`, one after another, which are handed out; None: all."""
    places: Sequence[tuple[Pages, slice, slice]] = ()
    """Of each part that is not empty: its bytes in all blocks, and its groups there, if whole
    tokens are wanted."""

    def __init__(self, layer: LayerChunks, chunks: Indices, rows: Indices, blocks: Flags) -> None:
        """`rows`: int64, how many of each are wanted; `blocks` bool [blocks of the layer]."""
        self.layer = layer
        self.chunks = chunks
        self.shares: Floats = rows / layer.rows[chunks]
        """float64, how much of each is wanted."""
        self.bytes = rows * layer.row_bytes[chunks]
        """int64, how many bytes of each are wanted."""
        self.blocks = blocks
        self.first, self.count = layer.first[chunks], layer.count[chunks]
        self.all_blocks = np.repeat(self.first - np.cumsum(self.count) + self.count, self.count)
        """int64, all blocks of `chunks`, one after another."""
        self.all_blocks += np.arange(len(self.all_blocks))

    def missing(self, on_ssd: Flags, whole: Flags | bool) -> Indices:
        """The blocks that must come from SSD, int64, ascending.

        Those of chunks that are there, and are wanted or of a chunk that is wanted `whole`; both
        bool [chunks].
        """
        wanted = self.blocks[self.all_blocks] | np.repeat(whole & on_ssd, self.count)
        return self.all_blocks[wanted & np.repeat(on_ssd, self.count)]


@functools.lru_cache(maxsize=512)
def wanted_tokens(parts: tuple[Pages, ...], start: int, stop: int) -> Wanted:
    """What has the tokens [start, stop) in the parts of a layer, in the order of the tokens."""
    chunks = chunks_of(parts)
    blocks = np.zeros(chunks.count.sum(), np.bool_)
    numbers, rows, places, before, at, taken = [], [], [], 0, 0, 0
    for own in parts:
        if own.group_bytes:
            groups = own.groups_of(start, stop)
            begin = (at + own.group_offset(groups[0])) // BLOCK_BYTES
            end = at + own.group_offset(groups[-1]) + own.group_bytes
            blocks[begin : -(-end // BLOCK_BYTES)] = True
            first, last = (group // own.page_groups for group in (groups[0], groups[-1]))
            pages = np.arange(first, last + 1)
            edges = np.append(pages, last + 1) * own.page_groups
            numbers.append(before + pages)
            rows.append(np.diff(np.clip(edges, groups.start, groups.stop)))
            size, skipped = own.page_offset(last + 1) - own.page_offset(first), edges[0]
            inside = slice(groups.start - skipped, groups.stop - skipped)
            places.append((own, slice(taken, taken := taken + size), inside))
        before += own.num_pages
        at += own.num_bytes
    wanted = Wanted(chunks, np.concatenate(numbers), np.concatenate(rows), blocks)
    wanted.places = places
    return wanted
