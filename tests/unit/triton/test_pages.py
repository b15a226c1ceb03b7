"""Pages go from anywhere in memory to anywhere, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.tiers.copying import PageCopier

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, so NaNs of all kinds, too."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(INTEGERS[tensor.dtype.itemsize])


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(bits(found), bits(wanted))


def pinned(tensor: Tensor, device: str) -> Tensor:
    return tensor.pin_memory() if device == "cuda" else tensor


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(
    ("unit", "vectors", "dtype"),
    [
        (8, 4, torch.float32),
        (128, 64, torch.bfloat16),
        (5, 7, torch.float16),
        (1024, 1, torch.int32),
        (3, 1, torch.int8),
        (1000, 3, torch.float32),
    ],
)
def test_pages(device: str, unit: int, vectors: int, dtype: torch.dtype, by_kernel: bool) -> None:
    """Pages of memory of the host and of the device go to memory of both, in one launch."""
    if not by_kernel:
        device = "cpu"
    chosen = np.random.permutation(12)
    sources, found = (random_bits((2, 12, unit * vectors), dtype) for _ in range(2))
    expected = found.clone()
    for numbers, place in ((chosen[:5], 0), (chosen[5:9], 1)):
        expected[place, numbers[::-1].copy()] = sources[1 - place, torch.from_numpy(numbers)]
    sources, found = ([own[0].to(device), pinned(own[1], device)] for own in (sources, found))
    step = unit * vectors * dtype.itemsize
    from_host, from_device = (own.data_ptr() + chosen * step for own in reversed(sources))
    to_device, to_host = (own.data_ptr() + chosen * step for own in found)
    copier = PageCopier(step, torch.device(device), kernels=by_kernel)
    copier.copy(
        np.concatenate([from_host[:5], from_device[5:9]]),
        np.concatenate([to_device[4::-1], to_host[8:4:-1]]),
    )
    for own, wanted in zip(found, expected, strict=True):
        assert_same_bits(own, wanted)
