"""Numbers that are left for a device last until it has read them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.tiers.fence import Fence
from impress_sglang.tiers.staging import Staging

CPU = torch.device("cpu")


class Reading(Fence):
    """A launch that reads numbers when somebody waits for it, no earlier."""

    def __init__(self, numbers: Tensor, expected: int) -> None:
        super().__init__(CPU)
        self._numbers, self._expected = numbers, expected
        self.read = False

    def wait(self) -> None:
        assert (self._numbers == self._expected).all()
        self.read = True


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 20))
def test_numbers_stay_until_they_are_read(counts: list[int], size: int) -> None:
    staging, readings = Staging(CPU, 8 * size), []
    for number, count in enumerate(counts):
        staged, own = staging.take(count)
        assert staged.shape == own.shape == (count,)
        own[:] = number
        readings.append(Reading(staged, number))
        staging.protect(readings[-1])
    # Those that nobody had to wait for are still there.
    for reading in readings:
        if not reading.read:
            reading.wait()


def test_arrays_keep_their_shapes_and_order() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([7]), np.empty((0, 2), int)]
    staging = Staging(CPU)
    found = staging.leave(arrays)
    assert [own.tolist() for own in found] == [own.tolist() for own in arrays]
    assert all(own.dtype == torch.int64 and own.is_contiguous() for own in found)
