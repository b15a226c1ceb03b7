"""Host memory that an accelerator reads by itself."""

from __future__ import annotations

import weakref

import torch

from impress_sglang.errors import ConfigError
from impress_sglang.storage.direct_io import AlignedMemory


def pin_memory(memory: AlignedMemory) -> None:
    """Lock memory for the current CUDA device, which then reads it by itself; for good.

    torch's own pinned tensors would take the next power of two of bytes.

    Raises:
        ConfigError: the system does not lock so much memory.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(memory.address, len(memory), 0)
    if int(error) != 0:
        raise ConfigError(
            f"{len(memory) / 1e6:.0f} MB of host memory cannot be pinned (CUDA: {int(error)}); "
            "lower --impress-host-gb or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.address)
