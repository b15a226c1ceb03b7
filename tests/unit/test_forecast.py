"""How many bytes a request is expected to read of what is stored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from impress_sglang.store.forecast import CodedBytes, StoredBytes

CODES = 256


def stored(chances: dict[int, float], *, probe_bytes: int = 0, usual: float = 0.25) -> StoredBytes:
    counts = np.zeros(CODES)
    for code, num_bytes in chances.items():
        counts[code] = num_bytes
    return StoredBytes(probe_bytes, counts, usual)


def test_usual_requests_are_expected_to_read_by_the_chances() -> None:
    found = stored({0: 4e6, 51: 1e6, 255: 2e5}, probe_bytes=300)

    assert found.expected(0.25) == pytest.approx(300 + 0.2 * 1e6 + 2e5)


def test_twice_the_retention_asks_twice() -> None:
    """As if each block were wanted by either of two requests."""
    found = stored({102: 1e6}, usual=0.2)

    assert found.expected(0.2) == pytest.approx(0.4e6)
    assert found.expected(0.4) == pytest.approx((1 - 0.6**2) * 1e6)
    assert found.expected(0.1) == pytest.approx((1 - 0.6**0.5) * 1e6)


def test_rules_that_look_at_all_keys_read_half_of_all_and_a_part_of_the_rest() -> None:
    found = stored({51: 1e6}, probe_bytes=300)

    assert found.expected(0.25, all_keys=True) == pytest.approx(300 + 0.5e6 + 0.1e6)
    assert found.expected(1.0, all_keys=True) == found.expected(1.0) == 300 + 1e6


COUNTS = arrays.arrays(np.float64, CODES, elements=st.sampled_from([0.0, 0.0, 4096.0, 1e7]))


@given(
    counts=COUNTS,
    probe_bytes=st.integers(0, 1 << 20),
    usual=st.floats(0.05, 1.0),
    retentions=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6),
    all_keys=st.booleans(),
)
def test_a_larger_retention_never_reads_less(
    counts: np.ndarray, probe_bytes: int, usual: float, retentions: list[float], all_keys: bool
) -> None:
    found = StoredBytes(probe_bytes, counts, usual)

    by_retention = [found.expected(own, all_keys=all_keys) for own in sorted([*retentions, 1.0])]

    rounding = 1e-9 * (1 + counts.sum())
    assert all(a <= b + rounding for a, b in itertools.pairwise(by_retention))
    assert probe_bytes <= by_retention[0] + rounding
    assert by_retention[-1] == pytest.approx(probe_bytes + counts.sum())


def test_coded_bytes_are_the_base_and_planes() -> None:
    found = CodedBytes(1000.0, (0.0, 400.0, 300.0))
    assert [found.expected(planes) for planes in range(4)] == [1000, 1000, 1400, 1700]
