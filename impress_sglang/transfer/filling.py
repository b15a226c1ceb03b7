"""Fills slots of a pool with whole layers of a stored prefix, exact or from codes.

Stage: load. Rows are ordinary: attention does not need to know.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TypeAlias

import torch
from torch import Tensor

from impress_sglang.options import EXACT_BITS
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.kv_codec import KernelRestorer, KVCodec, LoopRestorer
from impress_sglang.transfer.sources import (
    CodedSource,
    ExactSource,
    GroupRestorer,
    Restorer,
    Writing,
)

AnySource: TypeAlias = ExactSource | CodedSource


@dataclasses.dataclass(slots=True)
class FillStats:
    """What filling took: seconds, those of waiting for the drive among them, and bits.

    `bits` are those of an element of what was filled in.
    """

    seconds: float = 0.0
    bits: float = EXACT_BITS


class SlotFiller:
    """Fills layers of slots, one source after the other; one thread."""

    def __init__(
        self,
        shape: KVShape,
        device: torch.device,
        codec: KVCodec | None = None,
        *,
        kernels: bool | None = None,
    ) -> None:
        """Choose what restores.

        Args:
            shape: of the KVs.
            device: where the pools are.
            codec: of a store with a basis.
            kernels: whether kernels restore; None: on a GPU.
        """
        self._shape, self._device, self._codec = shape, device, codec
        self._kernels = device.type == "cuda" if kernels is None else kernels

    @functools.cached_property
    def _restorer(self) -> Restorer:
        # Not made before it is needed: it imports Numba or Triton.
        if self._codec is None:
            return GroupRestorer(self._shape, kernels=self._kernels)
        return (KernelRestorer if self._kernels else LoopRestorer)(self._codec, self._device)

    def fill(
        self,
        layer: int,
        source: AnySource,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        stats: FillStats,
        writing: Writing,
    ) -> None:
        """Fill the slots of all tokens of a source, in a layer.

        Args:
            layer: from 0; ascending for each source.
            source: all of whose tokens are wanted.
            keys: pool [rows, G, Dk].
            values: pool [rows, G, Dv].
            slots: int64 [source.num_tokens], rows of the pools, distinct.
            stats: is changed.
            writing: what it makes is entered while slots are written; may raise.

        Raises:
            PrefixUnreadable: a block is missing, short or corrupt, or cannot be read now; what is
                in the slots of this layer is undefined.
        """
        began = time.perf_counter()
        try:
            if isinstance(source, CodedSource):
                stats.bits = self._shape.code_bits
                source.fill(layer, keys, values, slots, writing, self._restorer)
            else:
                source.fill(layer, keys, values, slots, writing)
        finally:
            stats.seconds += time.perf_counter() - began
