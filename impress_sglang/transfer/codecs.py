"""What a codec is to the stages that store and load, and the one that needs no basis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from impress_sglang.codes.coding import Coding, CodingRule
from impress_sglang.codes.groups.codec import GROUP_TOKENS, GroupLayout, encode_layer
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.sources import WholeSource

# For a layer and the shape [G, Dk] of its keys, the energy of their channels; None: not known.
Energy = Callable[[int, torch.Size], Tensor | None]


class Restorer(Protocol):
    """Restores layers from codes, and puts them into slots; one thread."""

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

        `groups` are of each span those that have its tokens, uint8 [groups, group_bytes]. Pools are
        of keys [slots, G, Dk] and of values [slots, G, Dv]; `slots` int64 [source.num_tokens] on
        their device, distinct.
        """

    def launch(self, keys: Tensor, values: Tensor) -> None:
        """Launch each kernel in all variants; pools [t, G, D] of some tokens are overwritten."""


class Codec(Protocol):
    """How KVs of one model become codes, and become KVs again."""

    by_energy: bool
    """Whether it codes by what queries look at, which then is to be measured."""
    worst_error: float
    """What random KVs may be off by on average, as a share of their norm."""
    instead: str
    """Options of a server that does without it."""

    def rule(self, first: int, energy: Energy, *, alone: bool = False) -> CodingRule:
        """How the layers of a segment are coded that begins with token `first` of a prompt.

        It is for one segment, layers in ascending order. It raises `NotCodable`, if codes stand
        `alone`, for KVs of which they would say too little.
        """

    def restorer(self, device: torch.device, *, kernels: bool) -> Restorer:
        """What restores into pools on a device, by kernels or by loops."""


class GroupCodec:
    """Codes groups of tokens, each by itself, and channels by their energy."""

    by_energy, worst_error = True, 0.15
    instead = "--impress-policy paper, which has none"

    def __init__(self, layout: GroupLayout) -> None:
        self._layout = layout

    def rule(self, first: int, energy: Energy, *, alone: bool = False) -> CodingRule:
        """See `Codec.rule`; everything can be coded."""

        def code(layer: int, keys: Tensor, values: Tensor) -> Coding:
            return Coding(encode_layer(self._layout, keys, values, energy(layer, keys.shape[1:])))

        return code

    def restorer(self, device: torch.device, *, kernels: bool) -> Restorer:
        """See `Codec.restorer`."""
        return _GroupRestorer(self._layout, kernels=kernels)


def plain_codec(shape: KVShape) -> Codec | None:
    """The codec that needs no basis, if a shape has its codes."""
    return GroupCodec(shape.group_layout) if shape.coded and not shape.basis else None


class _GroupRestorer:
    def __init__(self, layout: GroupLayout, *, kernels: bool) -> None:
        self._layout = layout
        module: Any
        # Imported only where it is used: Numba is not needed on a GPU, Triton not on a CPU.
        if kernels:
            from impress_sglang.triton import groups as module
        else:
            from impress_sglang.codes.groups import slots as module
        self._put = module.restore

    def restore(
        self, layer: int, source: WholeSource, groups: Sequence[Tensor], keys: Tensor,
        values: Tensor, slots: Tensor,
    ) -> None:  # fmt: skip
        parts: Sequence[Tensor] = slots.split(source.lengths)
        for (_, tokens, _), own, places in zip(source.spans, groups, parts, strict=True):
            self._put(self._layout, own, tokens.start % GROUP_TOKENS, places, keys, values)

    def launch(self, keys: Tensor, values: Tensor) -> None:
        slots = torch.arange(len(keys), device=keys.device)
        groups = slots.new_zeros(1, self._layout.group_bytes, dtype=torch.uint8)
        self._put(self._layout, groups, 0, slots, keys, values)
