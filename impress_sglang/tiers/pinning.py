"""Host memory that an accelerator reads directly."""

from __future__ import annotations

import weakref

import torch

from impress_sglang.errors import ConfigError
from impress_sglang.storage.direct_io import AlignedMemory


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
