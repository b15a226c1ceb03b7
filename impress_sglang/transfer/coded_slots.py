"""Puts coded KVs into slots of a pool: with compiled loops on a CPU, with kernels on a GPU.

Stage: load. `CodeWriter` is the contract; tests/unit/triton/test_coded_paths.py compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import GROUP_TOKENS
from impress_sglang.codes.planes.layout import CodeLayout
from impress_sglang.codes.planes.tokens import CodedTokens, planes_by_unit
from impress_sglang.tiers.staging import Staging
from impress_sglang.transfer.coded import CodedSource, LayerCodes


class CodeWriter(Protocol):
    """The contract; `codes.planes.codec` defines the numbers."""

    def restore_base(self, tokens: CodedTokens, keys: Tensor, values: Tensor) -> None:
        """See `codes.planes.slots.restore_base`."""
        ...

    def raise_units(
        self, tokens: CodedTokens, raised: Tensor, planes: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """See `codes.planes.slots.raise_units`; `planes` are where the pools are."""
        ...


def code_writer_for(device: torch.device) -> CodeWriter:
    """The writer that fits the device of the pools."""
    if device.type == "cuda":
        return KernelCodeWriter(device)
    # Imported only where it is used: Numba is not needed on a GPU.
    from impress_sglang.codes.planes import slots

    return slots


def put_codes(
    writer: CodeWriter,
    source: CodedSource,
    found: Sequence[LayerCodes],
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
) -> None:
    """Put what was read of a layer of a source into rows of pools.

    Args:
        writer: fits the device of the pools.
        source: was read.
        found: what `source.read` has returned.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
        rows: int64 [source.num_tokens] on the device of the pools, distinct.
    """
    parts: Sequence[Tensor] = rows.split([len(span) for span in source.spans])
    for span, codes, own in zip(source.spans, found, parts, strict=True):
        layout = span.layout
        assert isinstance(layout, CodeLayout)
        tokens = CodedTokens(layout, codes.groups, span.start, own)
        writer.restore_base(tokens, keys, values)
        if codes.planes is not None:
            writer.raise_units(tokens, codes.raised, codes.planes, keys, values)
        put_sinks(codes.sinks, own, keys, values)


def put_sinks(sinks: tuple[Tensor, Tensor], rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put the exact KVs of the first tokens where what was restored of them is."""
    for pool, exact in zip((keys, values), sinks, strict=True):
        if len(exact):
            pool[rows[: len(exact)]] = exact.to(pool.dtype)


class KernelCodeWriter:
    """Launches one kernel for all keys and values of a layer, and waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import codes

        self._kernels = codes
        self._staging = Staging(device)

    def restore_base(self, tokens: CodedTokens, keys: Tensor, values: Tensor) -> None:
        """See `CodeWriter`."""
        self._kernels.restore_base(self._groups(tokens), keys, values)

    def raise_units(
        self, tokens: CodedTokens, raised: Tensor, planes: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """See `CodeWriter`."""
        layout = tokens.layout
        begin, step = planes.data_ptr(), planes.stride(0)
        first = tokens.first_token
        units = planes_by_unit(raised, layout, first, begin=begin, step=step, none=0)
        # Many programs look at each: too many for the bus.
        on_device = self._staging.upload(units)
        self._kernels.raise_units(self._groups(tokens), on_device, layout.unit_tokens, keys, values)

    def _groups(self, tokens: CodedTokens) -> Any:
        place = tokens.start - tokens.first_token
        range_bytes = tokens.layout.group_range_bytes
        return self._kernels.CodedGroups(
            tokens.groups, range_bytes, tokens.slots, place, GROUP_TOKENS
        )
