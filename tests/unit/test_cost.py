"""The cost of reads: latency and bandwidth are learnt from what reads took.

The two terms of what something costs are learnt from what it took, whatever their scale, and a
constant below them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.cost import LEAST, MEMORY, FlooredCost, TwoTermCost
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


def sizes(seed: int) -> Iterator[tuple[float, float]]:
    """Both terms vary on their own, over two orders of magnitude."""
    pick = random.Random(seed)
    for _ in range(800):
        yield 10 ** pick.uniform(0, 2), 10 ** pick.uniform(2, 4)


def teach(
    cost: TwoTermCost, per_x: float, per_y: float, *, seed: int = 1, noise: float = 0.0
) -> None:
    pick = random.Random(seed + 100)
    for x, y in sizes(seed):
        cost.observe(x, y, (per_x * x + per_y * y) * pick.uniform(1 - noise, 1 + noise))


@pytest.mark.parametrize("scale", [1e-9, 1.0])
@pytest.mark.parametrize("common", [0.03, 1.0, 100.0])
@pytest.mark.parametrize("wrong", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_both_terms_are_learnt_from_a_wrong_first_guess(
    scale: float, common: float, wrong: float, ratio: float, noise: float
) -> None:
    """The guess is wrong by `common`, and by `wrong` in one term and the inverse in the other."""
    per_x, per_y = scale, scale * ratio / 100
    cost = TwoTermCost(common * per_x * wrong, common * per_y / wrong)

    teach(cost, per_x, per_y, noise=noise)

    assert cost.solve() == pytest.approx((per_x, per_y), rel=0.15)
    assert cost.seconds(30, 2000) == pytest.approx(30 * per_x + 2000 * per_y, rel=0.05)


@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_a_guess_that_is_far_too_slow_is_left_behind(wrong: float) -> None:
    """By three orders of magnitude: a small model on a large device."""
    cost = TwoTermCost(1e3 * wrong, 10.0 / wrong)

    for seed in range(1, 5):
        teach(cost, 1.0, 0.01, seed=seed)

    assert cost.solve() == pytest.approx((1.0, 0.01), rel=0.15)


def test_short_ones_count_as_much_as_long_ones() -> None:
    """The cost of x shows in short ones only, of which there are as many."""
    cost = TwoTermCost(1.0, 1.0)
    for _ in range(100):
        cost.observe(1, 1e-3, 0.5)
        cost.observe(1, 1e6, 0.5 + 2e3)

    assert cost.solve() == pytest.approx((0.5, 2e-3), rel=0.1)


# How many times longer something took than the first guess says, as a power of ten.
FACTORS = st.floats(-4, 4)


@pytest.mark.parametrize(("count", "seconds"), [(300, 1e-3), (300, 0.1), (300, 20.0), (1, 0.7)])
def test_identical_observations_are_explained(count: int, seconds: float) -> None:
    """They cannot tell the terms apart, but say what both make together: one more than a guess."""
    cost = TwoTermCost(1e-3, 1e-6)
    for _ in range(count):
        cost.observe(40, 30_000, seconds)

    assert cost.observations == count
    assert cost.seconds(40, 30_000) == pytest.approx(seconds, rel=0.05)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-3, 1e9), FACTORS), min_size=1, max_size=30),
    st.integers(1, 10),
)
def test_any_observations_leave_both_terms_finite_and_positive(
    observations: list[tuple[float, float, float]], times: int
) -> None:
    """Also where they are the same again and again."""
    cost = TwoTermCost(1e-3, 1e-6)
    for x, y, power in observations * times:
        cost.observe(x, y, (x * 1e-3 + y * 1e-6) * 10**power)

        for term in cost.solve():
            assert math.isfinite(term) and term > 0


def test_a_term_that_costs_nothing_is_bounded_and_the_other_is_right() -> None:
    cost = TwoTermCost(1e-3, 1e-6)

    teach(cost, 0.0, 1e-5)

    per_x, per_y = cost.solve()
    assert 0 < per_x <= 10 * LEAST * 1e-3
    assert per_y == pytest.approx(1e-5, rel=0.02)


@pytest.mark.parametrize("changed", [0.1, 10.0])
def test_what_was_is_forgotten(changed: float) -> None:
    cost = TwoTermCost(1e-3, 1e-5)
    teach(cost, 1e-3, 1e-5)
    before = cost.solve()

    for seed in range(2, 8):
        teach(cost, 1e-3 * changed, 1e-5 / changed, seed=seed)

    assert before == pytest.approx((1e-3, 1e-5), rel=0.05)
    assert cost.solve() == pytest.approx((1e-3 * changed, 1e-5 / changed), rel=0.1)


def test_it_takes_more_than_one_odd_observation_to_forget() -> None:
    cost = TwoTermCost(1e-3, 1e-5)
    for _ in range(MEMORY):
        cost.observe(10, 1000, 0.02)

    cost.observe(10, 1000, 2.0)

    assert cost.seconds(10, 1000) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(("y", "seconds"), [(0.0, 1.0), (-1.0, 1.0), (5.0, 0.0), (5.0, -1.0)])
def test_what_says_nothing_changes_nothing(y: float, seconds: float) -> None:
    """Nothing was done, or the clock did not move."""
    cost = TwoTermCost(1e-3, 1e-5)
    teach(cost, 2e-3, 2e-5)
    before, count = cost.solve(), cost.observations

    cost.observe(3.0, y, seconds)

    assert (cost.solve(), cost.observations) == (before, count)


# Seconds at least, per x and per y.
FLOORED = (0.01, 2.5e-5, 1.7e-9)


def take(x: float, y: float, times: float = 1.0) -> float:
    constant, per_x, per_y = FLOORED
    return max(constant, x * per_x + y * per_y) * times


def learn(cost: FlooredCost, seed: int, times: float = 1.0, largest: float = 4.0) -> None:
    pick = random.Random(seed)
    for _ in range(200):
        x = 10 ** pick.uniform(0, largest)
        y = x * 10 ** pick.uniform(2, 4)
        cost.observe(x, y, take(x, y, times) * pick.uniform(0.9, 1.1))


SIZES = [(1, 500), (200, 1e5), (300, 1e6), (3000, 4e6), (9000, 5e7)]


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("wrong", [0.3, 1.0, 3.0])
def test_a_constant_is_learnt_beside_both_rates(scale: float, wrong: float) -> None:
    cost = FlooredCost(scale * wrong, scale * 7e-5 / wrong)
    # Something is compiled meanwhile.
    cost.observe(8, 4000, 3.0)
    learn(cost, 1)

    for x, y in SIZES:
        assert cost.seconds(x, y) == pytest.approx(take(x, y), rel=0.15)
        assert cost.least(x, y) == cost.seconds(x, y)


def test_what_was_seen_to_be_short_bounds_what_is_longer() -> None:
    cost = FlooredCost(1e-3, 1e-7)
    assert cost.least(9, 9) == 0.0 and cost.most(9, 9) is None is cost.seconds(9, 9)
    learn(cost, 1, largest=2.0)

    assert cost.seconds(40, 400) == pytest.approx(0.01, rel=0.1)
    assert cost.seconds(4000, 4e6) is None
    assert cost.least(4000, 4e6) == pytest.approx(0.01, rel=0.1)
    assert take(4000, 4e6) < (cost.most(4000, 4e6) or 0.0) < 10 * take(4000, 4e6)


def test_of_one_size_less_takes_its_share() -> None:
    """Else nothing would be tried that is less."""
    cost = FlooredCost(1.0, 1.0)
    for _ in range(50):
        cost.observe(1000, 1000, 0.5)

    assert cost.least(100, 100) == pytest.approx(0.05)
    assert cost.seconds(1000, 1000) == pytest.approx(0.5) == pytest.approx(cost.least(2e3, 2e3))
    assert cost.most(2e3, 2e3) == pytest.approx(1.0)


@pytest.mark.parametrize("times", [0.2, 5.0])
def test_a_device_that_changes_is_followed_at_once(times: float) -> None:
    cost, pick = FlooredCost(1e-3, 1e-7), random.Random(4)
    learn(cost, 1)
    for _ in range(20):
        x = pick.uniform(1, 50)
        cost.observe(x, 1e3 * x, take(x, 1e3 * x, times))

    assert cost.seconds(9000, 5e7) == pytest.approx(take(9000, 5e7, times), rel=0.25)


def test_a_device_that_changes_to_and_fro_leaves_numbers() -> None:
    """What is not seen meanwhile does not fade to nothing, and stays about right."""
    cost, pick = FlooredCost(1e-3, 1e-7), random.Random(4)
    learn(cost, 1)
    for _ in range(150):
        for times in (2.5, 1.0):
            for _ in range(16):
                cost.observe(20, 2e4, take(20, 2e4, times) * pick.uniform(0.95, 1.05))

    assert 0.3 < (cost.seconds(9000, 5e7) or 0.0) / take(9000, 5e7) < 3.0


def test_sizes_that_take_turns_are_no_change() -> None:
    cost, pick = FlooredCost(1e-3, 1e-7), random.Random(4)
    learn(cost, 1)
    for new, count in ((1050, 100), (1900, 9), (1050, 40), (1900, 9)) * 5:
        for _ in range(count):
            cost.observe(new, 1e3 * new, take(new, 1e3 * new) * pick.uniform(0.9, 1.1))

    assert cost.seconds(9000, 5e7) == pytest.approx(take(9000, 5e7), rel=0.15)


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e9), FACTORS), max_size=30),
    st.floats(1e-3, 1e6),
    st.floats(1e-3, 1e9),
)
def test_whatever_was_seen_more_takes_no_less(
    observations: list[tuple[float, float, float]], x: float, y: float
) -> None:
    cost = FlooredCost(1e-3, 1e-6)
    for own_x, own_y, power in observations:
        cost.observe(own_x, own_y, (own_x * 1e-3 + own_y * 1e-6) * 10**power)

    least, more = cost.least(x, y), cost.least(2 * x, 1.5 * y)
    assert 0.0 <= least <= more < math.inf
    assert (cost.most(x, y) is None) == (not observations)
    assert cost.seconds(x, y) in (None, least)


@pytest.mark.parametrize("size", [(0.0, 5.0, 1.0), (5.0, 0.0, 1.0), (5.0, 5.0, 0.0), (5, 5, -1.0)])
def test_what_cannot_be_changes_nothing(size: tuple[float, float, float]) -> None:
    cost = FlooredCost(1.0, 1.0)
    cost.observe(*size)
    assert cost.observations == 0 and cost.least(5, 5) == 0.0
