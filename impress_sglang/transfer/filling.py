"""Fills slots of a pool with whole layers of a stored prefix, exact or from codes.

Stage: load. Rows are ordinary: attention does not need to know.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from impress_sglang.options import EXACT_BITS
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_slots import CodeWriter, code_writer_for, put_codes
from impress_sglang.transfer.columns import ExactSource
from impress_sglang.transfer.kv_codec import KVCodec, RowRestorer, layer_restorer_for


@dataclasses.dataclass(slots=True)
class FillStats:
    """What filling took: seconds, those of waiting for the drive among them, and bits.

    `bits` are those of an element of what was filled in.
    """

    seconds: float = 0.0
    bits: float = EXACT_BITS


class SlotFiller:
    """Fills layers of slots, one source after the other; one thread."""

    def __init__(self, shape: KVShape, device: torch.device, codec: KVCodec | None = None) -> None:
        """`device`: where the pools are; `codec`: of a store with a basis."""
        self._shape = shape
        self._device = device
        self._rows: RowRestorer | None = None
        if codec is not None:
            self._rows = RowRestorer(codec, device, layer_restorer_for(codec, device))
        self._writer: CodeWriter | None = None

    def fill(
        self,
        layer: int,
        source: CodedSource | ExactSource,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        stats: FillStats,
        writing: Callable[[], AbstractContextManager[None]],
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
            source.writing = writing
            if isinstance(source, CodedSource):
                self._restore(layer, source, keys, values, slots, stats)
            else:
                source.fill(layer, keys, values, slots)
        finally:
            stats.seconds += time.perf_counter() - began

    def _restore(
        self,
        layer: int,
        source: CodedSource,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        stats: FillStats,
    ) -> None:
        found = source.read(layer)
        stats.bits = self._shape.code_bits
        if self._rows is not None:
            with source.writing():
                self._rows.put(layer, source, found, keys, values, slots)
            return
        if self._writer is None:
            self._writer = code_writer_for(self._device)
        with source.writing():
            put_codes(self._writer, self._shape, source, found, keys, values, slots)
