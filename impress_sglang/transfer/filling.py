"""Fills slots of a pool with whole layers of a stored prefix, exact or from codes.

Stage: load. Rows are ordinary: attention does not need to know.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import GROUP_TOKENS
from impress_sglang.options import EXACT_BITS
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.basis_codec import (
    BasisCodec,
    KernelRestorer,
    LoopRestorer,
    RowRestorer,
)
from impress_sglang.transfer.sources import WholeSource

Writing: TypeAlias = Callable[[], AbstractContextManager[None]]
"""What it makes is entered while slots are written; it may raise."""


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
        codec: BasisCodec | None = None,
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
        dims = shape.num_kv_heads * [shape.key_dim] + shape.num_kv_heads * [shape.value_dim]
        # In a row of a raw layer.
        self._head_bytes = [dim * shape.dtype.itemsize for dim in dims]

    @functools.cached_property
    def _restorer(self) -> GroupRestorer | RowRestorer:
        # Not made before it is needed: it imports Numba or Triton.
        if self._codec is None:
            return GroupRestorer(self._shape, kernels=self._kernels)
        return (KernelRestorer if self._kernels else LoopRestorer)(self._codec, self._device)

    def fill(
        self,
        layer: int,
        source: WholeSource,
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
        began, pools = time.perf_counter(), (keys, values)
        try:
            found = source.read(layer)
            with writing():
                if layer >= self._shape.first_raw:
                    found = [rows.split(self._head_bytes, 1) for (rows,) in found]
                    self._put(found, pools, slots.split(source.lengths))
                elif source.codes:
                    stats.bits = self._shape.code_bits
                    groups = [own for (own,) in found]
                    self._restorer.restore(layer, source, groups, *pools, slots)
                    source.put_sinks(layer, slots, pools)
                else:
                    self._put(found, pools, slots.split(source.lengths))
        finally:
            stats.seconds += time.perf_counter() - began

    def _put(
        self, found: Sequence[Sequence[Tensor]], pools: Sequence[Tensor], slots: Sequence[Tensor]
    ) -> None:
        """Copy the rows of each head's keys, and of each head's values, into slots."""
        heads = [head for pool in pools for head in pool.unbind(1)]
        for rows, own_slots in zip(found, slots, strict=True):
            for own, head in zip(rows, heads, strict=True):
                head.index_copy_(0, own_slots, own.view(self._shape.dtype))


class GroupRestorer:
    """Restores codes without a basis: with compiled loops on a CPU, with a kernel on a GPU."""

    def __init__(self, shape: KVShape, *, kernels: bool) -> None:
        """`kernels`: restore on a GPU."""
        # Imported only where it is used: Numba is not needed on a GPU, Triton not on a CPU.
        self._restore: Callable[..., None]
        if kernels:
            from impress_sglang.triton import codes

            self._restore = codes.restore
        else:
            from impress_sglang.codes.groups import slots

            self._restore = slots.restore
        self._layout = shape.group_layout

    def restore(
        self,
        layer: int,
        source: WholeSource,
        groups: Sequence[Tensor],
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> None:
        """Put a layer of a source into slots; layers are restored in ascending order.

        Args:
            layer: from 0.
            source: was read.
            groups: of each span, those that have its tokens, uint8 [groups, group_bytes].
            keys: pool [slots, G, Dk].
            values: pool [slots, G, Dv].
            slots: int64 [source.num_tokens] on the device of the pools, distinct.
        """
        parts: Sequence[Tensor] = slots.split(source.lengths)
        for (_, tokens, _), own, places in zip(source.spans, groups, parts, strict=True):
            self._restore(self._layout, own, tokens.start % GROUP_TOKENS, places, keys, values)
