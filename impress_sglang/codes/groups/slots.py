"""Restores codes into slots of a pool on the CPU, as `triton.groups` does on a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.coding import Rows, words_of
from impress_sglang.codes.groups.codec import GroupLayout
from impress_sglang.loops import groups as loops


def restore(
    layout: GroupLayout, groups: Tensor, start: int, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Restore codes into slots; see `triton.groups.restore`."""
    groups = groups.contiguous()
    _, _, pairs, upper_keys, columns, upper_values, more, _ = layout.places
    ranges = groups[:, :pairs].view(torch.float16).float().contiguous().numpy()
    codes, first, more_bits = groups.numpy(), layout.sizes[0] // 2, layout.more_bits
    with words_of(Rows(keys, values, slots)) as (words, rows):
        pools = [array.view(np.float32) if array.dtype == np.uint32 else array for array in words]
        places = pairs, upper_keys, columns, layout.num_pairs
        loops.restore_keys(codes, *places, ranges, start, rows, pools[0])
        value_arrays = upper_values, more, more_bits
        loops.restore_values(codes, *value_arrays, ranges, first, start, rows, pools[1])
