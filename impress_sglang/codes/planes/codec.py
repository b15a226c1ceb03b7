"""Codes of keys and values: a base of few bits, and planes that add bits to it.

Every element is rounded once, to `CODE_BITS` bits between the bounds of its range. The base and
each plane hold some bits of these codes, so that planes only add: what is read later raises what is
there. A code of which b bits are known stands for the middle of the values that share these bits;
the ranges are those of the full code.

Keys have a range per channel and group of `GROUP_TOKENS` tokens, because a few channels are far
larger than the others; values one per token and head (KIVI, https://arxiv.org/abs/2402.02750).
Groups are short, since one range for a whole segment costs several times the error.

The upper `CHANNEL_BITS` bits of all elements are in the base. The others are in `NUM_SECTIONS`
*sections* of one bit per element; the first belongs to the base, each other one is a plane. A
section of values has the next bit of each element. One of keys has *pairs* of bits of some channels
only. In a logit an error of a key is multiplied by the query, so its square counts in proportion to

    step of the channel^2 x mean square of the queries in this channel,

and halves twice with each bit. The pairs with the largest gain come first (reverse water-filling,
Cover and Thomas, Elements of Information Theory, 10.3.3).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from impress_sglang.errors import NotCodable

GROUP_TOKENS = 64
CODE_BITS = 8
# Bits of an element that are in the base of every channel.
CHANNEL_BITS = 4
# Bits per element of a base and of a plane: on average over the channels of keys.
BASE_BITS = 5
PLANE_BITS = 1
# Planes above the base, the one with the higher bits first.
NUM_PLANES = (CODE_BITS - BASE_BITS) // PLANE_BITS
# Bits of an element once that many planes are known, on average.
LEVELS = tuple(BASE_BITS + PLANE_BITS * planes for planes in range(NUM_PLANES + 1))
# Of the base, and of each plane.
NUM_SECTIONS = 1 + NUM_PLANES
# Bits of a channel of keys that are known or unknown together.
PAIR_BITS = 2
# Dimensions are multiples of this: a byte has one bit of so many elements.
DIM_GRAIN = 8


def planes_of(bits: float) -> int:
    """How many planes every element has that has so many `bits`: of `LEVELS`, or of a basis."""
    return max(0, int(bits) - BASE_BITS)


_TOP = 2**CODE_BITS - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """Codes of one tensor, and their ranges.

    codes uint8 [t, G, D]; low and step float16, [groups, G, D] for keys, and [t, G] for values.
    sections uint8 [groups, G, D] for keys, the section of the upper pair of each channel in the low
    nibble and that of its lower pair in the high nibble; None for values.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    sections: Tensor | None = None


def code_keys(keys: Tensor, energy: Tensor | None = None) -> Codes:
    """Code keys [t, G, D] of any floating dtype.

    `energy` float32 [G, D] is the mean square of the queries in each channel of a KV head; None:
    the same in all.

    Raises:
        NotCodable: no range holds them.
    """
    num_tokens = len(keys)
    rest = -num_tokens % GROUP_TOKENS
    # The last group is padded with the last key, which does not change its ranges.
    padded = torch.cat([keys, keys[-1:].expand(rest, -1, -1)]).float()
    groups = padded.unflatten(0, (-1, GROUP_TOKENS))
    low, step = _range(groups.amin(1), groups.amax(1))
    codes = _code(groups, low[:, None], step[:, None])
    weight = step.float().square()
    sections = sections_of(weight if energy is None else weight * energy)
    return Codes(codes.flatten(0, 1)[:num_tokens], low, step, sections)


def code_values(values: Tensor) -> Codes:
    """Code values [t, G, D] of any floating dtype.

    Raises:
        NotCodable: no range holds them.
    """
    exact = values.float()
    low, step = _range(exact.amin(-1), exact.amax(-1))
    return Codes(_code(exact, low[..., None], step[..., None]), low, step)


def sections_of(weight: Tensor) -> Tensor:
    """Which section each pair of bits of a channel is in, so that those that gain most come first.

    Args:
        weight: float32 [..., D], the squared error of a channel counts in proportion to it.

    Returns:
        uint8 [..., D], see `Codes`. The upper pair is in no later section than the lower one.
    """
    # A pair takes the error of a channel to a quarter, and its square to a sixteenth. Of equal
    # gains upper pairs come first, and then lower channels.
    gains = torch.cat([weight, weight / 4**PAIR_BITS], -1)
    order = gains.sort(stable=True, descending=True).indices
    ranks = torch.arange(gains.shape[-1], device=gains.device) // (weight.shape[-1] // PAIR_BITS)
    found = torch.empty_like(gains, dtype=torch.uint8)
    found.scatter_(-1, order, ranks.to(torch.uint8).expand_as(order))
    upper, lower = found.chunk(2, -1)
    return upper | lower << 4


def restore(codes: Codes, bits: int) -> Tensor:
    """The values that codes stand for once the planes of a level are known, float32 [t, G, D].

    `bits` is one of `LEVELS`.
    """
    planes = LEVELS.index(bits)
    low, step = codes.low.float(), codes.step.float()
    if codes.sections is None:
        low, step = low[..., None], step[..., None]
        cell = torch.tensor(2.0 ** (CODE_BITS - bits), device=low.device)
    else:
        groups = torch.arange(len(codes.codes), device=low.device) // GROUP_TOKENS
        known = sum((own <= planes).float() for own in (codes.sections & 15, codes.sections >> 4))
        cell = 2.0 ** (CODE_BITS - CHANNEL_BITS - PAIR_BITS * known)
        low, step, cell = low[groups], step[groups], cell[groups]
    middle = (codes.codes.float() / cell).floor_().add_(0.5).mul_(cell).sub_(0.5)
    return middle * step + low


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2**bits, uint8 [..., D], into bytes [..., D * bits / 8].

    Byte b of W bytes has the elements b, b + W, b + 2W, ..., the first in its lowest bits: so loops
    treat neighbours alike and can be vectorised.
    """
    per_byte = 8 // bits
    parts = codes.contiguous().unflatten(-1, (per_byte, -1))
    if not parts.shape[-1] % 8 and not parts.storage_offset() % 8:
        # Eight bytes of a word do not disturb each other.
        parts = parts.view(torch.int64)
    packed = parts[..., 0, :].clone()
    for place in range(1, per_byte):
        packed |= parts[..., place, :] << (place * bits)
    return packed.view(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes that `pack` packed, uint8 [..., D]."""
    places = [(packed >> (place * bits)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.cat(places, -1)


def packed_base(codes: Codes) -> Tensor:
    """The bits of codes that are in the base of every channel, packed: uint8 [t, G, D / 2]."""
    return pack(codes.codes >> (CODE_BITS - CHANNEL_BITS), CHANNEL_BITS)


def packed_sections(codes: Codes) -> Tensor:
    """The sections of codes, packed: uint8 [NUM_SECTIONS, t, G, D / 8].

    Of values the next bits, one of each element. Of keys the pairs of a section, upper ones by
    channel and behind them lower ones by channel.
    """
    if codes.sections is None:
        shifts = torch.arange(NUM_SECTIONS - 1, -1, -1, device=codes.codes.device)
        bits = codes.codes >> shifts.to(torch.uint8)[:, None, None, None] & 1
        return pack(bits, 1)
    both = torch.cat([codes.sections & 15, codes.sections >> 4], -1)
    order = both.sort(stable=True).indices[:, None]
    rest = -len(codes.codes) % GROUP_TOKENS
    padded = torch.nn.functional.pad(codes.codes, (0, 0, 0, 0, 0, rest))
    groups = padded.unflatten(0, (-1, GROUP_TOKENS))
    pairs = torch.cat([groups >> PAIR_BITS & 3, groups & 3], -1)
    # Expanded, so that indices of a group are not repeated in memory for each of its tokens.
    ordered = pairs.gather(-1, order.expand_as(pairs)).flatten(0, 1)[: len(codes.codes)]
    return pack(ordered.unflatten(-1, (NUM_SECTIONS, -1)).movedim(-2, 0), PAIR_BITS)


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
