"""One contract for every policy, as `Policy` states it; then what is special to each."""

from __future__ import annotations

import numpy as np
import pytest

from impress_sglang.config import ImpressConfig
from impress_sglang.options import EXACT_BITS, POLICIES
from impress_sglang.store.policies import Policy, make_policy
from impress_sglang.tiers.rules import ImportanceScore, LeastFrequentlyUsed, LeastRecentlyUsed

CONFIGS = [ImpressConfig(policy=policy) for policy in POLICIES]
RETENTIONS = [0.001, 0.05, 0.25, 0.5, 0.999, 1.0]
BITS = [4.0, 5.0, 6.5, 8.0, EXACT_BITS]


@pytest.fixture(params=CONFIGS, ids=lambda config: config.policy)
def config(request: pytest.FixtureRequest) -> ImpressConfig:
    return request.param


@pytest.fixture
def policy(config: ImpressConfig) -> Policy:
    return make_policy(config)


@pytest.fixture(params=RETENTIONS)
def retention(request: pytest.FixtureRequest) -> float:
    return request.param


EXPECTED_RULES = {
    "recompute": LeastRecentlyUsed,
    "as": LeastRecentlyUsed,
    "as+h2o+lru": LeastRecentlyUsed,
    "as+h2o+lfu": LeastFrequentlyUsed,
    "paper+itf": LeastFrequentlyUsed,
    "paper+itf+reorder": LeastFrequentlyUsed,
    "paper": ImportanceScore,
    "impress+lru": LeastRecentlyUsed,
    "impress+lfu": LeastFrequentlyUsed,
    "impress": ImportanceScore,
}


def test_a_policy_is_what_its_name_says(policy: Policy, config: ImpressConfig) -> None:
    replacement = EXPECTED_RULES[config.policy]

    assert policy.name == config.policy
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
