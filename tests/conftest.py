"""Settings of every test: few threads, fixed seeds, reproducible Hypothesis examples."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Examples are chosen from the test's source, so that two runs of one commit do the same.
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# `pytest --hypothesis-profile dev` searches longer, with new examples each time.
settings.register_profile("dev", max_examples=500, stateful_step_count=50, deadline=None)
settings.load_profile("ci")

# `make unit` runs two processes.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random", "the randomised run of tests/serving/test_random.py")
    group.addoption("--random-minutes", type=float, default=2.0, help="how long its traffic lasts")
    group.addoption("--random-seed", type=int, default=1, help="what is drawn in it")
    group.addoption(
        "--random-without", default="", help="kinds of requests, weights, faults: to leave out"
    )


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
