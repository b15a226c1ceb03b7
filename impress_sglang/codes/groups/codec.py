"""Codes of keys and values without a basis: every element is rounded once, between two bounds.

Keys have a range per channel and group of `GROUP_TOKENS` tokens, because a few channels are far
larger than the others; values have one per token and head (KIVI, https://arxiv.org/abs/2402.02750).
Groups are short, because one range for a whole segment has several times the error.

A code has `CODE_BITS` bits. Its upper bits are kept, and stand for the middle of the values that
share them. Every value keeps the same number of bits, the *rate*. Keys keep the rate on average:
each channel keeps the upper `MIN_BITS`, and some *pairs* of further bits. In a logit the error of
a key is multiplied by the query, so its square counts in proportion to

    step of the channel^2 x mean square of the queries in this channel,

and is quartered by each bit. The pairs of a group with the largest gain are kept, whatever their
head (reverse water-filling, Cover and Thomas, Elements of Information Theory, 10.3.3). So a head
with wide ranges, which large biases of keys cause, gets more bits than others.
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
# Bits kept of every element.
MIN_BITS = 4
# Bits of a channel of keys that are kept or dropped together, a pair.
PAIR_BITS = 2
# Dimensions are multiples of this.
DIM_GRAIN = 8

_TOP = 2**CODE_BITS - 1
_LOWER_BITS = CODE_BITS - MIN_BITS


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """Sizes and offsets, in bytes, of the parts of a group, which `pack` packs.

    With T = GROUP_TOKENS, P pairs of keys, and w = rate - 4 further bits of each value, a group has

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
        assert MIN_BITS < self.rate <= MIN_BITS + 2

    @functools.cached_property
    def num_pairs(self) -> int:
        """Number of pairs of keys, in all heads."""
        return _num_pairs(self.num_heads * self.key_dim, self.rate)

    @property
    def more_bits(self) -> int:
        """Bits of each value after the upper `MIN_BITS`."""
        return self.rate - MIN_BITS

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the parts, in order."""
        heads, rows = self.num_heads, GROUP_TOKENS // CODE_BITS
        return (
            4 * heads * self.key_dim,
            4 * heads * GROUP_TOKENS,
            heads * self.key_dim,
            heads * self.key_dim * rows * MIN_BITS,
            self.num_pairs * rows * 2,
            heads * self.value_dim * rows * MIN_BITS,
            heads * self.value_dim * rows * self.more_bits,
        )

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Offsets of the parts, and the end of the last one."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    @property
    def group_bytes(self) -> int:
        return self.places[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """Codes of one tensor, their ranges, and the number of upper bits that are kept.

    `codes`: uint8 [t, G, D]. `low` and `step`: float16, [groups, G, D] for keys, [t, G] for values.
    `bits`: uint8, [groups, G, D] for keys, [] for values.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    bits: Tensor


def code_keys(keys: Tensor, rate: int, energy: Tensor | None = None) -> Codes:
    """Code keys [t, G, D] of any floating dtype.

    `energy`: mean square of the queries in each channel of a KV head, float32 [G, D]; None if all
    channels count equally.

    Raises:
        NotCodable: keys exceed the range of half precision.
    """
    num_tokens = len(keys)
    padding = -num_tokens % GROUP_TOKENS
    # The last group is padded with the last key, which does not change its ranges.
    padded = torch.cat([keys, keys[-1:].expand(padding, -1, -1)]).float()
    groups = padded.unflatten(0, (-1, GROUP_TOKENS))
    low, step = _range(groups.amin(1), groups.amax(1))
    codes = _code(groups, low[:, None], step[:, None])
    weight = step.float().square()
    pairs = allocate_bit_pairs(weight if energy is None else weight * energy, rate)
    return Codes(codes.flatten(0, 1)[:num_tokens], low, step, MIN_BITS + PAIR_BITS * pairs)


def code_values(values: Tensor, rate: int) -> Codes:
    """Code values [t, G, D] of any floating dtype; raises as `code_keys` does."""
    exact = values.float()
    low, step = _range(exact.amin(-1), exact.amax(-1))
    codes = _code(exact, low[..., None], step[..., None])
    return Codes(codes, low, step, torch.tensor(rate, dtype=torch.uint8, device=codes.device))


def allocate_bit_pairs(weight: Tensor, rate: int) -> Tensor:
    """Return the number of pairs kept of each channel, uint8 [groups, G, D]: those that gain most.

    The squared error of a channel counts in proportion to `weight`, float32 [groups, G, D].
    """
    flat = weight.flatten(1)
    # A pair reduces the error of a channel to a quarter, and its square to a sixteenth. Among equal
    # gains, upper pairs come first, then lower channels.
    gains = torch.cat([flat, flat / 4**PAIR_BITS], 1)
    order = gains.sort(dim=1, stable=True, descending=True).indices
    kept = order[:, : _num_pairs(flat.shape[1], rate)] % flat.shape[1]
    pairs = torch.zeros_like(flat, dtype=torch.uint8)
    pairs.scatter_add_(1, kept, torch.ones_like(kept, dtype=torch.uint8))
    return pairs.view(weight.shape)


def _num_pairs(channels: int, rate: int) -> int:
    return channels * (rate - MIN_BITS) // PAIR_BITS


def pack(parts: Tensor, width: int) -> Tensor:
    """Pack `width` bits of each code of a group, uint8 [..., GROUP_TOKENS, n], into bytes.

    Returns uint8 [..., rows, n]. Row r has the tokens r, r + rows, r + 2 x rows, ..., the first in
    its lowest bits, so that loops and kernels treat neighbouring channels in the same way.
    """
    rows = parts.unflatten(-2, (8 // width, -1))
    packed = rows[..., 0, :, :].clone()
    for place in range(1, 8 // width):
        packed |= rows[..., place, :, :] << (place * width)
    return packed


def _range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower bound and step in half precision; codes cover `low` to `high`."""
    rounded = low.half()
    # Half precision may round the bound up, and the step down.
    rounded = torch.where(rounded.float() > low, _next(rounded, -1), rounded)
    step = ((high - rounded.float()) / _TOP).half()
    short = step.float() * _TOP + rounded.float() < high
    step = torch.where(short, _next(step, 1), step)
    # What the highest code stands for may be more than `high`.
    top = rounded.float() + step.float() * _TOP
    if not (rounded.isfinite().all() and top.half().isfinite().all()):
        raise NotCodable("keys or values are beyond the ranges of half precision")
    return rounded, step


def _next(halves: Tensor, direction: int) -> Tensor:
    return torch.nextafter(halves, torch.full_like(halves, direction * torch.inf))


def _code(exact: Tensor, low: Tensor, step: Tensor) -> Tensor:
    # A range of one value has step 0, and its codes are 0.
    scaled = (exact - low.float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)
    return scaled.round_().clamp_(0, _TOP).to(torch.uint8)


def encode_layer(
    layout: GroupLayout, keys: Tensor, values: Tensor, energy: Tensor | None = None
) -> Tensor:
    """Code keys [t, G, Dk] and values [t, G, Dv] as uint8 [groups, group_bytes].

    `energy`, float32 [G, Dk], and exceptions are those of `code_keys`.
    """
    key, value = code_keys(keys, layout.rate, energy), code_values(values, layout.rate)
    more_bits = layout.more_bits
    of_keys, of_values = _in_groups(key.codes), _in_groups(value.codes)
    pairs = (key.bits - MIN_BITS) // PAIR_BITS
    # Bits of values after the upper ones.
    more = of_values >> (_LOWER_BITS - more_bits) & (2**more_bits - 1)
    parts = (
        torch.stack([key.low, key.step], 2),
        _in_groups(torch.stack([value.low, value.step], 2)),
        pairs,
        pack((of_keys >> _LOWER_BITS).transpose(1, 2), MIN_BITS),
        pack(_pairs(of_keys.flatten(2), pairs.flatten(1)), PAIR_BITS),
        pack((of_values >> _LOWER_BITS).transpose(1, 2), MIN_BITS),
        pack(more.transpose(1, 2), more_bits),
    )
    return torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in parts], 1)


def _pairs(codes: Tensor, pairs: Tensor) -> Tensor:
    """Return the kept pairs, uint8 [groups, T, P], of codes uint8 [groups, T, n].

    `pairs`: number of pairs kept of each channel, [groups, n].
    """
    kept = torch.stack([pairs > 0, pairs > 1], 2).flatten(1)
    places = kept.nonzero()[:, 1].view(len(codes), 1, -1)
    both = torch.stack([codes >> PAIR_BITS & 3, codes & 3], 3).flatten(2)
    return both.gather(2, places.expand(-1, GROUP_TOKENS, -1))


def _in_groups(rows: Tensor) -> Tensor:
    """Pad rows [t, ...] with zeros to whole groups, [groups, GROUP_TOKENS, ...]."""
    padding = [0, 0] * (rows.ndim - 1) + [0, -len(rows) % GROUP_TOKENS]
    return torch.nn.functional.pad(rows, padding).unflatten(0, (-1, GROUP_TOKENS))
