"""What of a segment is read in codes: the chunks of a layer's codes, and spans of tokens.

Stage: load.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from impress_sglang.loops import areas
from impress_sglang.loops.types import Flags, Indices
from impress_sglang.precision.codec import GROUP_TOKENS, NUM_PLANES
from impress_sglang.precision.floors import Floors
from impress_sglang.precision.layout import CodeLayout
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.open_segment import OpenSegment


@dataclasses.dataclass(frozen=True)
class CodeChunks:
    """The chunks of the codes of a layer: pages of the base, then units; counted in blocks.

    `first` int64 [chunks] is the block where each begins, `count` int64 [chunks] its blocks.
    """

    first: Indices
    count: Indices

    @property
    def num_blocks(self) -> int:
        """Blocks of the layer's codes."""
        return int(self.first[-1] + self.count[-1])


# An entry takes 16 bytes per unit or page, which have 4 KiB or more: all entries together are no
# larger than the codes of one layer of the longest segment.
@functools.lru_cache(maxsize=256)
def chunks_of(layout: CodeLayout) -> CodeChunks:
    """Where the chunks of a layer's codes stand."""
    pages = np.full(layout.num_pages, layout.page_bytes // BLOCK_BYTES)
    pages[-1] = layout.base_bytes // BLOCK_BYTES - pages[:-1].sum()
    units = np.full(layout.total_units, layout.unit_stride // BLOCK_BYTES)
    count = np.concatenate([pages, units]).astype(np.int64)
    return CodeChunks(np.cumsum(count) - count, count)


def cached_pages(layout: CodeLayout, num_layers: int) -> npt.NDArray[np.uint16]:
    """Pages that each chunk of all layers takes in a cache."""
    return np.tile(chunks_of(layout).count.astype(np.uint16), num_layers)


def most_pages(layout: CodeLayout) -> int:
    """Pages of the largest chunk of any segment of the same shape."""
    return max(layout.page_bytes, layout.unit_stride) // BLOCK_BYTES


@dataclasses.dataclass(frozen=True)
class CodedSpan:
    """The tokens [start, stop) of a segment whose first chunk of codes has the id `base`."""

    segment: OpenSegment
    start: int
    stop: int
    base: int

    def __len__(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def layout(self) -> CodeLayout:
        """The layout of the codes of a layer."""
        layout = self.segment.layout.codes
        assert layout is not None, "the segment has no codes"
        return layout

    @functools.cached_property
    def chunks(self) -> CodeChunks:
        """Where the codes of a layer stand."""
        return chunks_of(self.layout)

    @functools.cached_property
    def groups(self) -> range:
        """The groups that have tokens of the span."""
        return range(self.start // GROUP_TOKENS, -(-self.stop // GROUP_TOKENS))

    @functools.cached_property
    def units(self) -> range:
        """The units of a head that have tokens of the span."""
        size = self.layout.unit_tokens
        return range(self.start // size, -(-self.stop // size))

    @functools.cached_property
    def pages(self) -> Indices:
        """The chunks of the base that have tokens of the span."""
        per_page = self.layout.page_groups
        return np.arange(self.groups[0] // per_page, self.groups[-1] // per_page + 1)

    @functools.cached_property
    def spared_blocks(self) -> Flags:
        """Blocks of the base in a layer that hold nothing of `groups`, even if in their pages."""
        layout, blocks = self.layout, np.zeros(self.chunks.num_blocks, np.bool_)
        blocks[: layout.base_bytes // BLOCK_BYTES] = True
        first = layout.group_offset(self.groups[0]) // BLOCK_BYTES
        last = layout.group_offset(self.groups[-1]) + layout.group_bytes
        blocks[first : -(-last // BLOCK_BYTES)] = False
        return blocks

    @functools.cached_property
    def no_blocks(self) -> Flags:
        """None of the blocks of a layer."""
        return np.zeros(self.chunks.num_blocks, np.bool_)

    def levels(self, layer: int, planes: int) -> Floors:
        """How many planes each head has if `planes` are read of a layer, uint8 [G]."""
        return levels_of(self.segment.floors[layer], planes)

    def wanted_units(self, layer: int, planes: int) -> Indices:
        """Units of the floors and the first `planes`, int64 [n, 3]: plane, head, unit."""
        return areas.units_below(self.levels(layer, planes), self.units.start, self.units.stop)

    def wanted_chunks(self, layer: int, planes: int) -> Indices:
        """Chunks of the base, the floors and the first `planes`."""
        units = self.unit_chunks(self.wanted_units(layer, planes))
        return np.concatenate([self.pages, units])

    def unit_chunks(self, raised: Indices) -> Indices:
        """The chunks of units, int64 [n, 3]: plane, head and unit."""
        layout = self.layout
        return areas.unit_places(raised, layout.num_heads, layout.num_units, layout.num_pages)


def levels_of(floors: Floors, planes: int) -> Floors:
    """How many planes heads with these floors, uint8 [...], have if `planes` are read."""
    return np.minimum(floors + np.uint8(planes), np.uint8(NUM_PLANES))
