"""Fills slots of a pool with whole layers of a stored prefix, exact or from codes.

Stage: load. Rows are ordinary: attention does not need to know.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from impress_sglang.options import EXACT_BITS
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.codecs import Codec, Restorer
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
        codec: Codec | None = None,
        *,
        kernels: bool | None = None,
    ) -> None:
        """Choose what restores into pools on a device: kernels, or loops; None: kernels on a GPU.

        `codec`: None if there are no codes.
        """
        self._shape, self._device, self._codec = shape, device, codec
        self._kernels = device.type == "cuda" if kernels is None else kernels
        dims = shape.num_kv_heads * [shape.key_dim] + shape.num_kv_heads * [shape.value_dim]
        # In a row of a raw layer.
        self._head_bytes = [dim * shape.dtype.itemsize for dim in dims]

    @functools.cached_property
    def _restorer(self) -> Restorer:
        """Not made before it is needed: a CPU compiles loops for it."""
        assert self._codec is not None, "there are codes, and no codec"
        return self._codec.restorer(self._device, kernels=self._kernels)

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
                    groups = [own for (own,) in found]
                    self._restorer.restore(layer, source, groups, keys, values, slots)
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
