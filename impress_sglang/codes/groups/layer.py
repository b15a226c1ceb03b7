"""One layer of KVs as bytes of groups."""

from __future__ import annotations

import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import (
    CODE_BITS,
    GROUP_TOKENS,
    LEAST_BITS,
    PAIR_BITS,
    code_keys,
    code_values,
    pack,
)
from impress_sglang.codes.groups.layout import GroupLayout

_LOWER_BITS = CODE_BITS - LEAST_BITS


def encode_layer(
    layout: GroupLayout, keys: Tensor, values: Tensor, energy: Tensor | None = None
) -> Tensor:
    """Code keys [t, G, Dk] and values [t, G, Dv]: uint8 [groups, group_bytes].

    `energy` float32 [G, Dk] is the mean square of the queries in each channel, see `code_keys`.

    Raises:
        NotCodable: no range holds them.
    """
    key, value = code_keys(keys, layout.rate, energy), code_values(values, layout.rate)
    of_keys, of_values = _in_groups(key.codes), _in_groups(value.codes)
    pairs = (key.bits - LEAST_BITS) // PAIR_BITS
    parts = (
        torch.stack([key.low, key.step], 2),
        _in_groups(torch.stack([value.low, value.step], 2)),
        pairs,
        pack((of_keys >> _LOWER_BITS).transpose(1, 2), LEAST_BITS),
        pack(_pairs(of_keys.flatten(2), pairs.flatten(1)), PAIR_BITS),
        pack((of_values >> _LOWER_BITS).transpose(1, 2), LEAST_BITS),
        pack(_more(of_values, layout.more_bits).transpose(1, 2), layout.more_bits),
    )
    return torch.cat([own.contiguous().view(torch.uint8).flatten(1) for own in parts], 1)


def _pairs(codes: Tensor, pairs: Tensor) -> Tensor:
    """The pairs that are kept of codes uint8 [groups, T, n], of which `pairs` [groups, n] are:
    uint8 [groups, T, P]."""
    kept = torch.stack([pairs > 0, pairs > 1], 2).flatten(1)
    places = kept.nonzero()[:, 1].view(len(codes), 1, -1)
    both = torch.stack([codes >> PAIR_BITS & 3, codes & 3], 3).flatten(2)
    return both.gather(2, places.expand(-1, GROUP_TOKENS, -1))


def _more(codes: Tensor, bits: int) -> Tensor:
    """The next `bits` of codes behind the upper ones."""
    return codes >> (_LOWER_BITS - bits) & (2**bits - 1)


def _in_groups(rows: Tensor) -> Tensor:
    """Rows [t, ...] in whole groups, zeros behind them: [groups, GROUP_TOKENS, ...]."""
    padding = [0, 0] * (rows.ndim - 1) + [0, -len(rows) % GROUP_TOKENS]
    return torch.nn.functional.pad(rows, padding).unflatten(0, (-1, GROUP_TOKENS))
