"""A stored prefix that turns out unreadable: it is computed in its request's own pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.compare import assert_same, report
from tests.serving.conftest import CRAMPED, Serve
from tests.serving.damage import segments, store_damaged
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

TOLERANCE = 1e-4
CHUNK = 512
STAYS_WHOLE = "server"


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    """Whatever is read comes from SSD, and is checked there."""
    memory = ("--impress-device-gb=0", "--impress-host-gb=0")
    with serve("unreadable", "--impress-bits=exact", *memory, *CRAMPED) as server:
        yield server


def assert_computed(said: dict[str, Any], num_tokens: int) -> None:
    """All of a prompt was computed, because what was stored of it is damaged."""
    assert said["path"] == "computed" and said["tokens"]["computed"] == num_tokens
    assert said["why"]["reason"] == "damaged"


@pytest.mark.parametrize("new", [20, 2 * CHUNK + 5])
def test_a_damaged_prefix_is_computed_and_stored_again(
    stock: Server, server: Server, new: int
) -> None:
    prefix = store_damaged(server, 1500, seed=new)
    prompt = [*prefix, *random_tokens(new, seed=2)]
    before = server.stats()["store"]["segments_quarantined"]
    expected, actual = (own.generate(prompt, 16, return_logprob=True) for own in (stock, server))
    assert_same([expected], [actual], TOLERANCE)
    assert_computed(report(actual), len(prompt))
    resident = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [resident], TOLERANCE)
    assert report(resident)["path"] == "device"
    wait_until(lambda: server.stats()["store"]["segments_quarantined"] == before + 1)
    server.flush()
    # By now the damaged file is out of the way.
    server.store_prompts(prompt)
    again = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [again], TOLERANCE)
    assert report(again)["path"] == "ssd"


def test_all_who_wait_for_it_compute_and_nobody_else_notices(stock: Server, server: Server) -> None:
    damaged, intact = store_damaged(server, 1200, seed=31), server.store(600, seed=32)
    prompts = [
        *([*damaged, *random_tokens(20, seed=33 + number)] for number in range(3)),
        [*intact, *random_tokens(12, seed=37)],
        random_tokens(60, seed=38),
    ]
    expected = stock.generate_together(prompts, 16, return_logprob=True)
    actual = server.generate_together(prompts, 16, return_logprob=True)
    assert_same(expected, actual, TOLERANCE)
    told = [report(answer) for answer in actual]
    # One of them may have computed it before another one was admitted.
    assert all(own["loaded_tokens"] == own["shared_tokens"] == 0 for own in told[:3])
    assert told[3]["path"] == "ssd" and told[4]["path"] == "computed"


def test_what_is_stored_before_the_damage_is_still_loaded(stock: Server, server: Server) -> None:
    """A chat of two segments, of which the second is damaged."""
    first = server.store(700, seed=41)
    before = segments(server)
    second = [*first, *random_tokens(600, seed=42)]
    server.store_prompts(second)
    (new,) = segments(server) - before
    new.write_bytes(new.read_bytes()[: new.stat().st_size // 2])
    prompt = [*second, *random_tokens(15, seed=43)]
    expected, actual = (own.generate(prompt, 8, return_logprob=True) for own in (stock, server))
    assert_same([expected], [actual], TOLERANCE)
    said = report(actual)
    assert said["path"] == "ssd" and said["loaded_tokens"] == 700
    assert said["why"]["reason"] == "loaded" and said["why"]["rest"] == "damaged"
    assert said["tokens"]["computed"] == 615
