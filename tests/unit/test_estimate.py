"""Whether to load or to compute, and how much to load, on machines that are known exactly."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from impress_sglang.management.forecast import CodedBytes, StoredBytes
from impress_sglang.options import BITS, EXACT_BITS
from impress_sglang.serving.estimate import (
    RETENTIONS,
    Estimate,
    Estimator,
    RequestLengths,
    pairs_of,
)

HIDDEN_SIZE = 2048
CODES = 256


@dataclasses.dataclass(frozen=True)
class Machine:
    """Seconds per unit: tokens and pairs of the model, tokens and pairs of identification.

    And what a pass takes at least. Codes are restored in three times as long as exact KVs are
    copied.
    """

    per_token: float
    per_pair: float
    per_loaded: float
    per_scored: float
    per_copied: float
    per_pass: float = 0.0

    def forward(self, before: float, new: int) -> float:
        pairs = new * (before + (new + 1) / 2)
        return max(self.per_pass, self.per_token * new + self.per_pair * pairs)

    def load(self, work: RequestLengths, *, whole: bool, bits: float = EXACT_BITS) -> float:
        if whole:
            return (2 if bits == EXACT_BITS else 6) * self.per_copied * work.stored
        return self.per_loaded * work.stored + self.per_scored * work.stored * work.new


MACHINES = {
    "two cores": Machine(2e-3, 3e-7, 2e-6, 2e-8, 1e-6),
    "a small GPU": Machine(2e-4, 1e-8, 4e-6, 1e-9, 4e-7, 2e-2),
    "a large GPU": Machine(2.5e-5, 1.7e-9, 1e-6, 2e-10, 1e-7, 1e-2),
    "a tiny model on a large GPU": Machine(2e-6, 1e-10, 1e-6, 2e-10, 1e-7, 1e-3),
    "far slower": Machine(3e-2, 1e-6, 5e-5, 1e-7, 5e-5),
}


def taught(machine: Machine, *, noise: float = 0.0) -> Estimator:
    """After some hundred requests of all lengths."""
    pick, estimator = random.Random(5), Estimator(HIDDEN_SIZE)
    for _ in range(300):
        work = RequestLengths(0, stored=pick.randint(256, 20_000), new=pick.randint(16, 4000))
        factor = pick.uniform(1 - noise, 1 + noise)
        before = pick.choice([0, 0, pick.randint(0, 20_000)])
        seconds = machine.forward(before, work.new)
        estimator.note_forward(work.new, pairs_of(before, work.new), seconds * factor)
        for whole, bits in ((False, 8.0), (True, 8.0), (True, EXACT_BITS)):
            seconds = machine.load(work, whole=whole, bits=bits) * factor
            estimator.note_load(work, seconds, whole=whole, bits=bits)
    return estimator


WORKS = [
    RequestLengths(resident=0, stored=300, new=20),
    RequestLengths(resident=0, stored=8000, new=100),
    RequestLengths(resident=4000, stored=2000, new=500),
    RequestLengths(resident=0, stored=16_000, new=3000),
]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("retention", [0.05, 0.25, 0.75, 1.0])
def test_what_requests_take_is_learnt_within_a_tenth(
    name: str, noise: float, retention: float
) -> None:
    machine = MACHINES[name]
    estimator = taught(machine, noise=noise)

    for work in WORKS:
        found = estimator.estimate(work, retention, 1.25)

        hit = machine.forward(work.resident + retention * work.stored, work.new)
        hit += machine.load(work, whole=retention == 1.0)
        miss = machine.forward(work.resident, work.stored + work.new)
        assert found.compute == pytest.approx(hit, rel=0.1)
        assert found.recompute == pytest.approx(miss, rel=0.1)
        assert (found.retention, found.io) == (retention, 1.25)


@pytest.mark.parametrize("bits", BITS)
def test_what_restoring_takes_is_learnt_apart(bits: float) -> None:
    machine = MACHINES["a small GPU"]
    estimator = taught(machine)

    for work in WORKS:
        found, exact = (estimator.estimate(work, 1.0, 1.25, own) for own in (bits, EXACT_BITS))

        hit = machine.forward(work.resident + work.stored, work.new)
        hit += machine.load(work, whole=True, bits=bits)
        assert found.compute == pytest.approx(hit, rel=0.1)
        assert exact == estimator.estimate(work, 1.0, 1.25)
        assert (found.recompute, found.io) == (exact.recompute, exact.io)
        assert (found.retention, found.bits, exact.bits) == (1.0, bits, EXACT_BITS)


def test_pairs_are_those_of_new_tokens_and_what_they_attend_to() -> None:
    """Each attends to all before it, and to itself."""
    for before, new in ((0, 1), (0, 5), (7, 1), (7, 4)):
        assert pairs_of(before, new) == sum(before + own for own in range(1, new + 1))


def test_where_nothing_is_known_it_loads() -> None:
    found = Estimator(HIDDEN_SIZE).estimate(WORKS[1], 0.25, 1e9)
    assert Estimator(HIDDEN_SIZE).estimate(WORKS[1], 1.0, 1e9, 8.0).bits == 8.0

    assert found.load is None and found.recompute is None and found.compute is None
    assert found.loads_faster(1.0), "there is nothing that speaks against it"
    assert not found.hidden, "but nothing says that reading is hidden"


@pytest.mark.parametrize("name", MACHINES)
def test_questions_bound_what_computing_takes(name: str) -> None:
    """They are mostly overhead. Where reading is slow, one prefix is computed to learn the rest."""
    machine, estimator, work = MACHINES[name], Estimator(HIDDEN_SIZE), RequestLengths(0, 3000, 20)
    for new in (19, 22, 20):
        estimator.note_forward(new, pairs_of(3000, new), 0.02 + machine.forward(3000, new))
    most, real = estimator.estimate(work, 1.0, 0.0).recompute, machine.forward(0, 3020)
    assert most is not None and most > 0.9 * real, "guesses how much is spent on pairs"

    fast, slow = (estimator.estimate(work, 1.0, share * most) for share in (0.49, 0.51))
    assert fast.load is slow.load is None
    assert fast.loads_faster(1.0) and slow.loads_faster(0.9) and not slow.loads_faster(1.0)

    estimator.note_forward(3020, pairs_of(0, 3020), real)
    assert estimator.estimate(work, 1.0, 0.0).recompute == pytest.approx(real, rel=0.5)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("questions", [0, 1, 50])
def test_where_most_passes_are_questions_prompts_are_estimated_as_well(
    name: str, questions: int
) -> None:
    machine, pick, estimator = MACHINES[name], random.Random(3), Estimator(HIDDEN_SIZE)
    works = [*[(20, 3000), (60, 5000)] * questions, (2000, 0), (3000, 0), (6000, 0)]
    pick.shuffle(works)
    for new, before in works * 3:
        noise = pick.uniform(0.9, 1.1)
        estimator.note_forward(new, pairs_of(before, new), machine.forward(before, new) * noise)

    for work in (RequestLengths(0, 1900, 200), RequestLengths(0, 9000, 50)):
        found, real = estimator.estimate(work, 1.0, 0.0), machine.forward(0, work.stored + work.new)
        if found.compute is not None:
            assert found.recompute == pytest.approx(real, rel=0.25)
        else:
            assert found.recompute is not None and 0.75 * real < found.recompute < 2 * real


@pytest.mark.parametrize("name", MACHINES)
def test_a_few_tokens_behind_many_take_longer_than_their_size_says(name: str) -> None:
    """On a CPU twice as long: attention has little to do for each token that it reads."""
    machine, estimator, pick = MACHINES[name], Estimator(HIDDEN_SIZE), random.Random(7)

    def behind(before: float) -> float:
        return machine.forward(before, 20) + 4e-5 * before

    for _ in range(20):
        new = pick.randint(300, 4000)
        estimator.note_request(0, new, machine.forward(0, new))
        before = pick.randint(2000, 4000)
        estimator.note_request(before, 20, behind(before))

    for before in (2500, 3000, 3500):
        assert estimator.pass_seconds(before, 20) == pytest.approx(behind(before), rel=0.2)
        found = estimator.estimate(RequestLengths(before, 0, 20), 1.0, 0.0)
        assert found.compute == pytest.approx(behind(before), rel=0.2)
    work = RequestLengths(0, 3000, 20)
    assert estimator.estimate(work, 1.0, 0.0).compute == pytest.approx(behind(3000), rel=0.2)
    found = estimator.estimate(RequestLengths(0, 0, 3000), 1.0, 0.0)
    assert found.recompute == pytest.approx(machine.forward(0, 3000), rel=0.1)


def test_one_disturbed_question_is_not_what_every_pass_takes() -> None:
    """Else nothing would be loaded, and no other question be seen."""
    machine, estimator = MACHINES["two cores"], Estimator(HIDDEN_SIZE)
    for new in (3000, 3010, 2990):
        estimator.note_forward(new, pairs_of(0, new), machine.forward(0, new))
    estimator.note_request(3000, 20, 5.0)

    assert estimator.estimate(RequestLengths(0, 3000, 20), 1.0, 0.1).loads_faster(1.0)


def test_one_disturbed_load_is_not_what_every_load_takes() -> None:
    """The first one may have waited for a compiler."""
    machine, estimator = MACHINES["two cores"], Estimator(HIDDEN_SIZE)
    work = RequestLengths(0, 3000, 20)
    for new in (3000, 20, 3020, 20):
        estimator.note_forward(new, pairs_of(0, new), machine.forward(0, new))
    estimator.note_load(work, 9.0, whole=True, bits=8.0)
    assert estimator.estimate(work, 1.0, 0.1, 8.0).loads_faster(1.0)
    estimator.note_load(work, 9.0, whole=True, bits=8.0)
    assert not estimator.estimate(work, 1.0, 0.1, 8.0).loads_faster(1.0)


def test_what_loads_are_known_to_take_counts_before_computing_is_known() -> None:
    machine, estimator = MACHINES["a large GPU"], Estimator(HIDDEN_SIZE)
    for new in (20, 40, 100):
        estimator.note_forward(new, pairs_of(0, new), machine.forward(0, new))
        estimator.note_load(RequestLengths(0, 300, 20), 0.13, whole=True, bits=8.0)
    found = estimator.estimate(RequestLengths(0, 300, 20), 1.0, 1e-3, 8.0)

    assert found.compute is None and found.recompute is not None
    assert 1e-3 < found.recompute < found.least and not found.loads_faster(0.0)


@pytest.mark.parametrize(("retention", "bits"), [(0.5, 8.0), (1.0, 8.0), (1.0, EXACT_BITS)])
def test_what_every_load_takes_is_not_given_to_each_token(retention: float, bits: float) -> None:
    estimator = Estimator(HIDDEN_SIZE)
    estimator.note_forward(400, pairs_of(0, 400), 1e-3)
    for stored, seconds in ((256, 0.03), (3000, 0.031), (300, 0.03)) * 3:
        work = RequestLengths(0, stored, 20)
        estimator.note_load(work, seconds, whole=retention == 1.0, bits=bits)

    for stored in (100, 280, 20_000):
        found = estimator.estimate(RequestLengths(0, stored, 1), retention, 0.0, bits)
        if stored < 400:
            assert found.compute == pytest.approx(1e-3 + 0.03, rel=0.1)
            assert not found.loads_faster(0.0)


@pytest.mark.parametrize("bits", [EXACT_BITS, 8.0])
def test_loading_that_was_never_seen_is_tried_by_a_model_that_computes_fast(bits: float) -> None:
    machine, estimator = MACHINES["a tiny model on a large GPU"], Estimator(HIDDEN_SIZE)
    real = machine.forward(0, 8050)
    estimator.note_forward(8050, pairs_of(0, 8050), real)
    estimator.note_forward(10, 1e5, 0.0)

    assert estimator.estimate(RequestLengths(0, 8000, 50), 1.0, 0.9 * real, bits).loads_faster(1.0)


@pytest.mark.parametrize("name", MACHINES)
def test_a_slow_ssd_is_worse_than_computing_a_short_prefix_and_a_fast_one_better(name: str) -> None:
    machine, work = MACHINES[name], RequestLengths(resident=0, stored=300, new=50)
    estimator = taught(machine)
    recompute = machine.forward(0, 350)

    slow = estimator.estimate(work, 0.25, 1.5 * recompute)
    fast = estimator.estimate(work, 0.25, 0.5 * recompute)

    assert not slow.loads_faster(1.0) and slow.load == slow.io and not slow.hidden
    # A pass that takes as long for the question alone leaves nothing to gain.
    assert fast.loads_faster(1.0) is (machine.per_pass < recompute)
    nothing_to_read = estimator.estimate(work, 0.25, 0.0)
    assert nothing_to_read.hidden
    assert nothing_to_read.load == nothing_to_read.compute


def test_reading_and_computing_run_at_the_same_time() -> None:
    for io, compute, load in ((2.0, 3.0, 3.0), (3.0, 2.0, 3.0)):
        found = Estimate(0.25, io, compute, 10.0)
        assert found.load == load
        assert found.hidden == (io <= compute)


@pytest.mark.parametrize(
    ("recompute", "unread", "faster"),
    [(2.9, 1.0, False), (3.0, 1.0, True), (2.9, 0.9, True), (1.9, 0.0, False)],
)
def test_loads_where_that_takes_no_longer(recompute: float, unread: float, faster: bool) -> None:
    """What was read before takes no time any more, computing the question does."""
    assert Estimate(0.25, 3.0, 2.0, recompute).loads_faster(unread) is faster


def estimates(*ios: float) -> list[Estimate]:
    """By falling retention, beside half a second of computing."""
    retentions = (*RETENTIONS, 0.25)
    return [Estimate(r, io, 0.5, 9.0) for r, io in zip(retentions, ios, strict=True)]


@pytest.mark.parametrize(
    ("ios", "retention"),
    [
        ((0.1, 0.1, 0.1, 0.1, 0.1), 1.0),
        ((0.9, 0.7, 0.5, 0.4, 0.3), 0.5),
        ((0.9, 0.9, 0.9, 0.6, 0.4), 0.25),
        ((9.0, 8.0, 7.0, 6.0, 5.0), 0.25),
        ((0.9, 0.4, 0.9, 0.9, 0.9), 0.75),
    ],
    ids=["all are hidden", "some", "the floor", "none: the floor", "only one"],
)
def test_auto_takes_the_largest_hidden_retention_and_else_its_floor(
    ios: tuple[float, ...], retention: float
) -> None:
    assert Estimator(HIDDEN_SIZE).largest_hidden(estimates(*ios)).retention == retention


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
    estimates = [
        Estimate(1.0, io, 1.4 if known else None, 9.0, True, own, 1.4)
        for io, own in zip(ios, (EXACT_BITS, 8.0, 6.0), strict=True)
    ]
    assert Estimator(HIDDEN_SIZE).most_bits(estimates).bits == bits


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


@pytest.mark.parametrize(
    ("io", "compute", "expected"),
    [(0.5, 0.2, 0.6), (0.2, 0.5, 0.0), (0.5, None, 1.0), (0.0, 0.2, 0.0), (0.0, None, 0.0)],
)
def test_as_much_is_read_before_as_would_be_waited_for(
    io: float, compute: float | None, expected: float
) -> None:
    assert Estimate(0.25, io, compute, None).lead == pytest.approx(expected)


def test_coded_bytes_are_the_base_and_planes() -> None:
    found = CodedBytes(1000.0, (0.0, 400.0, 300.0))
    assert [found.expected(planes) for planes in range(4)] == [1000, 1000, 1400, 1700]
