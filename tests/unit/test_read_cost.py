"""The cost of reads: latency and bandwidth are learnt from what reads took."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from impress_sglang.storage.read_cost import (
    MAX_GAP_BYTES,
    START_SECONDS_PER_BYTE,
    START_SECONDS_PER_PIECE,
    ReadCost,
)


def reads(seed: int) -> Iterator[tuple[int, int]]:
    """(pieces, bytes), from one small block to many large pieces."""
    pick = random.Random(seed)
    for _ in range(400):
        pieces = pick.randint(1, 60)
        yield pieces, 4096 * pieces * pick.randint(1, 64)


def taught(latency: float, bandwidth: float, *, noise: float = 0.0) -> ReadCost:
    pick, cost = random.Random(2), ReadCost()
    for pieces, num_bytes in reads(1):
        exact = pieces * latency + num_bytes / bandwidth
        cost.observe(pieces, num_bytes, exact * pick.uniform(1 - noise, 1 + noise))
    return cost


# A fast and a usual NVMe drive, SATA, and volumes over a network.
DEVICES = [
    (20e-6, 7e9),
    (80e-6, 3e9),
    (100e-6, 500e6),
    (300e-6, 1e9),
    (500e-6, 250e6),
    (5e-3, 150e6),
    (10e-6, 100e6),
]


@pytest.mark.parametrize(("latency", "bandwidth"), DEVICES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_latency_and_bandwidth_are_learnt_within_a_tenth(
    latency: float, bandwidth: float, noise: float
) -> None:
    cost = taught(latency, bandwidth, noise=noise)

    assert cost.seconds_per_piece == pytest.approx(latency, rel=0.1)
    assert cost.bytes_per_second == pytest.approx(bandwidth, rel=0.1)
    assert cost.gap_bytes == pytest.approx(min(latency * bandwidth, MAX_GAP_BYTES), rel=0.2)


def test_first_guess_stands_without_observations() -> None:
    cost = ReadCost()

    assert cost.seconds_per_piece == pytest.approx(START_SECONDS_PER_PIECE)
    assert cost.bytes_per_second == pytest.approx(1 / START_SECONDS_PER_BYTE)
    assert cost.gap_bytes == pytest.approx(START_SECONDS_PER_PIECE / START_SECONDS_PER_BYTE, abs=1)


def test_bytes_are_read_in_pieces_as_long_as_they_were_lately() -> None:
    cost = ReadCost()
    assert cost.seconds_for(1e9) == pytest.approx(1e9 * START_SECONDS_PER_BYTE)
    for _ in range(300):
        cost.observe(10, 10 * 65_536, 10 * 100e-6 + 10 * 65_536 / 1e9)
        cost.observe(2, 2 * 4096, 2 * 100e-6 + 2 * 4096 / 1e9)
    pieces = 1e8 * 12 / (10 * 65_536 + 2 * 4096)

    assert cost.seconds_for(1e8) == pytest.approx(pieces * 100e-6 + 0.1, rel=0.05)
    assert cost.seconds_for(0) == 0.0
    for _ in range(1500):
        cost.observe(10, 10 * 4096, 10 * 100e-6 + 10 * 4096 / 1e9)

    assert cost.seconds_for(4096e4) == pytest.approx(1e4 * (100e-6 + 4096 / 1e9), rel=0.05)
