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

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
