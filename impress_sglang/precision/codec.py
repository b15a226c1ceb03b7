"""Codes of keys and values: a base of few bits, and planes that add bits to it.

Every element is rounded once, to `CODE_BITS` bits between the bounds of its range. The base holds
the high bits of that code and each plane the next ones, so that planes only add: what is read later
raises what is there. A code of which b bits are known stands for the middle of the values that
share these bits; the ranges are those of the full code.

Keys have a range per channel and group of `GROUP_TOKENS` tokens, because a few channels are far
larger than the others; values one per token and head (KIVI, https://arxiv.org/abs/2402.02750).
Groups are short, since one range for a whole segment costs several times the error.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

GROUP_TOKENS = 64
BASE_BITS = 4
PLANE_BITS = 2
CODE_BITS = 8
# Planes above the base, the one with the higher bits first.
NUM_PLANES = (CODE_BITS - BASE_BITS) // PLANE_BITS
# Bits of an element once that many planes are known.
LEVELS = tuple(BASE_BITS + PLANE_BITS * planes for planes in range(NUM_PLANES + 1))


def planes_of(bits: float) -> int:
    """How many planes every element has that has so many `bits`, one of `LEVELS`."""
    return LEVELS.index(int(bits))


_TOP = 2**CODE_BITS - 1


class NotCodable(ValueError):
    """KVs that fit no range in half precision: they are infinite, not a number, or too large."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """Codes of one tensor, and their ranges.

    codes uint8 [t, G, D]; low and step float16, [groups, G, D] for keys, and [t, G] for values.
    """

    codes: Tensor
    low: Tensor
    step: Tensor


def code_keys(keys: Tensor) -> Codes:
    """Code keys [t, G, D] of any floating dtype.

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
    return Codes(codes.flatten(0, 1)[:num_tokens], low, step)


def code_values(values: Tensor) -> Codes:
    """Code values [t, G, D] of any floating dtype.

    Raises:
        NotCodable: no range holds them.
    """
    exact = values.float()
    low, step = _range(exact.amin(-1), exact.amax(-1))
    return Codes(_code(exact, low[..., None], step[..., None]), low, step)


def restore(codes: Codes, bits: int) -> Tensor:
    """The values that the first `bits` bits of codes stand for, float32 [t, G, D]."""
    low, step = codes.low.float(), codes.step.float()
    if low.ndim == 3:
        groups = torch.arange(len(codes.codes), device=low.device) // GROUP_TOKENS
        low, step = low[groups], step[groups]
    else:
        low, step = low[..., None], step[..., None]
    cell = 2 ** (CODE_BITS - bits)
    middle = (codes.codes.float() / cell).floor_().add_(0.5).mul_(cell).sub_(0.5)
    return middle * step + low


def raised(code_part: Tensor, bits: int, more: int) -> Tensor:
    """What the next `more` bits of codes add to values of which `bits` are known, in steps.

    Args:
        code_part: the next bits, any integer dtype.
        bits: how many bits are known.
        more: how many bits `code_part` has.

    Returns:
        float32; multiplied by the step of its range, it is what must be added to a value.
    """
    cell = 2.0 ** (CODE_BITS - bits - more)
    return (code_part.float() - (2**more - 1) / 2) * cell


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2**bits, uint8 [..., D], into bytes [..., D * bits / 8].

    Byte b of W bytes has the elements b, b + W, b + 2W, ..., the first in its lowest bits: so loops
    treat neighbours alike and can be vectorised.
    """
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (per_byte, -1))
    packed = torch.zeros_like(parts[..., 0, :])
    for place in range(per_byte):
        packed |= parts[..., place, :] << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes that `pack` packed, uint8 [..., D]."""
    places = [(packed >> (place * bits)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.cat(places, -1)


def base_of(codes: Tensor) -> Tensor:
    """The base of full codes, uint8 below 2**BASE_BITS."""
    return codes >> (CODE_BITS - BASE_BITS)


def plane_of(codes: Tensor, plane: int) -> Tensor:
    """A plane of full codes, uint8 below 2**PLANE_BITS; plane 0 has the higher bits."""
    return (codes >> (CODE_BITS - BASE_BITS - PLANE_BITS * (plane + 1))) & (2**PLANE_BITS - 1)


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
