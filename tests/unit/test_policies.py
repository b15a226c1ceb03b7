"""One contract for every policy, as `Policy` states it; then what is special to each."""

from __future__ import annotations

import numpy as np
import pytest

from impress_sglang.config import ImpressConfig
from impress_sglang.options import POLICIES
from impress_sglang.store.policies import Policy, make_policy
from impress_sglang.tiers.rules import ImportanceScore, LeastFrequentlyUsed, LeastRecentlyUsed

CONFIGS = [ImpressConfig(policy=policy) for policy in POLICIES]


@pytest.fixture(params=CONFIGS, ids=lambda config: config.policy)
def config(request: pytest.FixtureRequest) -> ImpressConfig:
    return request.param


@pytest.fixture
def policy(config: ImpressConfig) -> Policy:
    return make_policy(config)


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
    assert policy.stores == (config.policy != "recompute")
    assert policy.probes == config.policy.startswith("paper"), "it stores what the paper says"
    assert policy.reorders == (config.policy in ("paper", "paper+itf+reorder"))


def test_each_call_gives_a_replacement_rule_of_its_own(policy: Policy) -> None:
    first, second = policy.replacement(), policy.replacement()
    for rule in (first, second):
        rule.resize(2)
    first.advance()
    first.record(np.array([1]), np.array([0.5]))

    assert first.priorities[1] > 0
    assert second.priorities.tolist() == [0, 0]
