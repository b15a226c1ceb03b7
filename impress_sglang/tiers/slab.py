"""The memory of a cache: one tensor cut into pages, instead of a tensor per chunk.

The pages of a chunk need not be neighbours, so that chunks of different sizes share the memory
without fragments.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from impress_sglang.errors import ConfigError
from impress_sglang.storage.files import AlignedMemory
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


class Slab:
    """Pages on one device."""

    pages: Tensor
    """uint8 [pages, page_bytes]."""

    def __init__(
        self, page_bytes: int, num_pages: int, device: torch.device, *, option: str, pin: bool
    ) -> None:
        """Allocate the pages; `pin`: pin host memory, so that an accelerator reads it directly.

        Raises:
            ConfigError: there is not enough memory; the message names `option`.
        """
        num_bytes = num_pages * page_bytes
        try:
            if device.type == "cpu" and num_pages:
                # The tensor keeps the bytes alive; they stay pinned as long as this object exists.
                self._memory = _host_memory(num_bytes, pin=pin)
                flat = torch.frombuffer(self._memory.view, dtype=torch.uint8, count=num_bytes)
                self.pages = flat.view(num_pages, page_bytes)
            else:
                size = num_pages, page_bytes
                self.pages = torch.empty(size, dtype=torch.uint8, device=device)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"{num_bytes / 1e9:.1f} GB for chunks cannot be allocated on {device}; lower "
                f"{option}: {error}"
            ) from error

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
