"""Fills slots of a pool with whole layers of a stored prefix, exact or from codes.

Stage: load. Rows are ordinary: attention does not need to know.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import GROUP_TOKENS
from impress_sglang.options import EXACT_BITS
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.basis_codec import BasisCodec, RowRestorer
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
        """Choose what restores into pools on a device: kernels, or loops; None: kernels on a GPU.

        `codec`: of a store with a basis.
        """
        self._shape, self._device, self._codec = shape, device, codec
        self._kernels = device.type == "cuda" if kernels is None else kernels
        dims = shape.num_kv_heads * [shape.key_dim] + shape.num_kv_heads * [shape.value_dim]
        # In a row of a raw layer.
        self._head_bytes = [dim * shape.dtype.itemsize for dim in dims]

    @functools.cached_property
    def _restore(self) -> Callable[..., None]:
        """Puts a layer of a source into slots; see `RowRestorer.restore`."""
        # Not made before it is needed. Imported only where it is used: Numba is not needed on a
        # GPU, Triton not on a CPU.
        if self._codec is not None:
            return RowRestorer(self._codec, self._device, kernels=self._kernels).restore
        module: Any
        if self._kernels:
            from impress_sglang.triton import groups as module
        else:
            from impress_sglang.codes.groups import slots as module
        layout = self._shape.group_layout

        def restore(
            layer: int, source: WholeSource, groups: Sequence[Tensor], keys: Tensor, values: Tensor,
            slots: Tensor,
        ) -> None:  # fmt: skip
            parts: Sequence[Tensor] = slots.split(source.lengths)
            for (_, tokens, _), own, places in zip(source.spans, groups, parts, strict=True):
                module.restore(layout, own, tokens.start % GROUP_TOKENS, places, keys, values)

        return restore

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
        """Fill the slots of all tokens of a source, in a layer; layers ascend for each source.

        Pools are of keys [rows, G, Dk] and of values [rows, G, Dv]; `slots` int64
        [source.num_tokens] are rows of them, distinct. `stats` is changed. What `writing` makes is
        entered while slots are written, and may raise. If a block is `PrefixUnreadable`, what is in
        the slots is undefined.
        """
        began, pools = time.perf_counter(), (keys, values)
        try:
            found = source.read(layer)
            with writing():
                if layer < self._shape.first_raw and source.codes:
                    stats.bits = self._shape.code_bits
                    self._restore(layer, source, [own for (own,) in found], keys, values, slots)
                    source.put_sinks(layer, slots, pools)
                    return
                if layer >= self._shape.first_raw:
                    found = [rows.split(self._head_bytes, 1) for (rows,) in found]
                heads = [head for pool in pools for head in pool.unbind(1)]
                for rows, own_slots in zip(found, slots.split(source.lengths), strict=True):
                    for own, head in zip(rows, heads, strict=True):
                        head.index_copy_(0, own_slots, own.view(self._shape.dtype))
        finally:
            stats.seconds += time.perf_counter() - began
