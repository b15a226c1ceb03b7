"""The bytes of one token in one layer, a *row*, and the levels of its codes.

A row has six gains of 5 bits, as one little-endian uint32 with the first in its lowest bits, then
three *areas*: nibbles, crumbs of 2 bits, single bits. A code is split from its top bits:

    bits   8                 7                    6              5            4       3
           nibble, nibble    nibble, crumb, bit   nibble, crumb  nibble, bit  nibble  crumb, bit

and 2 bits are a crumb, 1 is a bit. An area has W bytes, as few as possible, and its element e in
byte e % W from bit (e // W) * width on, so that neighbouring bytes have parts of neighbouring
components. The remaining bits of an area are zero.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops import rows as loops
from impress_sglang.loops.types import Float32s, Int32s, Uint64s

# Scalar quantisers of a normal distribution: p, q and r of 0 to 8 bits, float32 [9, 3]. Levels of b
# bits are u (p + q u^2) / (1 - r u^2) at the centres u = (2 c + 1 - 2^b) / 2^b of codes c. The mean
# square error is within a percent of the minimum (Max 1960), and loops compute levels in vectors,
# without a table. Cells end half-way between levels.
CURVES = np.array(
    [
        (1.0, 0.0, 0.0),
        (1.5957692, 0.0, 0.0),
        (1.7934, -0.6910, 0.5377),
        (1.9555, -0.6107, 0.5159),
        (2.0620, -0.8871, 0.6372),
        (2.1352, -1.1435, 0.7291),
        (2.1891, -1.3523, 0.7928),
        (2.2301, -1.5085, 0.8350),
        (2.2618, -1.6224, 0.8632),
    ],
    np.float32,
)
MAX_BITS = len(CURVES) - 1


def _levels(bits: int) -> Float32s:
    p, q, r = CURVES[bits]
    size = 1 << bits
    centres = ((2 * np.arange(size) + 1 - size) / size).astype(np.float32)
    square = centres * centres
    levels: Float32s = centres * (p + q * square) / (1 - r * square)
    return levels


# By bits b: levels, float32 [2**b], ascending, and the bounds between them, float32 [2**b - 1].
LEVELS = [_levels(bits) for bits in range(MAX_BITS + 1)]
BOUNDS = [(levels[1:] + levels[:-1]) / 2 for levels in LEVELS]
# float32 [511]: the levels of 0 to 8 bits; those of b bits begin at 2**b - 1.
LEVEL_TABLE = np.concatenate(LEVELS)

GAINS = 6
GAIN_BITS = 5
_GAIN_BYTES = 4


class RowTables(NamedTuple):
    """Places of codes in a row, for `loops.rows.unpack`.

    Attributes:
        areas: uint64 [3, 4], for the areas of nibbles, crumbs and bits: first byte, number of
            bytes, width of an element in bits, and index of the first part.
        runs: uint64 [n, 6], for runs of components with equal bits: first component, number of
            components, indices of the first one's nibble, crumb and bit among the parts, and bits.
        bounds: uint64 [7], `group_bounds`.
        parts: number of parts of a row; the last ones are zeros, for codes without a part.
    """

    areas: Uint64s
    runs: Uint64s
    bounds: Uint64s
    parts: int


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Places of codes in a row.

    `bits`: bits of each component, 1 to 8, descending.
    """

    bits: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(1 <= bits <= MAX_BITS for bits in self.bits)
        assert list(self.bits) == sorted(self.bits, reverse=True)

    @functools.cached_property
    def _places(self) -> tuple[Int32s, RowTables]:
        bits, count = self.bits, len(self.bits)
        parts, begin, num_parts, areas = np.full((count, 4, 2), -1, np.int32), _GAIN_BYTES, 0, []
        first_parts = np.full((count, 3), -1, np.int64)
        # Whether each code has a high nibble, low nibble, crumb and bit.
        has = np.array([(width >= 4, width == 8, width & 2, width & 1) for width in bits], np.bool_)
        for area, (width, first, stop) in enumerate(((4, 0, 2), (2, 2, 3), (1, 3, 4))):
            chosen = parts[:, first:stop]
            present = has.reshape(-1, 4)[:, first:stop]
            element = np.arange(present.sum())
            size = -(-len(element) * width // 8)
            chosen[present, 0] = begin + element % max(size, 1)
            chosen[present, 1] = element // max(size, 1) * width
            # The high nibble of a code comes before its low one.
            before = present.sum(1).cumsum() - present.sum(1)
            first_parts[:, area] = np.where(present[:, 0], num_parts + before, -1)
            areas.append((begin, size, width, num_parts))
            begin += size
            num_parts += size * (8 // width)
        first_parts[first_parts < 0] = num_parts
        runs = []
        for width in sorted(set(bits), reverse=True):
            start = bits.index(width)
            runs.append((start, bits.count(width), *first_parts[start].tolist(), width))
        tables = RowTables(
            np.array(areas, np.uint64),
            np.array(runs, np.uint64).reshape(-1, 6),
            np.array(group_bounds(count), np.uint64),
            num_parts + count,
        )
        return parts, tables

    @property
    def row_bytes(self) -> int:
        last = self._places[1].areas[-1]
        return int(last[0] + last[1])

    def parts(self) -> Int32s:
        """Return the place of each component's high nibble, low nibble, crumb and bit.

        int32 [C, 4, 2]: byte in the row and lowest bit in that byte; -1 and -1 without such a part.
        """
        return self._places[0]

    def tables(self) -> RowTables:
        return self._places[1]

    def pack(self, codes: Tensor, gains: Tensor) -> Tensor:
        """Write codes uint8 [t, C], each below 2**bits, and gains uint8 [t, GAINS], each below 32.

        Returns rows, uint8 [t, row_bytes]. All tensors are on the CPU.
        """
        rows, bits = torch.zeros(len(codes), self.row_bytes).byte(), np.array(self.bits, np.uint8)
        loops.pack(codes.numpy(), gains.numpy(), bits, self.parts(), rows.numpy())
        return rows


def gains_of(rows: Tensor) -> Tensor:
    """Return the gains of rows of any layout, uint8 [t, GAINS]."""
    places = torch.arange(GAINS, dtype=torch.int32, device=rows.device) * GAIN_BITS
    byte = torch.arange(_GAIN_BYTES, dtype=torch.int32, device=rows.device) * 8
    words = (rows[:, :_GAIN_BYTES].int() << byte).sum(1, keepdim=True, dtype=torch.int32)
    return (words >> places & (1 << GAIN_BITS) - 1).to(torch.uint8)


def group_bounds(components: int) -> list[int]:
    """Return the first components of the groups that share a gain, and the end of the last group.

    Component i belongs to group i * GAINS // components.
    """
    return [-(-group * components // GAINS) for group in range(GAINS + 1)]
