"""What of a segment is read in codes: the chunks of a layer's codes, and spans of tokens.

Stage: load.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from impress_sglang.codes.pages import Pages
from impress_sglang.loops.types import Flags, Indices, Uint8s
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.open_segment import OpenSegment


@dataclasses.dataclass(frozen=True)
class CodeChunks:
    """The chunks of the codes of a layer, its pages; counted in blocks.

    `first` int64 [chunks] is the block where each begins, `count` int64 [chunks] its blocks.
    """

    first: Indices
    count: Indices

    @property
    def num_blocks(self) -> int:
        """Blocks of the layer's codes."""
        return int(self.first[-1] + self.count[-1])


# With a basis each layer of a segment has a layout of its own. An entry takes 16 bytes per page,
# which has 4 KiB or more: all entries together are no larger than the codes of four layers of the
# longest segment.
@functools.lru_cache(maxsize=1024)
def chunks_of(layout: Pages) -> CodeChunks:
    """Where the chunks of a layer's codes stand."""
    count = np.full(layout.num_pages, layout.page_bytes // BLOCK_BYTES)
    count[-1] = layout.layer_bytes // BLOCK_BYTES - count[:-1].sum()
    return CodeChunks(np.cumsum(count) - count, count)


@functools.lru_cache(maxsize=256)
def cached_pages(layouts: tuple[Pages, ...]) -> npt.NDArray[np.uint16]:
    """Pages that each chunk of all layers takes in a cache."""
    return np.concatenate([chunks_of(own).count for own in layouts]).astype(np.uint16)


@dataclasses.dataclass(frozen=True)
class CodedSpan:
    """The tokens [start, stop) of a segment whose first chunk of codes has the id `base`."""

    segment: OpenSegment
    start: int
    stop: int
    base: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def layout(self) -> Pages:
        """The layout of the codes of layer 0; pages have as many tokens in all layers."""
        return self.layout_of(0)

    def layout_of(self, layer: int) -> Pages:
        """The layout of the codes of a layer."""
        assert self.segment.layout.codes, "the segment has no codes"
        return self.segment.layout.codes[layer]

    @property
    def first(self) -> int:
        """The position of the segment's first token in the prompt that it was stored with."""
        return self.segment.info.prefix_len

    @property
    def sinks(self) -> Uint8s:
        """The first of its tokens that are never in codes: uint8 [L, n, bytes]."""
        return self.segment.sinks[:, self.start : self.stop]

    def chunks(self, layer: int) -> CodeChunks:
        """Where the codes of a layer stand."""
        return chunks_of(self.layout_of(layer))

    @functools.cached_property
    def groups(self) -> range:
        """The groups that have tokens of the span."""
        size = self.layout.group_tokens
        return range(self.start // size, -(-self.stop // size))

    @functools.cached_property
    def pages(self) -> Indices:
        """The chunks that have tokens of the span."""
        per_page = self.layout.page_groups
        return np.arange(self.groups[0] // per_page, self.groups[-1] // per_page + 1)

    def spared_blocks(self, layer: int) -> Flags:
        """Blocks of a layer that hold nothing of `groups`, even if in their pages."""
        return _spared_blocks(self.layout_of(layer), self.groups)

    def no_blocks(self, layer: int) -> Flags:
        """None of the blocks of a layer."""
        return np.zeros(self.chunks(layer).num_blocks, np.bool_)


@functools.lru_cache(maxsize=1024)
def _spared_blocks(layout: Pages, groups: range) -> Flags:
    blocks = np.ones(chunks_of(layout).num_blocks, np.bool_)
    first = layout.group_offset(groups[0]) // BLOCK_BYTES
    last = layout.group_offset(groups[-1]) + layout.group_bytes
    blocks[first : -(-last // BLOCK_BYTES)] = False
    return blocks
