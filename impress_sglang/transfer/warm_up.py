"""Compiles the kernels that load prefixes, before the first request needs them.

A kernel is compiled for the dtypes and sizes of a model, and for how its arguments are aligned.
tests/unit/triton/test_warm_up.py compares what is compiled with what requests launch.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from impress_sglang.codes.coding import Rows
from impress_sglang.errors import UnsupportedError
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.tiers.copying import PageCopier
from impress_sglang.transfer.codecs import Codec
from impress_sglang.transfer.sources import Piece

logger = logging.getLogger(__name__)

# How many made-up tokens are restored.
TOKENS = 20


def warm_up(shape: KVShape, device: torch.device, codec: Codec | None) -> None:
    """Compile all kernels with which prefixes are loaded on a device; on a CPU there are none.

    It raises `UnsupportedError` if a kernel of this shape does not fit into the device.
    """
    if device.type == "cuda":
        began = time.perf_counter()
        launch_all(shape, device, codec)
        torch.cuda.synchronize(device)
        logger.info("kernels that load prefixes are compiled (%.1f s)", time.perf_counter() - began)


def launch_all(shape: KVShape, device: torch.device, codec: Codec | None) -> None:
    """Launch all kernels in all their variants, also in Triton's interpreter; see `warm_up`."""
    from triton.runtime.errors import OutOfResources

    what, instead = "KVs", "--impress-policy recompute, which loads none"
    try:
        blocks = torch.zeros(2, BLOCK_BYTES, dtype=torch.uint8, device=device)
        source, target = (np.array([own.data_ptr()]) for own in blocks)
        PageCopier(BLOCK_BYTES, device, kernels=True).copy(source, target).wait()
        if codec is not None:
            what, instead = "codes", codec.instead
            keys, values = (
                torch.zeros(TOKENS, shape.num_kv_heads, dim, dtype=shape.dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            rows, state = Rows(keys, values, torch.arange(TOKENS, device=device)), None
            # Those of some layers differ.
            for layer, size in enumerate(shape.code_bytes):
                groups = blocks.new_zeros(TOKENS, size)
                state = codec.restore(layer, [Piece([groups], 0, 0, TOKENS)], rows, state)
    except OutOfResources as error:
        raise UnsupportedError(
            f"the kernel for loading {what} does not fit into this GPU: for {shape.group_size} "
            f"query heads per KV head and {shape.key_dim} elements per key ({shape.dtype}) it "
            f"takes {error.required} of {error.name}, and there is {error.limit}; use {instead}"
        ) from error
