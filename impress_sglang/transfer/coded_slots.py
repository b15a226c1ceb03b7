"""Puts coded KVs into slots of a pool: with compiled loops on a CPU, with a kernel on a GPU.

Stage: load. tests/unit/triton/test_coded_paths.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import GROUP_TOKENS
from impress_sglang.codes.groups.layout import GroupLayout
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.coded import CodedSource, LayerCodes

# See `triton.codes.restore`; `codes.groups.codec` defines the numbers.
CodeWriter = Callable[[GroupLayout, Tensor, int, Tensor, Tensor, Tensor], None]


def code_writer_for(device: torch.device) -> CodeWriter:
    """The writer that fits the device of the pools."""
    # Imported only where it is used: Numba is not needed on a GPU, Triton not on a CPU.
    if device.type == "cuda":
        from impress_sglang.triton import codes

        return codes.restore
    from impress_sglang.codes.groups import slots

    return slots.restore


def put_codes(
    writer: CodeWriter,
    shape: KVShape,
    source: CodedSource,
    found: Sequence[LayerCodes],
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
) -> None:
    """Put what was read of a layer of a source into rows of pools.

    Args:
        writer: fits the device of the pools.
        shape: of the KVs.
        source: was read.
        found: what `source.read` has returned.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
        rows: int64 [source.num_tokens] on the device of the pools, distinct.
    """
    parts: Sequence[Tensor] = rows.split([len(span) for span in source.spans])
    for span, codes, own in zip(source.spans, found, parts, strict=True):
        start = span.start % GROUP_TOKENS
        writer(shape.group_layout, codes.groups, start, own, keys, values)
        put_sinks(codes.sinks, own, keys, values)


def put_sinks(sinks: tuple[Tensor, Tensor], rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put the exact KVs of the first tokens where what was restored of them is."""
    for pool, exact in zip((keys, values), sinks, strict=True):
        if len(exact):
            pool[rows[: len(exact)]] = exact.to(pool.dtype)
