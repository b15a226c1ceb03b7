"""One contract for every policy, as `Policy` states it; then what is special to each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from impress_sglang.config import ImpressConfig
from impress_sglang.importance.selectors import H2OSelector, PaperSelector
from impress_sglang.options import CODED_POLICIES, EXACT_BITS, PART_POLICIES, POLICIES
from impress_sglang.store.policies import LoadOptions, Policy, make_policy
from impress_sglang.tiers.rules import ImportanceScore, LeastFrequentlyUsed, LeastRecentlyUsed

CONFIGS = [ImpressConfig(policy=policy) for policy in POLICIES]
RETENTIONS = [0.001, 0.05, 0.25, 0.5, 0.999, 1.0]
BITS = [4.0, 5.0, 6.5, 8.0, EXACT_BITS]
LENGTHS = [*range(1, 300), 1000, 1001, 4096, 100_000]


@pytest.fixture(params=CONFIGS, ids=lambda config: config.policy)
def config(request: pytest.FixtureRequest) -> ImpressConfig:
    return request.param


@pytest.fixture
def policy(config: ImpressConfig) -> Policy:
    return make_policy(config)


@pytest.fixture(params=RETENTIONS)
def retention(request: pytest.FixtureRequest) -> float:
    return request.param


def test_more_is_loaded_of_a_longer_prefix_and_at_a_higher_retention(policy: Policy) -> None:
    """Or as much, and never more than there is."""
    counts = np.array([[policy.tokens_to_load(m, own) for m in LENGTHS] for own in RETENTIONS])

    assert (np.diff(counts, axis=0) >= 0).all() and (np.diff(counts, axis=1) >= 0).all()
    assert (counts >= 0).all() and (counts <= LENGTHS).all()


def test_depends_on_length_and_retention_alone(
    policy: Policy, config: ImpressConfig, retention: float
) -> None:
    """Not on options of the server, nor on what was asked before."""
    forward = [policy.tokens_to_load(m, retention) for m in LENGTHS]
    other = make_policy(dataclasses.replace(config, alpha=0.123))

    assert [other.tokens_to_load(m, retention) for m in reversed(LENGTHS)] == forward[::-1]


@pytest.mark.parametrize("bits", BITS)
def test_fewer_bits_are_for_those_who_read_codes(
    policy: Policy, retention: float, bits: float
) -> None:
    for chosen in (False, True):
        found = policy.bits(LoadOptions(retention, bits, chosen))

        assert found == (bits if policy.name in CODED_POLICIES else EXACT_BITS)


@pytest.mark.parametrize("bits", BITS)
def test_exact_is_what_has_all_tokens_and_all_bits(
    policy: Policy, retention: float, bits: float
) -> None:
    wanted = LoadOptions(retention, bits)

    assert policy.exact(wanted) == (retention == 1.0 and policy.bits(wanted) == EXACT_BITS)
    assert policy.exact(wanted) == policy.exact(dataclasses.replace(wanted, chosen=True))


@pytest.mark.parametrize("name", PART_POLICIES)
@pytest.mark.parametrize(
    ("retention", "m", "k"), [(0.25, 1000, 250), (0.1, 30, 3), (0.5, 7, 4), (1.0, 9, 9)]
)
def test_policies_with_important_parts_load_their_share(
    name: str, retention: float, m: int, k: int
) -> None:
    policy = make_policy(ImpressConfig(policy=name))

    assert policy.stores and policy.exact(LoadOptions(retention)) == (k == m)
    assert policy.tokens_to_load(m, retention) == k


def test_who_stores_nothing_loads_nothing(policy: Policy, retention: float) -> None:
    assert policy.stores == any(policy.tokens_to_load(m, retention) for m in LENGTHS)


EXPECTED_RULES = {
    "recompute": (H2OSelector, LeastRecentlyUsed),
    "as": (H2OSelector, LeastRecentlyUsed),
    "as+h2o+lru": (H2OSelector, LeastRecentlyUsed),
    "as+h2o+lfu": (H2OSelector, LeastFrequentlyUsed),
    "paper+itf": (PaperSelector, LeastFrequentlyUsed),
    "paper+itf+reorder": (PaperSelector, LeastFrequentlyUsed),
    "paper": (PaperSelector, ImportanceScore),
    "impress+lru": (H2OSelector, LeastRecentlyUsed),
    "impress+lfu": (H2OSelector, LeastFrequentlyUsed),
    "impress": (H2OSelector, ImportanceScore),
}


def test_a_policy_is_what_its_name_says(policy: Policy, config: ImpressConfig) -> None:
    selector, replacement = EXPECTED_RULES[config.policy]

    assert policy.name == config.policy
    assert type(policy.selector) is selector
    assert type(policy.replacement()) is replacement
    assert policy.scores == (replacement is ImportanceScore), "of resident prefixes as of chunks"
    assert policy.stores == (config.policy != "recompute")
    assert policy.probes == config.policy.startswith("paper"), "it stores what the paper says"
    assert policy.reorders == (config.policy in ("paper", "paper+itf+reorder"))


def test_each_call_gives_a_replacement_rule_of_its_own(policy: Policy) -> None:
    first, second = policy.replacement(), policy.replacement()
    for rule in (first, second):
        rule.resize(2)
    first.advance()
    first.record(np.array([1]), np.array([0.5]))

    ids = np.arange(2)
    assert first.priorities(ids)[1] > 0
    assert second.priorities(ids).tolist() == [0, 0]


def test_the_options_reach_the_rules() -> None:
    paper = make_policy(ImpressConfig(policy="paper", alpha=0.3))
    assert paper.selector == PaperSelector(0.3)
    fast = make_policy(ImpressConfig(half_life=1.0)).replacement()
    never = make_policy(ImpressConfig(half_life=0.0)).replacement()
    for rule in (fast, never):
        rule.resize(2)
        for chunk in (0, 0, 1):
            rule.advance()
            rule.record(np.array([chunk]), np.ones(1))

    ids = np.arange(2)
    assert fast.priorities(ids)[1] > fast.priorities(ids)[0]
    assert never.priorities(ids)[1] < never.priorities(ids)[0]
