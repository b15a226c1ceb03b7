"""Tables that grow where they are, and ranges of ids against a plain set of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.tiers.placement import IdRanges
from impress_sglang.tiers.rules import grown


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.float64])
def test_a_table_grows_where_it_is(dtype: type[np.generic]) -> None:
    shorter = grown(np.zeros(0, dtype), 10)
    shorter[:] = 3

    longer = grown(shorter, 1_000_000)

    assert longer.dtype == dtype and len(longer) == 1_000_000
    assert longer.ctypes.data == shorter.ctypes.data
    assert longer[:10].tolist() == [3] * 10 and not longer[10:].any()
    longer[2] = 5
    assert shorter[2] == 5, "they are the same entries"


class Numbers:
    """Which numbers are given out, one by one."""

    def __init__(self) -> None:
        self.taken: set[int] = set()

    def take(self, size: int) -> int:
        base = 0
        while self.taken & set(range(base, base + size)):
            base += 1
        self.taken |= set(range(base, base + size))
        return base


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60), st.data())
def test_the_lowest_range_that_fits_is_taken(
    steps: list[tuple[bool, int]], data: st.DataObject
) -> None:
    ids, model, ranges = IdRanges(), Numbers(), list[tuple[int, int]]()
    for takes, size in steps:
        if takes or not ranges:
            base = ids.take(size)
            assert base == model.take(size)
            ranges.append((base, size))
        else:
            base, size = ranges.pop(data.draw(st.integers(0, len(ranges) - 1)))
            ids.give(base, size)
            model.taken -= set(range(base, base + size))
        assert set(np.flatnonzero(ids.owned(400)).tolist()) == model.taken
        # As few gaps as possible.
        assert (ids.starts[:-1] + ids.lengths[:-1] < ids.starts[1:]).all()


@pytest.mark.parametrize("again", [(0, 4), (2, 1), (1, 2), (9, 1), (4, 2)])
def test_what_is_free_is_not_given_back(again: tuple[int, int]) -> None:
    ids = IdRanges()
    assert [ids.take(3), ids.take(2), ids.take(2)] == [0, 3, 5]
    ids.give(0, 3)
    ids.give(5, 2)

    with pytest.raises(AssertionError):
        ids.give(*again)
