"""Sketches: the keys of a segment in few bits, from which important tokens are found.

Keys are quantised per KV head and channel between the smallest and the largest value of the segment
(uniformly, rounded to nearest). Per channel because a few channels of keys are far larger than the
others (KIVI, https://arxiv.org/abs/2402.02750). Neighbouring tokens share a byte: with 4 bits byte
p of a channel has token 2p in its low and token 2p + 1 in its high half.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Sketch:
    """The tokens [start, stop) of a sketch, still in few bits.

    codes uint8 [bytes, G, D] and table float32 [2, G, D] of `sketch_keys`, on one device; `start`
    and `stop` are counted from the first token in `codes`.
    """

    codes: Tensor
    table: Tensor
    bits: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def restore(self) -> Tensor:
        """The keys that it stands for: see `restore_keys`."""
        return restore_keys(self.codes, self.table, self.bits, self.start, self.stop)


def sketch_keys(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise keys.

    Args:
        keys: [t, G, D] of any floating dtype.
        bits: per element; divides 8.

    Returns:
        The packed codes, uint8 [ceil(t * bits / 8), G, D], and the table float32 [2, G, D]: what a
        channel's code 0 stands for, and the step from one code to the next.
    """
    exact = keys.float()
    low, high = exact.amin(0), exact.amax(0)
    levels = 2**bits - 1
    step = (high - low) / levels
    scaled = (exact - low) / step.clamp_min(torch.finfo(torch.float32).tiny)
    codes = scaled.round_().clamp_(0, levels).to(torch.uint8)
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, 0, 0, 0, 0, -len(codes) % per_byte))
    packed = torch.zeros_like(padded[::per_byte])
    for slot in range(per_byte):
        packed |= padded[slot::per_byte] << (slot * bits)
    return packed, torch.stack([low, step])


def restore_keys(packed: Tensor, table: Tensor, bits: int, start: int, stop: int) -> Tensor:
    """The keys that a sketch stands for.

    Args:
        packed: uint8 [bytes, G, D] from `sketch_keys`, or neighbouring bytes of it.
        table: float32 [2, G, D] from `sketch_keys`.
        bits: per element.
        start: first token that is wanted, counted from the first one in `packed`.
        stop: after the last one.

    Returns:
        float32 [stop - start, G, D] on the device of `packed`.
    """
    per_byte, mask = 8 // bits, 2**bits - 1
    slots = [(packed >> (slot * bits)) & mask for slot in range(per_byte)]
    codes = slots[0] if per_byte == 1 else torch.stack(slots, 1).flatten(0, 1)
    low, step = table.to(packed.device)
    return codes[start:stop].float().mul_(step).add_(low)
