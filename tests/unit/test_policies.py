"""One contract for every policy, as `Policy` states it; then what is special to each."""

from __future__ import annotations

import pytest

from impress_sglang.config import POLICIES, ImpressConfig
from impress_sglang.management.policies import Policy, make_policy

CONFIGS = [
    *[ImpressConfig(policy=policy) for policy in POLICIES],
    ImpressConfig(policy="impress", retention=0.001),
    ImpressConfig(policy="impress", retention=0.5),
    ImpressConfig(policy="impress", retention=1.0),
]
LENGTHS = [*range(1, 300), 1000, 1001, 4096, 100_000]


@pytest.fixture(params=CONFIGS, ids=lambda config: f"{config.policy}-{config.retention}")
def config(request: pytest.FixtureRequest) -> ImpressConfig:
    return request.param


@pytest.fixture
def policy(config: ImpressConfig) -> Policy:
    return make_policy(config)


def test_name_is_the_value_of_the_option(policy: Policy, config: ImpressConfig) -> None:
    assert policy.name == config.policy


def test_loads_nothing_or_between_one_and_all_tokens(policy: Policy) -> None:
    for m in LENGTHS:
        assert 0 <= policy.tokens_to_load(m) <= m


def test_never_loads_less_of_a_longer_prefix(policy: Policy) -> None:
    counts = [policy.tokens_to_load(m) for m in LENGTHS]

    assert counts == sorted(counts)


def test_depends_on_the_length_alone(policy: Policy, config: ImpressConfig) -> None:
    forward = [policy.tokens_to_load(m) for m in LENGTHS]
    other = make_policy(config)

    assert [other.tokens_to_load(m) for m in reversed(LENGTHS)] == forward[::-1]


def test_exact_means_all_or_nothing(policy: Policy) -> None:
    whole = all(policy.tokens_to_load(m) in (0, m) for m in LENGTHS)

    assert policy.exact == whole


def test_what_is_never_stored_is_never_loaded(policy: Policy) -> None:
    if not policy.stores:
        assert all(policy.tokens_to_load(m) == 0 for m in LENGTHS)


def test_recompute_stores_nothing() -> None:
    assert not make_policy(ImpressConfig(policy="recompute")).stores


def test_as_loads_everything_whatever_the_retention() -> None:
    policy = make_policy(ImpressConfig(policy="as", retention=0.1))

    assert policy.stores and policy.exact
    assert [policy.tokens_to_load(m) for m in LENGTHS] == LENGTHS


@pytest.mark.parametrize(("retention", "m", "k"), [(0.25, 1000, 250), (0.1, 30, 3), (0.5, 7, 4)])
def test_impress_loads_its_share(retention: float, m: int, k: int) -> None:
    policy = make_policy(ImpressConfig(policy="impress", retention=retention))

    assert policy.stores and not policy.exact
    assert policy.tokens_to_load(m) == k


def test_impress_at_retention_one_is_exact() -> None:
    policy = make_policy(ImpressConfig(policy="impress", retention=1.0))

    assert policy.exact
    assert [policy.tokens_to_load(m) for m in LENGTHS] == LENGTHS
