"""What is read for a request while it waits."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.integration.test_weights import SHAPE, TOKENS, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A store with a prompt, of which nothing is resident."""
    world = World(tmp_path)
    world.prefill("stored", 1000).open(SHAPE.num_layers)
    world.runtime.store.drain()
    del world.cache._saves["stored"]
    world.flush()
    world.runtime.store.ahead.set_waste(0.2)
    yield world
    world.cache._drop_matches()
    world.cache.check_integrity()
    world.runtime.close()


def _asks_for_log_probabilities(start: int) -> Req:
    tokens = array("q", range(1000, 1000 + TOKENS + 8))
    req = Req("r", "", tokens, SamplingParams(), return_logprob=True)
    req.logprob_start_len = start
    return req


@pytest.mark.parametrize(("start", "is_read"), [(-1, True), (TOKENS, True), (0, False)])
def test_only_what_can_be_matched_is_read(world: World, start: int, is_read: bool) -> None:
    """Tokens whose log-probabilities are asked for are computed, wherever they are stored."""
    world.cache.prefetch(_asks_for_log_probabilities(start))
    assert ("r" in world.cache._prefetches) is is_read
