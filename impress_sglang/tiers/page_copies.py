"""Copies pages with a kernel, from any memory that the device can read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.tiers.fence import to_device
from impress_sglang.tiers.slab import PageShape
from impress_sglang.triton import gather

_Integers = npt.NDArray[np.signedinteger]
# A page is moved in pieces of at most this many bytes, each by a part of a program.
PIECE_BYTES = 4096

PageCopy = tuple[Tensor, _Integers | None, _Integers]
"""Pages [p, elements], the numbers of those to fill (None: all), and each one's source address."""


class PageCopier:
    """Launches on the current stream; nothing is waited for."""

    def __init__(self, page: PageShape, device: torch.device) -> None:
        self._device = device
        self._width = page.elements
        size = page.dtype.itemsize
        while self._width * size > PIECE_BYTES and not self._width % 2:
            self._width //= 2
        self._pieces = page.elements // self._width
        self._piece_bytes = self._width * size

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Fill pages of one or two pools from the addresses of whole pages."""
        columns = gather.even_columns(self._pieces, self._width, self._device)
        inside = np.arange(self._pieces) * self._piece_bytes
        addresses = [own[:, None] + inside for _, _, own in copies]
        numbers = [own for _, own, _ in copies if own is not None]
        uploaded = iter(upload([*addresses, *numbers], self._device))
        sources = [next(uploaded) for _ in copies]
        targets = [
            gather.Target(pages, columns, source, None if own is None else next(uploaded))
            for (pages, own, _), source in zip(copies, sources, strict=True)
        ]
        grain = math.gcd(self._piece_bytes, *(_grain(own) for _, _, own in copies))
        gather.gather(targets, self._width, grain_bytes=grain)


def _grain(addresses: _Integers) -> int:
    """The largest power of two that divides all addresses, at most a word of the kernel."""
    bits = int(np.bitwise_or.reduce(addresses, initial=gather.WORD_BYTES))
    return bits & -bits


def upload(indices: Sequence[_Integers], device: torch.device) -> list[Tensor]:
    """Copy indices of any integer type to a device as int64, in one copy without waiting."""
    joined = np.concatenate([own.reshape(-1).astype(np.int64, copy=False) for own in indices])
    parts = to_device(torch.from_numpy(joined), device).split([own.size for own in indices])
    return [part.view(own.shape) for part, own in zip(parts, indices, strict=True)]
