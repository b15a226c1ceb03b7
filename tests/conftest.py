"""Settings of every test: few threads, fixed seeds, reproducible Hypothesis examples."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from impress_sglang.store import prefix_hashes
from tests.checkout import Checkout
from tests.matrix import select_pairs

# Examples are chosen from the test's source, so that two runs of one commit do the same.
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=35,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# `pytest --hypothesis-profile dev` searches longer, with new examples each time.
settings.register_profile("dev", max_examples=500, stateful_step_count=50, deadline=None)
settings.load_profile("ci")

# `make unit` runs two processes.
torch.set_num_threads(1)

# Servers, and modules that take longest, begin first, so that two processes end at the same time.
LONGEST = (
    *("test_ranks", "test_real_model", "test_pools", "test_random", "test_jobs"),
    *("test_triton_backend", "test_exact", "test_hybrids", "test_hicache_backend", "test_bits"),
    *("test_store_stateful", "test_coded", "test_tree_loads", "test_engine_bench", "test_refusals"),
)
# How a model is served in the randomised run.
RANKS = ("one", "tp", "dp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix", action="store_true", help="all combinations of parameters, not just pairs"
    )
    group = parser.getgroup("servers", "the servers that tests/serving starts")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where they run")
    group.addoption("--attention-backend", help="default: torch_native on a CPU, triton with CUDA")
    group = parser.getgroup("ranks", "the histories of tests/unit/test_ranks.py")
    group.addoption("--rank-steps", type=int, default=6000, help="how many steps they have")
    group.addoption(
        "--rank-requests", type=int, default=24, help="for each skew and draft, of servers"
    )
    group = parser.getgroup("random", "the randomised run of tests/serving/test_random.py")
    group.addoption("--random-minutes", type=float, default=0.4, help="how long its traffic lasts")
    group.addoption("--random-seed", type=int, default=1, help="what is drawn in it")
    group.addoption(
        "--random-ranks", choices=RANKS, default=RANKS[0], help="as two ranks of it, or replicas"
    )
    group.addoption(
        "--random-without", default="", help="kinds of requests, weights, faults: to leave out"
    )


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    usual = "triton" if device == "cuda" else "torch_native"
    os.environ["TESTS_DEVICE"] = device
    os.environ["TESTS_ATTENTION"] = config.getoption("--attention-backend") or usual
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Checkout())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select_pairs(config, items)
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[bool, int]:
    stem = item.path.stem
    return "serving" not in item.path.parts, (*LONGEST, stem).index(stem)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that is imported stays: to look through it again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        # Now it is old. If it were frozen, each store that opens would count it, in 60 ms.
        gc.collect()
        gc.enable()


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # Secret keys choose which windows of a text are counted, and which of its blocks share a place.
    chance = random.Random(1)
    keys = SimpleNamespace(token_bytes=chance.randbytes, randbits=chance.getrandbits)
    with mock.patch.object(prefix_hashes, "secrets", keys):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Nothing that a test writes need survive a loss of power; those are simulated."""
    with mock.patch("os.fsync"):
        yield
