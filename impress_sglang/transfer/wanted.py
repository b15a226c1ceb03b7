"""Wanted chunks of a layer of a segment, which are pages of its parts, and their blocks.

The parts of a layer are its columns or its codes; both are read, cached and counted alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Flags, Floats, Indices
from impress_sglang.storage.layout import BLOCK_BYTES, Chunks, PagedGroups, Parts, SegmentLayout


@functools.lru_cache(maxsize=256)
def pages_per_chunk(layout: SegmentLayout, *, codes: bool) -> npt.NDArray[np.uint16]:
    """Number of cache pages of each chunk of one kind, of all layers; a page is a block."""
    layers = range(layout.shape.num_layers)
    counts = [layout.parts(layer, codes=codes).chunks.count for layer in layers]
    return np.concatenate(counts).astype(np.uint16)


def max_pages(layout: SegmentLayout) -> int:
    """Number of cache pages of the largest chunk of any segment of the same shape."""
    last = layout.parts(layout.shape.num_layers - 1, codes=False)
    return max(pages.page_bytes for pages in (*layout.columns, *layout.codes, *last)) // BLOCK_BYTES


class WantedChunks:
    """Wanted chunks of a layer, ascending, and their wanted blocks."""

    taken: Flags | None = None
    """Which blocks of `chunks`, one after another, are returned; None for all."""
    places: Sequence[tuple[PagedGroups, slice, slice]] = ()
    """For each part that is not empty: its bytes in all blocks, and its groups there, if whole
    tokens are wanted."""

    def __init__(self, layer: Chunks, chunks: Indices, rows: Indices, blocks: Flags) -> None:
        """`rows`: int64, wanted rows of each chunk; `blocks`: bool [blocks of the layer]."""
        self.layer = layer
        self.chunks = chunks
        self.shares: Floats = rows / layer.rows[chunks]
        """float64, wanted share of each chunk."""
        self.bytes = rows * layer.row_bytes[chunks]
        """int64, wanted bytes of each chunk."""
        self.blocks = blocks
        self.first, self.count = layer.first[chunks], layer.count[chunks]
        self.all_blocks = np.repeat(self.first - np.cumsum(self.count) + self.count, self.count)
        """int64, all blocks of `chunks`, one after another."""
        self.all_blocks += np.arange(len(self.all_blocks))

    def missing(self, on_ssd: Flags, whole: Flags | bool) -> Indices:
        """Return the blocks that must be read from SSD, int64, ascending.

        These are blocks of chunks `on_ssd` that are wanted, or whose chunk is wanted `whole`; both
        bool [chunks].
        """
        wanted = self.blocks[self.all_blocks] | np.repeat(whole & on_ssd, self.count)
        return self.all_blocks[wanted & np.repeat(on_ssd, self.count)]


@functools.lru_cache(maxsize=512)
def wanted_tokens(parts: Parts, start: int, stop: int) -> WantedChunks:
    """Find the chunks and blocks with tokens [start, stop) in the parts of a layer, in order."""
    blocks = np.zeros(parts.num_bytes // BLOCK_BYTES, np.bool_)
    numbers, rows, places, before, taken = [], [], [], 0, 0
    for part, at in zip(parts, parts.starts, strict=False):
        if part.group_bytes:
            # The groups, and the pages, that have them.
            first, last = start // part.group_tokens, -(-stop // part.group_tokens)
            begin, end = at + part.group_offset(first), at + part.group_offset(last - 1)
            blocks[begin // BLOCK_BYTES : -(-(end + part.group_bytes) // BLOCK_BYTES)] = True
            pages = np.arange(first // part.page_groups, (last - 1) // part.page_groups + 1)
            edges = np.append(pages, pages[-1] + 1) * part.page_groups
            numbers.append(before + pages)
            rows.append(np.diff(np.clip(edges, first, last)))
            size = part.page_offset(pages[-1] + 1) - part.page_offset(pages[0])
            inside = slice(first - edges[0], last - edges[0])
            places.append((part, slice(taken, taken := taken + size), inside))
        before += part.num_pages
    wanted = WantedChunks(parts.chunks, np.concatenate(numbers), np.concatenate(rows), blocks)
    wanted.places = places
    return wanted
