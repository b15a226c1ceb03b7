"""What of a segment is read in codes: the chunks of a layer's codes, and spans of tokens.

Stage: load.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from impress_sglang.codes.planes.codec import NUM_PLANES
from impress_sglang.codes.planes.floors import Floors
from impress_sglang.codes.planes.layout import CodeLayout
from impress_sglang.loops import areas
from impress_sglang.loops.types import Flags, Indices, Uint8s
from impress_sglang.storage.layout import BLOCK_BYTES, AnyCodes
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


# With a basis each layer of a segment has a layout of its own. An entry takes 16 bytes per unit or
# page, which have 4 KiB or more: all entries together are no larger than the codes of four layers
# of the longest segment.
@functools.lru_cache(maxsize=1024)
def chunks_of(layout: AnyCodes) -> CodeChunks:
    """Where the chunks of a layer's codes stand."""
    pages = np.full(layout.num_pages, layout.page_bytes // BLOCK_BYTES)
    pages[-1] = layout.base_bytes // BLOCK_BYTES - pages[:-1].sum()
    units = np.full(layout.total_units, _unit_blocks(layout))
    count = np.concatenate([pages, units]).astype(np.int64)
    return CodeChunks(np.cumsum(count) - count, count)


@functools.lru_cache(maxsize=256)
def cached_pages(layouts: tuple[AnyCodes, ...]) -> npt.NDArray[np.uint16]:
    """Pages that each chunk of all layers takes in a cache."""
    return np.concatenate([chunks_of(own).count for own in layouts]).astype(np.uint16)


def most_pages(layout: AnyCodes) -> int:
    """Pages of the largest chunk of any segment of the same shape."""
    return max(layout.page_bytes // BLOCK_BYTES, _unit_blocks(layout))


def _unit_blocks(layout: AnyCodes) -> int:
    return layout.unit_stride // BLOCK_BYTES if isinstance(layout, CodeLayout) else 0


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
    def layout(self) -> AnyCodes:
        """The layout of the codes of layer 0; pages have as many tokens in all layers."""
        return self.layout_of(0)

    def layout_of(self, layer: int) -> AnyCodes:
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
    def units(self) -> range:
        """The units of a head that have tokens of the span."""
        if not isinstance(self.layout, CodeLayout):
            return range(0)
        size = self.layout.unit_tokens
        return range(self.start // size, -(-self.stop // size))

    @functools.cached_property
    def pages(self) -> Indices:
        """The chunks of the base that have tokens of the span."""
        per_page = self.layout.page_groups
        return np.arange(self.groups[0] // per_page, self.groups[-1] // per_page + 1)

    def spared_blocks(self, layer: int) -> Flags:
        """Blocks of the base in a layer that hold nothing of `groups`, even if in their pages."""
        return _spared_blocks(self.layout_of(layer), self.groups)

    def no_blocks(self, layer: int) -> Flags:
        """None of the blocks of a layer."""
        return np.zeros(self.chunks(layer).num_blocks, np.bool_)

    def levels(self, layer: int, planes: int) -> Floors:
        """How many planes each head has if `planes` are read of a layer, uint8 [G]."""
        return levels_of(self.segment.floors[layer], planes)

    def wanted_units(self, layer: int, planes: int) -> Indices:
        """Units of the floors and the first `planes`, int64 [n, 3]: plane, head, unit."""
        if not self.units:
            return np.empty((0, 3), np.int64)
        return areas.units_below(self.levels(layer, planes), self.units.start, self.units.stop)

    def wanted_chunks(self, layer: int, planes: int) -> Indices:
        """Chunks of the base, the floors and the first `planes`."""
        units = self.wanted_units(layer, planes)
        return np.concatenate([self.pages, self.unit_chunks(units)]) if len(units) else self.pages

    def unit_chunks(self, raised: Indices) -> Indices:
        """The chunks of units, int64 [n, 3]: plane, head and unit."""
        layout = self.layout
        assert isinstance(layout, CodeLayout)
        return areas.unit_places(raised, layout.num_heads, layout.num_units, layout.num_pages)


@functools.lru_cache(maxsize=1024)
def _spared_blocks(layout: AnyCodes, groups: range) -> Flags:
    blocks = np.zeros(chunks_of(layout).num_blocks, np.bool_)
    blocks[: layout.base_bytes // BLOCK_BYTES] = True
    first = layout.group_offset(groups[0]) // BLOCK_BYTES
    last = layout.group_offset(groups[-1]) + layout.group_bytes
    blocks[first : -(-last // BLOCK_BYTES)] = False
    return blocks


def levels_of(floors: Floors, planes: int) -> Floors:
    """How many planes heads with these floors, uint8 [...], have if `planes` are read."""
    return np.minimum(floors + np.uint8(planes), np.uint8(NUM_PLANES))
