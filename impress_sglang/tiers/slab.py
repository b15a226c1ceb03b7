"""The memory of a cache: one tensor cut into pages, instead of a tensor per chunk.

A chunk is a sequence of vectors of `unit` elements, token after token and head after head; a page
holds `page_vectors` of them. The pages of a chunk need not be neighbours, so that chunks of columns
with different numbers of heads share the memory without fragments.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.errors import ConfigError
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES, Column, KVShape, SegmentLayout, round_up
from impress_sglang.tiers.pinning import pin_memory


@dataclasses.dataclass(frozen=True, slots=True)
class PageShape:
    """What a page holds: `page_vectors` vectors of `unit` elements of `dtype`."""

    unit: int
    page_vectors: int
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: KVShape, chunk_tokens: int) -> PageShape:
        """Pages of one head's part of a chunk."""
        return cls(math.gcd(shape.key_dim, shape.value_dim), chunk_tokens, shape.dtype)

    @property
    def elements(self) -> int:
        """Elements of a page."""
        return self.unit * self.page_vectors

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.elements * self.dtype.itemsize

    def row_vectors(self, shape: KVShape, column: Column) -> int:
        """Vectors of one token in a column."""
        return self.row_vectors_of(len(shape.heads(column)) * shape.head_dim(column))

    def row_vectors_of(self, elements: int) -> int:
        """Vectors of a row of `elements`; also the pages of a full chunk of such rows."""
        return elements // self.unit

    def max_chunk_pages(self, shape: KVShape) -> int:
        """Pages of the largest chunk of `page_vectors` tokens."""
        return max(self.row_vectors(shape, column) for column in shape.columns)

    def chunk_pages(self, layout: SegmentLayout) -> npt.NDArray[np.uint16]:
        """Pages of every chunk of a segment, in the order of `layout.chunk_index`."""
        rows = np.full(layout.num_chunks, layout.chunk_tokens)
        rows[-1] = layout.chunk_rows(layout.num_chunks - 1)
        columns = []
        for column in layout.shape.columns:
            columns.append(-(-rows * self.row_vectors(layout.shape, column) // self.page_vectors))
        return np.tile(np.concatenate(columns), layout.shape.num_layers).astype(np.uint16)


class Slab:
    """Pages on one device."""

    pages: Tensor
    """[pages, page_vectors * unit]."""

    def __init__(
        self, page: PageShape, num_pages: int, device: torch.device, *, option: str, pin: bool
    ) -> None:
        """Allocate the pages; `pin`: pin host memory, so that an accelerator reads it directly.

        Raises:
            ConfigError: there is not enough memory; the message names `option`.
        """
        size = (num_pages, page.elements)
        num_bytes = num_pages * page.page_bytes
        try:
            if device.type == "cpu" and num_pages:
                # The tensor keeps the bytes alive; they stay pinned as long as this object exists.
                self._memory = _host_memory(num_bytes, pin=pin)
                flat = torch.frombuffer(self._memory.view, dtype=page.dtype, count=math.prod(size))
                self.pages = flat.view(size)
            else:
                self.pages = torch.empty(size, dtype=page.dtype, device=device)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"{num_bytes / 1e9:.1f} GB for chunks cannot be allocated on {device}; lower "
                f"{option}: {error}"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.pages.device

    @property
    def address(self) -> int:
        """The address at which the first page begins in memory."""
        return self.pages.data_ptr()


def _host_memory(num_bytes: int, *, pin: bool) -> AlignedMemory:
    """Memory that is there, not only promised, so that no request waits for it later.

    Raises:
        OSError: the system refused.
    """
    memory = AlignedMemory(round_up(num_bytes, BLOCK_BYTES))
    if pin:
        pin_memory(memory)
    else:
        memory.words[:: BLOCK_BYTES // memory.words.itemsize] = 0
    return memory
