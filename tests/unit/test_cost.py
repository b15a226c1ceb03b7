"""What things cost is learnt, whatever their scale, and what is decided by it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang import cost as cost_module
from impress_sglang.config import EXACT_BITS
from impress_sglang.cost import Cost, Estimate, Estimator, ReadCost, RequestLengths, attention_pairs
from impress_sglang.paper.service import LoadCosts

HIDDEN_SIZE = 2048

# Seconds per piece, bytes per second: an NVMe drive, SATA, and volumes over a network.
DEVICES = [(20e-6, 7e9), (100e-6, 500e6), (500e-6, 250e6), (5e-3, 150e6), (10e-6, 100e6)]


@pytest.mark.parametrize(("latency", "bandwidth"), DEVICES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_latency_and_bandwidth_are_learnt_within_a_tenth(
    latency: float, bandwidth: float, noise: float
) -> None:
    pick, cost = random.Random(2), ReadCost()
    for _ in range(400):
        pieces = pick.randint(1, 60)
        num_bytes = 4096 * pieces * pick.randint(1, 64)
        seconds = pieces * latency + num_bytes / bandwidth
        cost.observe(pieces, num_bytes, seconds * pick.uniform(1 - noise, 1 + noise))

    assert cost.rates() == pytest.approx((latency, 1 / bandwidth), rel=0.1)
    assert cost.bytes_per_second == pytest.approx(bandwidth, rel=0.1)
    assert cost.gap_bytes == pytest.approx(
        min(latency * bandwidth, cost_module.MAX_GAP_BYTES), rel=0.2
    )


def test_bytes_are_read_in_pieces_as_long_as_they_were_lately() -> None:
    cost = ReadCost()
    for length in (65_536, 4096):
        for _ in range(300):
            cost.observe(10, 10 * length, 10 * 100e-6 + 10 * length / 1e9)

        expected = 1e3 * (100e-6 + length / 1e9)
        assert cost.seconds_for(1e3 * length) == pytest.approx(expected, rel=0.05)
    assert cost.seconds_for(0) == 0.0


@pytest.mark.parametrize(
    "size", [(0.0, 5.0, 1.0), (5.0, 0.0, 1.0), (-1.0, 5.0, 1.0), (5.0, 5.0, 0.0), (5.0, 5.0, -1.0)]
)
def test_what_says_nothing_changes_nothing(size: tuple[float, float, float]) -> None:
    """Nothing was done, or the clock did not move."""
    cost = Cost(1.0, 1.0, floored=True)
    cost.observe(*size)
    assert cost.observations == 0 and cost.seconds(5, 5) == 0.0


def test_of_one_size_less_takes_its_share() -> None:
    """Else nothing would be tried that is less."""
    cost = Cost(1.0, 1.0, floored=True)
    for _ in range(50):
        cost.observe(1000, 1000, 0.5)

    assert cost.seconds(100, 100) == pytest.approx(0.05)
    assert cost.bound(1000, 1000) == (pytest.approx(0.5), True)
    assert cost.seconds(2e3, 2e3) == pytest.approx(0.5)
    assert cost.bound(4e3, 4e3) == (pytest.approx(2.0), False)


@given(
    # The last is how many times longer something took than the guess says, as a power of ten.
    st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e9), st.floats(-4, 4)), max_size=30),
    st.integers(1, 10),
    st.floats(1e-3, 1e6),
    st.floats(1e-3, 1e9),
)
def test_whatever_was_seen_more_takes_no_less(
    observations: list[tuple[float, float, float]], times: int, x: float, y: float
) -> None:
    """Also where they are the same again and again."""
    floored, plain = Cost(1e-3, 1e-6, floored=True), Cost(1e-3, 1e-6)
    for own_x, own_y, power in observations * times:
        for cost in (floored, plain):
            cost.observe(own_x, own_y, (own_x * 1e-3 + own_y * 1e-6) * 10**power)

    for cost in (floored, plain):
        assert 0.0 <= cost.seconds(x, y) <= cost.seconds(2 * x, 1.5 * y) < math.inf
    assert all(0 < rate < math.inf for rate in plain.rates())
    seconds, known = floored.bound(x, y)
    assert (seconds is None) == (not observations)
    assert not known or seconds == floored.seconds(x, y)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Seconds per unit: tokens and pairs of the model, tokens and pairs of identification.

    And of copying, and what a pass takes at least.
    """

    per_token: float
    per_pair: float
    per_loaded: float
    per_scored: float
    per_copied: float
    per_pass: float = 0.0

    def forward(self, before: float, new: float) -> float:
        pairs = new * (before + (new + 1) / 2)
        return max(self.per_pass, self.per_token * new + self.per_pair * pairs)

    def load(self, work: RequestLengths, *, whole: bool) -> float:
        if whole:
            return 2 * self.per_copied * work.stored
        return self.per_loaded * work.stored + self.per_scored * work.stored * work.new


MACHINES = {
    "two cores": Machine(2e-3, 3e-7, 2e-6, 2e-8, 1e-6),
    "a small GPU": Machine(2e-4, 1e-8, 4e-6, 1e-9, 4e-7, 2e-2),
    "a large GPU": Machine(2.5e-5, 1.7e-9, 1e-6, 2e-10, 1e-7, 1e-2),
    "a tiny model on a large GPU": Machine(2e-6, 1e-10, 1e-6, 2e-10, 1e-7, 1e-3),
    "far slower": Machine(3e-2, 1e-6, 5e-5, 1e-7, 5e-5),
}
each_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))


def taught(
    machine: Machine, *, noise: float = 0.0, longest: float = 4000, most_before: int = 20_000
) -> Estimator:
    """After some hundred requests of all lengths, the first of which waited for a compiler."""
    pick, estimator = random.Random(5), Estimator(HIDDEN_SIZE)
    estimator.computing.observe(8, 4000.0, 3.0)
    for _ in range(300):
        new, before = longest ** pick.random(), pick.choice([0, 0, pick.randint(0, most_before)])
        seconds = machine.forward(before, new) * pick.uniform(1 - noise, 1 + noise)
        estimator.computing.observe(new, attention_pairs(before, new), seconds)
    return estimator


WORKS = [
    RequestLengths(resident=0, stored=300, new=20),
    RequestLengths(resident=0, stored=8000, new=100),
    RequestLengths(resident=4000, stored=2000, new=500),
    RequestLengths(resident=0, stored=16_000, new=3000),
]
QUESTION = RequestLengths(0, 3000, 20)


@each_machine
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_requests_take_is_learnt_within_a_tenth(machine: Machine, noise: float) -> None:
    estimator = taught(machine, noise=noise)

    for work in WORKS:
        found = estimator.estimate(work, 1.25, 8.0)

        hit = machine.forward(work.resident + work.stored, work.new)
        miss = machine.forward(work.resident, work.stored + work.new)
        assert found.compute == pytest.approx(hit, rel=0.1)
        assert found.recompute == pytest.approx(miss, rel=0.1)
        assert (found.retention, found.io, found.bits) == (1.0, 1.25, 8.0)


@each_machine
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_loading_in_a_pass_takes_is_learnt_within_a_tenth(
    machine: Machine, noise: float
) -> None:
    """Of which one disturbed pass says nothing: it may have waited for a compiler."""
    pick, costs = random.Random(5), LoadCosts()
    for number, whole in itertools.product(range(300), (False, True)):
        work = RequestLengths(0, stored=pick.randint(256, 20_000), new=pick.randint(16, 4000))
        seconds = machine.load(work, whole=whole) * pick.uniform(1 - noise, 1 + noise)
        costs.observe(work, seconds, whole=whole)
        assert number or not costs.seconds(work, whole=whole)

    for work, whole in itertools.product(WORKS, (False, True)):
        expected = machine.load(work, whole=whole)
        assert costs.seconds(work, whole=whole) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("times", [0.2, 5.0])
def test_a_device_that_changes_is_followed_at_once(times: float) -> None:
    """Also where nothing was seen since."""
    machine, pick = MACHINES["a large GPU"], random.Random(4)
    estimator = taught(machine)
    for _ in range(20):
        new = pick.uniform(1, 50)
        seconds = times * machine.forward(1000, new)
        estimator.computing.observe(new, attention_pairs(1000, new), seconds)

    expected = times * machine.forward(0, 9000)
    assert estimator.pass_seconds(0, 9000) == pytest.approx(expected, rel=0.25)


def test_what_was_seen_to_be_short_bounds_what_is_longer() -> None:
    machine = MACHINES["a large GPU"]
    cost = taught(machine, noise=0.1, longest=100, most_before=20).computing

    assert cost.bound(40, 400) == (pytest.approx(machine.per_pass, rel=0.1), True)
    bound, known = cost.bound(4000, attention_pairs(0, 4000))
    real = machine.forward(0, 4000)
    assert not known and bound is not None and real < bound < 10 * real
    assert cost.seconds(4000, 4e6) == pytest.approx(machine.per_pass, rel=0.1)


def test_where_nothing_is_known_it_loads() -> None:
    found = Estimator(HIDDEN_SIZE).estimate(WORKS[1], 1e9)

    assert found.load is found.recompute is None
    assert found.loads_faster(), "there is nothing that speaks against it"
    assert found.unhidden() == 1e9, "but nothing says that reading is hidden"


@each_machine
def test_questions_bound_what_computing_takes(machine: Machine) -> None:
    """They are mostly overhead. Where reading is slow, one prefix is computed to learn the rest."""
    estimator = Estimator(HIDDEN_SIZE)
    for new in (19, 22, 20):
        estimator.computing.observe(
            new, attention_pairs(3000, new), 0.02 + machine.forward(3000, new)
        )
    bound, real = estimator.estimate(QUESTION, 0.0).recompute, machine.forward(0, 3020)
    assert bound is not None and bound > 0.9 * real, "guesses how much is spent on pairs"

    fast, slow = (estimator.estimate(QUESTION, share * bound) for share in (0.49, 0.51))
    assert fast.load is slow.load is None
    assert fast.loads_faster() and not slow.loads_faster()

    estimator.computing.observe(3020, attention_pairs(0, 3020), real)
    assert estimator.estimate(QUESTION, 0.0).recompute == pytest.approx(real, rel=0.5)


@each_machine
def test_a_few_tokens_behind_many_take_longer_than_their_size_says(machine: Machine) -> None:
    """On a CPU twice as long: attention has little to do for each token that it reads."""
    estimator, pick = Estimator(HIDDEN_SIZE), random.Random(7)

    def behind(before: float) -> float:
        return machine.forward(before, 20) + 4e-5 * before

    for _ in range(20):
        new = pick.randint(300, 4000)
        estimator.observe_request(0, new, machine.forward(0, new))
        before = pick.randint(2000, 4000)
        estimator.observe_request(before, 20, behind(before))

    for before in (2500, 3000, 3500):
        assert estimator.pass_seconds(before, 20) == pytest.approx(behind(before), rel=0.2)
    found = estimator.estimate(QUESTION, 0.0)
    assert found.compute == pytest.approx(behind(3000), rel=0.2)
    assert estimator.computing_seconds(0, 3000) == pytest.approx(machine.forward(0, 3000), rel=0.1)


@each_machine
def test_short_chats_say_nothing_of_a_question_about_a_long_text(machine: Machine) -> None:
    """Each takes as long as any pass: per cached token, far longer than after many of these."""
    estimator = Estimator(HIDDEN_SIZE)
    for new in (30, 300, 3000) * 5:
        estimator.observe_request(0, new, machine.forward(0, new))
    for before in range(60, 160, 10):
        estimator.observe_request(before, 30, machine.forward(before, 30))

    found = estimator.estimate(QUESTION, 0.0)
    assert found.compute == pytest.approx(machine.forward(3000, 20), rel=0.2)
    assert found.loads_faster()


def test_blends_are_learnt_and_all_is_read_before() -> None:
    """By tokens, and by how much slower they compute: here three times."""
    machine, pick = MACHINES["two cores"], random.Random(2)
    estimator = taught(machine)
    for _ in range(40):
        work = RequestLengths(0, pick.randint(500, 8000), 20)
        computed = pick.uniform(0.15, 0.75) * work.stored
        hopeful = estimator.estimate_blend(work, computed, 0.0, measured=False).compute
        hopeful -= estimator.pass_seconds(work.stored, work.new)
        estimator.observe_blend(work, computed, 1e-4 * work.stored + 3 * hopeful)

    found = estimator.estimate_blend(QUESTION, 1000.0, 2.0)
    alone = estimator.pass_seconds(3000, 20)
    hopeful = estimator.estimate_blend(QUESTION, 1000.0, 2.0, measured=False).compute - alone
    assert found.compute == pytest.approx(0.3 + 3 * hopeful + alone, rel=0.1)
    assert found.load == found.compute + 2.0 == found.compute + found.unhidden()


@pytest.mark.parametrize(
    ("io", "compute", "load"), [(3.0, 2.0, 3.0), (2.0, 3.0, 3.0), (0.5, 0.0, 0.5), (0.0, 0.2, 0.2)]
)
def test_reading_and_computing_run_at_the_same_time(io: float, compute: float, load: float) -> None:
    """It loads where that takes no longer."""
    for recompute, faster in ((load - 0.1, False), (load, True), (None, True)):
        found = Estimate(0.25, io, compute, recompute)
        assert found.load == load and found.unhidden() == load - compute
        assert found.loads_faster() is faster


@pytest.mark.parametrize(
    ("ios", "bits"),
    [
        ((1.0, 0.5, 0.4), EXACT_BITS),
        ((4.0, 2.0, 1.5), 6.0),
        ((4.0, 2.0, 1.9), 8.0),
        ((9.0, 7.0, 6.0), 6.0),
    ],
    ids=["all hide", "one nearly", "little to gain", "a slow drive"],
)
@pytest.mark.parametrize("known", [True, False])
def test_auto_takes_the_most_bits_that_take_hardly_longer(
    ios: tuple[float, ...], bits: float, known: bool
) -> None:
    """A pass of 1.4 s, whether or not it is known what computing all would take."""
    choices = (EXACT_BITS, 8.0, 6.0)
    assert (
        choices[
            cost_module.best_within_tolerance([Estimate(1.0, io, 1.4, 9.0, known) for io in ios])
        ]
        == bits
    )


def test_a_pass_begins_early_if_it_hides_the_rest_and_computing_wins_if_it_is_faster() -> None:
    machine = MACHINES["two cores"]
    estimator = taught(machine)
    pass_seconds, all_of_it = machine.forward(3000, 20), machine.forward(0, 3000)

    late = estimator.max_layer_wait(0.8 * pass_seconds, 3000, 20)
    assert late == pytest.approx(cost_module.MAX_WAIT_FACTOR * pass_seconds, rel=0.1)
    assert estimator.max_layer_wait(1.2 * pass_seconds, 3000, 20) is None
    assert estimator.faster_computing_seconds(0.8 * all_of_it, 0, 3000) is None
    faster = estimator.faster_computing_seconds(1.2 * all_of_it, 0, 3000)
    assert faster == pytest.approx(all_of_it, rel=0.1)
    unknown = Estimator(HIDDEN_SIZE)
    assert (
        unknown.faster_computing_seconds(9.0, 0, 3000)
        is unknown.max_layer_wait(9.0, 3000, 20)
        is None
    )
