"""Codes of keys and values without a basis: every element is rounded once, between two bounds.

Keys have a range per channel and group of `GROUP_TOKENS` tokens, because a few channels are far
larger than the others; values one per token and head (KIVI, https://arxiv.org/abs/2402.02750).
Groups are short, since one range for a whole segment costs several times the error.

A code has `CODE_BITS` bits, of which the upper ones are kept, and stands for the middle of the
values that share these. Of values all have as many, the *rate*. Of keys it is the rate on average:
each channel has the upper `LEAST_BITS`, and some *pairs* of bits more. In a logit an error of a key
is multiplied by the query, so its square counts in proportion to

    step of the channel^2 x mean square of the queries in this channel,

and halves twice with each bit. The pairs of a group with the largest gain are kept, of whatever
head (reverse water-filling, Cover and Thomas, Elements of Information Theory, 10.3.3): so a head
whose ranges are wide, as large biases of keys make them, gets more bits than others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

from impress_sglang.errors import NotCodable

GROUP_TOKENS = 64
CODE_BITS = 8
# Bits that are kept of every element.
LEAST_BITS = 4
# Bits of a channel of keys that are kept or dropped together.
PAIR_BITS = 2
# Dimensions are multiples of this.
DIM_GRAIN = 8

_TOP = 2**CODE_BITS - 1
_LOWER_BITS = CODE_BITS - LEAST_BITS


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """Sizes and places, in bytes, of the parts of a group, which are packed as by `pack`.

    With T = GROUP_TOKENS, P pairs of keys, and w = rate - 4 bits more of each value, a group has

        ranges of keys [G, 2, Dk] and of values [T, G, 2], float16 (low, step)
        the number of pairs of each channel of keys [G, Dk]
        upper bits of keys [G, T / 2, Dk], and their pairs [T / 4, P]: by head and channel, the
            upper first
        upper bits of values [G, T / 2, Dv], and the next w bits of each [G, T w / 8, Dv]
    """

    num_heads: int
    key_dim: int
    value_dim: int
    rate: int

    def __post_init__(self) -> None:
        assert not self.key_dim % DIM_GRAIN and not self.value_dim % DIM_GRAIN
        assert LEAST_BITS < self.rate <= LEAST_BITS + 2

    @functools.cached_property
    def num_pairs(self) -> int:
        """Pairs of keys, of all heads."""
        return _num_pairs(self.num_heads * self.key_dim, self.rate)

    @property
    def more_bits(self) -> int:
        """Bits of each value behind its upper ones."""
        return self.rate - LEAST_BITS

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of the parts, in their order."""
        heads, rows = self.num_heads, GROUP_TOKENS // CODE_BITS
        return (
            4 * heads * self.key_dim,
            4 * heads * GROUP_TOKENS,
            heads * self.key_dim,
            heads * self.key_dim * rows * LEAST_BITS,
            self.num_pairs * rows * 2,
            heads * self.value_dim * rows * LEAST_BITS,
            heads * self.value_dim * rows * self.more_bits,
        )

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Where the parts begin, and where the last one ends."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    @property
    def group_bytes(self) -> int:
        """Bytes of a group."""
        return self.places[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """Codes of one tensor, their ranges, and how many of their upper bits are kept.

    codes uint8 [t, G, D]; low and step float16, and bits uint8, [groups, G, D] for keys. For values
    low and step are [t, G], and bits [].
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    bits: Tensor


def code_keys(keys: Tensor, rate: int, energy: Tensor | None = None) -> Codes:
    """Code keys [t, G, D] of any floating dtype; `NotCodable` if no range holds them.

    `energy` float32 [G, D] is the mean square of the queries in each channel of a KV head; None:
    the same in all.
    """
    num_tokens = len(keys)
    rest = -num_tokens % GROUP_TOKENS
    # The last group is padded with the last key, which does not change its ranges.
    padded = torch.cat([keys, keys[-1:].expand(rest, -1, -1)]).float()
    groups = padded.unflatten(0, (-1, GROUP_TOKENS))
    low, step = _range(groups.amin(1), groups.amax(1))
    codes = _code(groups, low[:, None], step[:, None])
    weight = step.float().square()
    pairs = pairs_of(weight if energy is None else weight * energy, rate)
    return Codes(codes.flatten(0, 1)[:num_tokens], low, step, LEAST_BITS + PAIR_BITS * pairs)


def code_values(values: Tensor, rate: int) -> Codes:
    """Code values [t, G, D] of any floating dtype; `NotCodable` if no range holds them."""
    exact = values.float()
    low, step = _range(exact.amin(-1), exact.amax(-1))
    codes = _code(exact, low[..., None], step[..., None])
    return Codes(codes, low, step, torch.tensor(rate, dtype=torch.uint8, device=codes.device))


def pairs_of(weight: Tensor, rate: int) -> Tensor:
    """How many pairs of bits are kept of each channel, uint8 [groups, G, D]: those that gain most.

    The squared error of a channel counts in proportion to `weight` float32 [groups, G, D].
    """
    flat = weight.flatten(1)
    # A pair takes the error of a channel to a quarter, and its square to a sixteenth. Of equal
    # gains upper pairs come first, and then lower channels.
    gains = torch.cat([flat, flat / 4**PAIR_BITS], 1)
    order = gains.sort(dim=1, stable=True, descending=True).indices
    kept = order[:, : _num_pairs(flat.shape[1], rate)] % flat.shape[1]
    pairs = torch.zeros_like(flat, dtype=torch.uint8)
    pairs.scatter_add_(1, kept, torch.ones_like(kept, dtype=torch.uint8))
    return pairs.view(weight.shape)


def _num_pairs(channels: int, rate: int) -> int:
    return channels * (rate - LEAST_BITS) // PAIR_BITS


def pack(parts: Tensor, width: int) -> Tensor:
    """Pack parts of `width` bits of a group's codes, uint8 [..., GROUP_TOKENS, n], into bytes.

    Returns uint8 [..., rows, n], of which row r has the tokens r, r + rows, r + 2 x rows, ..., the
    first in its lowest bits: so loops and kernels treat neighbouring channels alike.
    """
    rows = parts.unflatten(-2, (8 // width, -1))
    packed = rows[..., 0, :, :].clone()
    for place in range(1, 8 // width):
        packed |= rows[..., place, :, :] << (place * width)
    return packed


def _range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Lower bound and step in half precision, so that the codes reach from `low` to `high`."""
    rounded = low.half()
    # Half precision may round the bound up, and the step down.
    rounded = torch.where(rounded.float() > low, _next(rounded, -1), rounded)
    step = ((high - rounded.float()) / _TOP).half()
    short = step.float() * _TOP + rounded.float() < high
    step = torch.where(short, _next(step, 1), step)
    if not (rounded.isfinite().all() and step.isfinite().all()):
        raise NotCodable("keys or values are beyond the ranges of half precision")
    return rounded, step


def _next(halves: Tensor, direction: int) -> Tensor:
    return torch.nextafter(halves, torch.full_like(halves, direction * torch.inf))


def _code(exact: Tensor, low: Tensor, step: Tensor) -> Tensor:
    # A range of one value has no step, and code 0.
    scaled = (exact - low.float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)
    return scaled.round_().clamp_(0, _TOP).to(torch.uint8)


def encode_layer(
    layout: GroupLayout, keys: Tensor, values: Tensor, energy: Tensor | None = None
) -> Tensor:
    """Code keys [t, G, Dk] and values [t, G, Dv]: uint8 [groups, group_bytes].

    For `energy` float32 [G, Dk], and errors, see `code_keys`.
    """
    key, value = code_keys(keys, layout.rate, energy), code_values(values, layout.rate)
    more_bits = layout.more_bits
    of_keys, of_values = _in_groups(key.codes), _in_groups(value.codes)
    pairs = (key.bits - LEAST_BITS) // PAIR_BITS
    # Those of values behind the upper ones.
    more = of_values >> (_LOWER_BITS - more_bits) & (2**more_bits - 1)
    parts = (
        torch.stack([key.low, key.step], 2),
        _in_groups(torch.stack([value.low, value.step], 2)),
        pairs,
        pack((of_keys >> _LOWER_BITS).transpose(1, 2), LEAST_BITS),
        pack(_pairs(of_keys.flatten(2), pairs.flatten(1)), PAIR_BITS),
        pack((of_values >> _LOWER_BITS).transpose(1, 2), LEAST_BITS),
        pack(more.transpose(1, 2), more_bits),
    )
    return torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in parts], 1)


def _pairs(codes: Tensor, pairs: Tensor) -> Tensor:
    """The pairs that are kept of codes uint8 [groups, T, n], of which `pairs` [groups, n] are:
    uint8 [groups, T, P]."""
    kept = torch.stack([pairs > 0, pairs > 1], 2).flatten(1)
    places = kept.nonzero()[:, 1].view(len(codes), 1, -1)
    both = torch.stack([codes >> PAIR_BITS & 3, codes & 3], 3).flatten(2)
    return both.gather(2, places.expand(-1, GROUP_TOKENS, -1))


def _in_groups(rows: Tensor) -> Tensor:
    """Rows [t, ...] in whole groups, zeros behind them: [groups, GROUP_TOKENS, ...]."""
    padding = [0, 0] * (rows.ndim - 1) + [0, -len(rows) % GROUP_TOKENS]
    return torch.nn.functional.pad(rows, padding).unflatten(0, (-1, GROUP_TOKENS))
