"""One contract for every replacement rule and every policy; then what is special to each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.config import POLICIES, ImpressConfig
from impress_sglang.loops.types import Floats
from impress_sglang.store.policies import make_policy
from impress_sglang.tiers import rules
from impress_sglang.tiers.rules import ImportanceScore, LeastRecentlyUsed, ReplacementRule

RULES: dict[str, Callable[[], ReplacementRule]] = {
    "lru": LeastRecentlyUsed,
    "lfu": rules.LeastFrequentlyUsed,
    "score": lambda: ImportanceScore(0.0),
    "score with a half-life": lambda: ImportanceScore(10.0),
    "score with a half-life of a request": lambda: ImportanceScore(1.0),
}
SIZE = 6


def sized(rule: ReplacementRule) -> ReplacementRule:
    rule.resize(SIZE)
    return rule


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> ReplacementRule:
    return sized(RULES[request.param]())


def record(rule: ReplacementRule, *ids: int, share: float | Sequence[float] = 1.0) -> rules.Ids:
    rule.record(np.array(ids, np.int64), np.full(len(ids), share, np.float64))
    return rule.priorities[list(ids)]


def scores(rule: ReplacementRule) -> Floats:
    """What the priorities of scores stand for; see `priorities_of`."""
    exponents, below = np.divmod(rule.priorities, 2**32)
    return np.where(exponents > 0, np.ldexp(0.5 + below / 2**33, exponents - 1100), 0.0)


TURNS = st.integers(0, rules.LAST_TURN) | st.just(rules.LAST_TURN)
REQUESTS = st.lists(
    st.dictionaries(st.integers(0, SIZE - 1), st.floats(0.01, 1.0), max_size=SIZE), max_size=12
)


@pytest.mark.parametrize("name", RULES)
@given(requests=REQUESTS)
def test_only_accessed_chunks_change(name: str, requests: list[dict[int, float]]) -> None:
    rule, accessed = sized(RULES[name]()), set[int]()
    for request in requests:
        before = rule.priorities.copy()
        rule.advance()
        assert np.array_equal(rule.priorities, before)
        found = record(rule, *request, share=list(request.values()))
        accessed |= set(request)

        now = rule.priorities
        others = [chunk for chunk in range(SIZE) if chunk not in request]
        assert np.array_equal(now[others], before[others])
        assert np.array_equal(now[list(request)], found)
        assert now.dtype == found.dtype == np.int64
        assert set(np.flatnonzero(now)) == accessed
        assert (now >= 0).all() and (now < 2**62).all()


def test_a_forgotten_chunk_is_like_a_new_one(rule: ReplacementRule) -> None:
    for _ in range(5):
        rule.advance()
        record(rule, 0, 1, 2, share=0.5)
    kept = rule.priorities[2]

    rule.forget(0, 2)

    assert rule.priorities.tolist() == [0, 0, kept, 0, 0, 0]
    found = record(rule, 0, 3, share=0.25)
    assert found[0] == found[1], "nothing of the past is left"


def test_a_successor_has_the_history_of_the_chunk_it_replaces(rule: ReplacementRule) -> None:
    for chunk in (0, 1, 0, 2, 0):
        rule.advance()
        record(rule, chunk)

    rule.inherit(np.array([3]), np.array([0]), np.array([1.0]))

    assert rule.priorities[3] == rule.priorities[0]
    for _ in range(3):
        rule.advance()
        record(rule, 0, 3, share=0.5)
        assert rule.priorities[3] == pytest.approx(rule.priorities[0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(LeastRecentlyUsed, [4, 1, 5, 4]), (rules.LeastFrequentlyUsed, [4, 1, 4, 3])],
)
def test_what_was_used_last_or_often_is_worth_most(
    kind: type[ReplacementRule], expected: list[int]
) -> None:
    """Whatever the share; all layers of a request are as recent as each other."""
    rule = sized(kind())
    for chunks in [(0, 1), (2,), (3,), (0, 3), (2,)]:
        rule.advance()
        record(rule, *chunks, share=0.1)
        record(rule, chunks[0], share=1.0)

    assert rule.priorities.tolist()[:4] == expected


def test_score_is_frequency_times_the_average_share() -> None:
    """The first ten shares count alike; from then on the newest has a tenth."""
    rule = sized(ImportanceScore(0.0))
    shares = [0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 1.0, 0.4, 0.6, 0.8]
    for count, share in enumerate(shares, 1):
        rule.advance()
        record(rule, 0, share=share)
        mean = sum(shares[:count]) / count
        assert scores(rule)[0] == pytest.approx(count * mean)

    record(rule, 0, share=0.05)
    average = 0.9 * sum(shares) / 10 + 0.1 * 0.05
    assert scores(rule)[0] == pytest.approx(11 * average)
    record(rule, 0, share=1.0)
    assert scores(rule)[0] == pytest.approx(12 * (0.9 * average + 0.1))
    assert scores(rule)[1] == 0


@pytest.mark.parametrize("half_life", [1, 3, 25, 200])
def test_forward_decay_is_a_halved_count_up_to_one_factor(half_life: int) -> None:
    """All counts are halved at every so many requests."""
    rule, counts = sized(ImportanceScore(float(half_life))), np.zeros(SIZE)
    pick = np.random.default_rng(3)
    for number in range(1, 61):
        chunks = np.flatnonzero(pick.random(SIZE) < 0.4)
        rule.advance()
        record(rule, *chunks.tolist())
        counts /= 1 + (number % half_life == 0)
        counts[chunks] += 1

        if counts.any():
            factor = scores(rule).sum() / counts.sum()
            assert scores(rule) == pytest.approx(factor * counts, rel=1e-9)


@pytest.mark.parametrize("doublings", [0, 1, 500, 1100, 100_000, 2**29])
@given(worths=st.lists(st.floats(1e-300, 1e300), min_size=SIZE, max_size=SIZE))
def test_scores_have_the_order_of_their_numbers(doublings: int, worths: list[float]) -> None:
    found = rules.priorities_of(np.array(worths), doublings)

    for one, other in itertools.pairwise(np.argsort(worths).tolist()):
        assert found[one] <= found[other]
        assert found[one] < found[other] or worths[other] <= worths[one] * (1 + 2**-31)
    assert (found > 0).all() and (found < 2**62).all()


@pytest.mark.parametrize("name", RULES)
@given(requests=REQUESTS, turns=st.lists(TURNS, min_size=SIZE, max_size=SIZE))
def test_what_is_awaited_is_worth_more_than_all_else(
    name: str, requests: list[dict[int, float]], turns: list[int]
) -> None:
    """The first half of the chunks is, by its turns; of the rest the rule decides."""
    plain, rule = sized(RULES[name]()), sized(RULES[name]())
    ids = np.arange(SIZE // 2)
    rule.expect(ids, np.array(turns[: SIZE // 2]))
    for request in requests:
        for each in (rule, plain):
            each.advance()
            record(each, *request, share=list(request.values()))

    awaited, others = rule.priorities[ids], rule.priorities[SIZE // 2 :]
    assert (awaited > others.max()).all() and (awaited >= 2**62).all()
    by_turn = np.argsort(turns[: len(ids)], kind="stable")
    assert np.array_equal(np.argsort(-awaited, kind="stable"), by_turn)
    assert np.array_equal(others, plain.priorities[SIZE // 2 :])
    rule.expect(ids, np.full(len(ids), rules.NOT_AWAITED))
    assert np.array_equal(rule.priorities, plain.priorities)


EXPECTED_RULES = {
    "recompute": LeastRecentlyUsed,
    "as": LeastRecentlyUsed,
    "as+h2o+lru": LeastRecentlyUsed,
    "as+h2o+lfu": rules.LeastFrequentlyUsed,
    "paper+itf": rules.LeastFrequentlyUsed,
    "paper+itf+reorder": rules.LeastFrequentlyUsed,
    "paper": ImportanceScore,
    "impress+lru": LeastRecentlyUsed,
    "impress+lfu": rules.LeastFrequentlyUsed,
    "impress": ImportanceScore,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_what_its_name_says(name: str) -> None:
    policy = make_policy(ImpressConfig(policy=name))
    rule = policy.replacement()

    assert policy.name == name
    assert type(rule) is EXPECTED_RULES[name] and policy.replacement() is not rule
    assert policy.stores == (name != "recompute")
    assert policy.probes == name.startswith("paper"), "it stores what the paper says"
    assert policy.reorders == (name in ("paper", "paper+itf+reorder"))
