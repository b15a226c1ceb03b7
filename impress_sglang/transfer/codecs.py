"""Interface of codecs for the stages that store and load, the codec without a basis, and the
warm-up that compiles load kernels before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.coding import EncodedLayer, LayerEncoder, Rows
from impress_sglang.codes.groups.codec import GROUP_TOKENS, GroupLayout, encode_layer
from impress_sglang.errors import UnsupportedError
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.tiers.copying import PageCopier
from impress_sglang.transfer.sources import Piece

logger = logging.getLogger(__name__)

# Number of made-up tokens to restore.
TOKENS = 20
# Returns the energy of channels, given a layer and the shape [G, Dk] of its keys; None if unknown.
Energy = Callable[[int, torch.Size], Tensor | None]


class Codec(Protocol):
    """Encodes KVs of one model, and restores them."""

    by_energy: bool
    """Whether it codes by the energy of queries, which must then be measured."""
    worst_error: float
    """Highest mean error of random KVs, as a share of their norm."""
    instead: str
    """Options of a server that needs no such codec."""

    def layer_encoder(self, first: int, energy: Energy, *, alone: bool = False) -> LayerEncoder:
        """Make the function that codes a segment whose first token is number `first` of a prompt.

        It is for one segment, layers in ascending order. It raises `NotCodable` if codes stand
        `alone` and would be too far from the KVs.
        """

    def restore(self, layer: int, pieces: Sequence[Piece], rows: Rows, state: Any = None) -> Any:
        """Decode a layer into rows, by loops, or by kernels on a GPU.

        `state` is the result for the layer below of the same tokens; one thread restores.
        """


class GroupCodec:
    """Codes each group of tokens independently, and channels by their energy."""

    by_energy, worst_error = True, 0.15
    instead = "--impress-policy paper, which has none"

    def __init__(self, layout: GroupLayout, *, kernels: bool | None = None) -> None:
        """`kernels`: whether kernels restore; None means on a GPU."""
        self._layout, self._kernels = layout, kernels

    def layer_encoder(self, first: int, energy: Energy, *, alone: bool = False) -> LayerEncoder:
        """See `Codec.layer_encoder`; everything can be coded."""

        def code(layer: int, keys: Tensor, values: Tensor) -> EncodedLayer:
            return EncodedLayer(
                encode_layer(self._layout, keys, values, energy(layer, keys.shape[1:]))
            )

        return code

    def restore(self, layer: int, pieces: Sequence[Piece], rows: Rows, state: Any = None) -> None:
        """See `Codec.restore`; there is no state."""
        module: Any
        # Imported only where it is used: Numba is not needed on a GPU, Triton not on a CPU.
        if rows.slots.is_cuda if self._kernels is None else self._kernels:
            from impress_sglang.triton import groups as module
        else:
            from impress_sglang.codes.groups import slots as module
        parts: Sequence[Tensor] = rows.slots.split([piece.length for piece in pieces])
        for piece, slots in zip(pieces, parts, strict=True):
            place = piece.start % GROUP_TOKENS, slots, rows.keys, rows.values
            module.restore(self._layout, piece.parts[0], *place)


def plain_codec(shape: KVShape, *, kernels: bool | None = None) -> Codec | None:
    """Return the codec without a basis, if a shape has its codes; `kernels`: see `GroupCodec`."""
    return (
        GroupCodec(shape.group_layout, kernels=kernels) if shape.coded and not shape.basis else None
    )


def warm_up(shape: KVShape, device: torch.device, codec: Codec | None) -> None:
    """Compile all kernels that load prefixes on a device; a CPU needs none.

    A kernel is compiled for the dtypes and sizes of a model, and for the alignment of arguments;
    tests/unit/triton/test_warm_up.py compares that with the launches of requests. It raises
    `UnsupportedError` if a kernel of this shape does not fit into the device.
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
        source, target = (np.array([block.data_ptr()]) for block in blocks)
        PageCopier(BLOCK_BYTES, device, kernels=True).copy(source, target).wait()
        if codec is not None:
            what, instead = "codes", codec.instead
            keys, values = (
                torch.zeros(TOKENS, shape.num_kv_heads, dim, dtype=shape.dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            rows, state = Rows(keys, values, torch.arange(TOKENS, device=device)), None
            # Kernels of some layers differ.
            for layer, size in enumerate(shape.code_bytes):
                groups = blocks.new_zeros(TOKENS, size)
                state = codec.restore(layer, [Piece([groups], 0, 0, TOKENS)], rows, state)
    except OutOfResources as error:
        raise UnsupportedError(
            f"the kernel for loading {what} does not fit into this GPU: for {shape.group_size} "
            f"query heads per KV head and {shape.key_dim} elements per key ({shape.dtype}) it "
            f"takes {error.required} of {error.name}, and there is {error.limit}; use {instead}"
        ) from error
