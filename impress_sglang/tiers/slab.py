"""The memory of a cache: one tensor cut into pages, instead of a tensor per chunk.

The pages of a chunk need not be neighbours, so that chunks of different sizes share the memory
without fragments.
"""

from __future__ import annotations

import dataclasses
import math
import weakref

import torch
from torch import Tensor

from impress_sglang.errors import ConfigError
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES, round_up


def pin_memory(memory: AlignedMemory) -> None:
    """Pin memory, as long as it exists, so that the current CUDA device reads it directly.

    torch's own pinned tensors would take the next power of two of bytes.

    Raises:
        ConfigError: the system does not allow so much pinned memory.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(memory.address, len(memory), 0)
    if int(error) != 0:
        raise ConfigError(
            f"{len(memory) / 1e6:.0f} MB of host memory cannot be pinned (CUDA: {int(error)}); "
            "lower --impress-host-gb or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.address)


@dataclasses.dataclass(frozen=True, slots=True)
class PageShape:
    """What a page holds: `page_vectors` vectors of `unit` elements of `dtype`."""

    unit: int
    page_vectors: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Elements of a page."""
        return self.unit * self.page_vectors

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.elements * self.dtype.itemsize


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
