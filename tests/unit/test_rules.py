"""One contract for every replacement rule, as `ReplacementRule` states it; then each one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.tiers import rules
from impress_sglang.tiers.rules import (
    MAX_EXPONENT,
    NOBODY,
    AwaitedLast,
    ImportanceScore,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    ReplacementRule,
)

RULES: dict[str, Callable[[], ReplacementRule]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "score": lambda: ImportanceScore(0.0),
    "score with a half-life": lambda: ImportanceScore(10.0),
    "score with a half-life of a request": lambda: ImportanceScore(1.0),
    "score where nobody waits": lambda: AwaitedLast(ImportanceScore(1.0)),
}
SIZE = 6


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> ReplacementRule:
    return sized(RULES[request.param]())


def sized(rule: ReplacementRule, size: int = SIZE) -> ReplacementRule:
    rule.resize(size)
    return rule


def record(rule: ReplacementRule, *ids: int, share: float | Sequence[float] = 1.0) -> None:
    shares = np.full(len(ids), share, np.float64)
    rule.record(np.array(ids, np.int64), shares)


def inherit(rule: ReplacementRule, new: int, old: int, share: float = 1.0) -> None:
    rule.inherit(np.array([new]), np.array([old]), np.array([share]))


def order(rule: ReplacementRule) -> list[int]:
    """Chunks by priority, the lowest first."""
    return np.argsort(rule.priorities, kind="stable").tolist()


REQUESTS = st.lists(
    st.dictionaries(st.integers(0, SIZE - 1), st.floats(0.01, 1.0), max_size=SIZE), max_size=12
)


@pytest.mark.parametrize("name", RULES)
@given(requests=REQUESTS)
def test_only_accessed_chunks_change_but_for_one_factor(
    name: str, requests: list[dict[int, float]]
) -> None:
    """Also where a rule with a half-life has to scale its priorities every few requests."""
    with mock.patch.object(rules, "MAX_EXPONENT", 3.0):
        check_accesses(sized(RULES[name]()), requests)


def check_accesses(rule: ReplacementRule, requests: list[dict[int, float]]) -> None:
    accessed: set[int] = set()
    for request in requests:
        before = rule.priorities.copy()
        factor = rule.advance()
        assert factor > 0
        assert np.array_equal(rule.priorities, before * factor)
        scaled = rule.priorities.copy()
        record(rule, *request, share=list(request.values()))
        accessed |= set(request)

        others = [chunk for chunk in range(SIZE) if chunk not in request]
        assert np.array_equal(rule.priorities[others], scaled[others])
        assert rule.priorities.dtype == np.float64
        assert set(np.flatnonzero(rule.priorities > 0)) == accessed
        assert np.isfinite(rule.priorities).all() and (rule.priorities >= 0).all()


def test_more_room_keeps_what_is_known(rule: ReplacementRule) -> None:
    rule.advance()
    record(rule, 1, 4, share=[0.5, 0.25])
    before = rule.priorities.copy()

    rule.resize(3 * SIZE)

    assert rule.priorities.tolist() == [*before, *[0.0] * (2 * SIZE)]
    record(rule, 1, 3 * SIZE - 1, share=[0.5, 0.5])
    assert rule.priorities[1] >= before[1] > 0
    assert rule.priorities[-1] > 0


def test_a_forgotten_chunk_is_like_a_new_one(rule: ReplacementRule) -> None:
    for _ in range(5):
        rule.advance()
        record(rule, 0, 1, share=0.5)
    kept = rule.priorities[1]

    rule.forget(np.array([0, 5]))

    assert rule.priorities.tolist() == [0.0, kept, 0.0, 0.0, 0.0, 0.0]
    record(rule, 0, 3, share=0.25)
    assert rule.priorities[0] == rule.priorities[3], "nothing of the past is left"


def test_a_successor_has_the_history_of_the_chunk_it_replaces(rule: ReplacementRule) -> None:
    for chunk in (0, 1, 0, 2, 0):
        rule.advance()
        record(rule, chunk)

    inherit(rule, 3, 0)

    assert rule.priorities[3] == rule.priorities[0]
    for _ in range(3):
        rule.advance()
        record(rule, 0, 3, share=0.5)
        assert rule.priorities[3] == pytest.approx(rule.priorities[0])


def test_the_successor_of_an_unknown_chunk_is_unknown(rule: ReplacementRule) -> None:
    inherit(rule, 3, 0, share=0.5)

    assert rule.priorities[3] == 0
    record(rule, 3, 4, share=1.0)
    assert rule.priorities[3] == rule.priorities[4], "and begins like one"


def test_lru_orders_by_the_last_request() -> None:
    rule = sized(LeastRecentlyUsed(), 4)
    for chunks in [(0, 1), (2,), (3,), (0,), (2, 3)]:
        rule.advance()
        record(rule, *chunks)

    assert rule.priorities.tolist() == [4.0, 1.0, 5.0, 5.0]


def test_lru_counts_requests_and_not_accesses() -> None:
    """All layers of a request are as recent as each other."""
    rule = sized(LeastRecentlyUsed())
    rule.advance()
    record(rule, 0)
    record(rule, 1)
    record(rule, 0)

    assert rule.priorities[0] == rule.priorities[1]


def test_lfu_counts_accesses_whatever_their_share_and_age() -> None:
    rule = sized(LeastFrequentlyUsed(), 3)
    for chunks in [(0, 1), (0,), (0, 2), (2,)]:
        rule.advance()
        record(rule, *chunks, share=0.1)

    assert rule.priorities.tolist() == [3.0, 1.0, 2.0]


def test_score_is_frequency_times_the_average_share() -> None:
    """The first ten shares count alike; from then on the newest has a tenth."""
    rule = sized(ImportanceScore(0.0), 2)
    shares = [0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 1.0, 0.4, 0.6, 0.8]
    for count, share in enumerate(shares, 1):
        rule.advance()
        record(rule, 0, share=share)
        mean = sum(shares[:count]) / count
        assert rule.priorities[0] == pytest.approx(count * mean)

    record(rule, 0, share=0.05)
    average = 0.9 * sum(shares) / 10 + 0.1 * 0.05
    assert rule.priorities[0] == pytest.approx(11 * average)
    record(rule, 0, share=1.0)
    assert rule.priorities[0] == pytest.approx(12 * (0.9 * average + 0.1))
    assert rule.priorities[1] == 0


def test_a_successor_starts_with_its_expected_share() -> None:
    rule = sized(ImportanceScore(0.0), 3)
    for _ in range(4):
        record(rule, 0, share=0.5)

    inherit(rule, 1, 0, share=0.75)
    assert rule.priorities[1] == pytest.approx(4 * 0.75)
    record(rule, 1, share=0.25)

    assert rule.priorities[1] == pytest.approx(5 * (0.75 + (0.25 - 0.75) / 5)), "a fifth access"
    assert rule.priorities[0] == pytest.approx(4 * 0.5)


class HalvedCount:
    """What a half-life means: all counts are halved at every so many requests."""

    def __init__(self, half_life: int) -> None:
        self.half_life = half_life
        self.requests = 0
        self.counts = np.zeros(SIZE)

    def request(self, chunks: Sequence[int]) -> None:
        self.requests += 1
        if self.requests % self.half_life == 0:
            self.counts /= 2
        self.counts[list(chunks)] += 1


@pytest.mark.parametrize("half_life", [1, 3, 25, 200])
def test_forward_decay_is_a_halved_count_up_to_one_factor(half_life: int) -> None:
    rule, naive = sized(ImportanceScore(float(half_life))), HalvedCount(half_life)
    pick = np.random.default_rng(3)
    for _ in range(60):
        chunks = np.flatnonzero(pick.random(SIZE) < 0.4).tolist()
        rule.advance()
        record(rule, *chunks, share=1.0)
        naive.request(chunks)

        if naive.counts.any():
            factor = rule.priorities.sum() / naive.counts.sum()
            assert rule.priorities == pytest.approx(factor * naive.counts, rel=1e-9)


def test_rescaling_keeps_the_order_and_the_ratios() -> None:
    """A half-life of 1 comes to the limit of the exponent after 500 requests."""
    rule, naive = sized(ImportanceScore(1.0), SIZE), HalvedCount(1)
    factors = []
    for number in range(2 * int(MAX_EXPONENT) + 10):
        factors.append(rule.advance())
        chunks = [number % SIZE] if number % 5 else [number % SIZE, (number + 1) % SIZE]
        record(rule, *chunks)
        naive.request(chunks)
        assert order(rule) == order_of(naive.counts)
        assert rule.priorities.max() < 2.0 ** (MAX_EXPONENT + 2)

    assert [factor for factor in factors if factor != 1.0] == [2.0**-MAX_EXPONENT] * 2
    factor = rule.priorities.max() / naive.counts.max()
    assert rule.priorities == pytest.approx(factor * naive.counts, rel=1e-9)


def order_of(counts: np.ndarray) -> list[int]:
    return np.argsort(counts, kind="stable").tolist()


def test_without_a_half_life_nothing_is_ever_rescaled() -> None:
    rule = sized(ImportanceScore(0.0), 1)
    record(rule, 0, share=0.5)

    assert {rule.advance() for _ in range(2000)} == {1.0}
    assert rule.priorities[0] == 0.5


@pytest.mark.parametrize("name", RULES)
@given(requests=REQUESTS, turns=st.lists(st.integers(0, 2**52), min_size=SIZE, max_size=SIZE))
def test_what_is_awaited_is_worth_more_than_all_else(
    name: str, requests: list[dict[int, float]], turns: list[int]
) -> None:
    """The first half of the chunks is, by its turns; of the rest the rule decides."""
    plain, rule = sized(RULES[name]()), AwaitedLast(RULES[name]())
    rule.resize(SIZE)
    ids = np.arange(SIZE // 2)
    rule.expect(ids, np.array(turns[: SIZE // 2]))
    with mock.patch.object(rules, "MAX_EXPONENT", 3.0):
        for request in requests:
            assert rule.advance() == plain.advance()
            record(plain, *request, share=list(request.values()))
            record(rule, *request, share=list(request.values()))

    awaited, others = rule.priorities[ids], rule.priorities[SIZE // 2 :]
    assert (awaited > others.max()).all() and np.isfinite(awaited).all()
    assert np.array_equal(
        np.argsort(-awaited, kind="stable"), np.argsort(turns[: len(ids)], kind="stable")
    )
    assert np.array_equal(others, plain.priorities[SIZE // 2 :])
    rule.expect(ids, np.full(len(ids), NOBODY))
    assert np.array_equal(rule.priorities, plain.priorities)


def test_an_awaited_chunk_is_worth_more_than_any_score_can_be() -> None:
    """After as many half-lives as weights grow for."""
    rule = AwaitedLast(ImportanceScore(1.0))
    rule.resize(SIZE)
    for _ in range(int(MAX_EXPONENT) - 1):
        rule.advance()
        record(rule, *[0] * 1)
    rule.expect(np.array([1]), np.array([2**52]))
    assert rule.priorities[1] > rule.priorities[0] > 2.0 ** (MAX_EXPONENT - 10)
