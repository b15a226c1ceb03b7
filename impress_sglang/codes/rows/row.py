"""The bytes of one token in one layer, a *row*.

A row has six gains of 5 bits, as one little-endian uint32 with the first in its lowest bits, then
three *areas*: nibbles, crumbs of 2 bits, single bits. A code is cut from its top:

    bits   8                 7                    6              5            4       3
           nibble, nibble    nibble, crumb, bit   nibble, crumb  nibble, bit  nibble  crumb, bit

and 2 bits are a crumb, 1 is a bit. An area of W bytes, the fewest that hold it, has element e of it
in byte e % W, from bit (e // W) * width on: a kernel that reads neighbouring bytes has the parts of
neighbouring components. The rest of an area is zero.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impress_sglang.codes.rows.levels import MAX_BITS
from impress_sglang.loops import rows as loops

GAINS = 6
GAIN_BITS = 5
_GAIN_BYTES = 4
# The parts that a code may have, and their widths: high nibble, low nibble, crumb, bit.
HIGH, LOW, CRUMB, BIT = range(4)
_WIDTHS = (4, 2, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Area:
    """Elements of one width: component, kind of part, and lowest bit in the code, each [n]."""

    width: int
    begin: int
    components: Tensor
    kinds: Tensor
    low_bits: Tensor

    @property
    def bytes(self) -> int:
        return -(-len(self.components) * self.width // 8)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Components [n], lowest bits uint8 [n], and shifts in a byte uint8 [8 / width, 1]."""
        shifts = torch.arange(0, 8, self.width, dtype=torch.uint8, device=device)[:, None]
        low = self.low_bits.to(device, torch.uint8)
        return self.components.to(device), low, shifts


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where codes are in a row.

    `bits`: of each component, 1 to 8, descending.
    """

    bits: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(1 <= bits <= MAX_BITS for bits in self.bits)
        assert list(self.bits) == sorted(self.bits, reverse=True)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        last = self._areas[-1]
        return last.begin + last.bytes

    @functools.cached_property
    def _areas(self) -> tuple[_Area, ...]:
        begin, found = _GAIN_BYTES, []
        for width in _WIDTHS:
            elements = []
            for component, bits in enumerate(self.bits):
                left = bits
                for kind, own in ((HIGH, 4), (LOW, 4), (CRUMB, 2), (BIT, 1)):
                    if left >= own:
                        left -= own
                        if own == width:
                            elements.append((component, kind, left))
            table = torch.tensor(elements, dtype=torch.int64).reshape(-1, 3)
            found.append(_Area(width, begin, table[:, 0], table[:, 1], table[:, 2]))
            begin += found[-1].bytes
        return tuple(found)

    def parts(self) -> NDArray[np.int32]:
        """Where each component is, for kernels: int32 [C, 4, 2].

        Of high nibble, low nibble, crumb and bit the byte in the row and the lowest bit in that
        byte, or -1 and -1 if the code has no such part.
        """
        found = np.full((len(self.bits), 4, 2), -1, np.int32)
        for area in self._areas:
            element = np.arange(len(area.components))
            where = area.components.numpy(), area.kinds.numpy()
            found[*where, 0] = area.begin + element % max(area.bytes, 1)
            found[*where, 1] = element // max(area.bytes, 1) * area.width
        return found

    def pack(self, codes: Tensor, gains: Tensor) -> Tensor:
        """Write rows, uint8 [t, row_bytes]; all is on the CPU.

        Args:
            codes: uint8 [t, C], each below 2**bits.
            gains: uint8 [t, GAINS], each below 32.
        """
        rows, bits = torch.zeros(len(codes), self.row_bytes).byte(), np.array(self.bits, np.uint8)
        loops.pack(codes.numpy(), gains.numpy(), bits, self.parts(), rows.numpy())
        return rows

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Read what `pack` has written: codes uint8 [t, C] and gains uint8 [t, GAINS]."""
        codes = rows.new_zeros(len(rows), len(self.bits))
        for area in self._areas:
            components, low, shifts = area.on(rows.device)
            own = rows[:, None, area.begin : area.begin + area.bytes]
            values = (own >> shifts & (1 << area.width) - 1).flatten(1)[:, : len(components)]
            # Parts of a code share no bits, so their sum is the code.
            codes.index_add_(1, components, values << low)
        return codes, gains_of(rows)


def gains_of(rows: Tensor) -> Tensor:
    """The gains of rows of any layout, uint8 [t, GAINS]."""
    places = torch.arange(GAINS, dtype=torch.int32, device=rows.device) * GAIN_BITS
    byte = torch.arange(_GAIN_BYTES, dtype=torch.int32, device=rows.device) * 8
    words = (rows[:, :_GAIN_BYTES].int() << byte).sum(1, keepdim=True, dtype=torch.int32)
    return (words >> places & (1 << GAIN_BITS) - 1).to(torch.uint8)
