"""A prefix that turns out damaged within a forward pass: its request is queued again, and computed.

So it is where prefixes load in the pass; see `test_unreadable.py` for where they load beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.serving.compare import assert_same, report
from tests.serving.conftest import Serve
from tests.serving.damage import store_damaged
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

TOLERANCE = 1e-4
CHUNK = 128
STAYS_WHOLE = "server"


@pytest.fixture(scope="module", params=["overlap", "plain"])
def server(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Server]:
    """Prefill is cut into chunks of 128 tokens."""
    flags = {"overlap": (), "plain": ("--disable-overlap-schedule",)}[request.param]
    with serve(
        f"unreadable-{request.param}",
        "--impress-policy=paper",
        f"--chunked-prefill-size={CHUNK}",
        *flags,
    ) as server:
        yield server


def total(server: Server, name: str) -> int:
    return int(server.stats()["totals"][name])


@pytest.mark.parametrize("new", [20, 3 * CHUNK + 5])
def test_it_is_computed(stock: Server, server: Server, new: int) -> None:
    """`new` tokens in one chunk of prefill, and in several."""
    prefix = store_damaged(server, 11 * CHUNK + 17, seed=new)
    prompt = [*prefix, *random_tokens(new, seed=2)]
    recomputed = total(server, "requests_recomputed")
    expected, actual = (own.generate(prompt, 16, return_logprob=True) for own in (stock, server))
    assert_same([expected], [actual], TOLERANCE)
    assert report(actual)["recomputed"] is True and report(actual)["path"] == "computed"
    assert actual["meta_info"]["cached_tokens"] == 0
    assert report(actual)["why"]["reason"] == "damaged"
    assert report(actual)["tokens"]["computed"] == len(prompt)
    assert total(server, "requests_recomputed") == recomputed + 1
    resident = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [resident], TOLERANCE)
    assert report(resident)["path"] == "device"
    assert report(resident)["why"]["reason"] == "resident"
    server.flush()
    again = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [again], TOLERANCE)


@pytest.mark.parametrize("new", [10, 5 * CHUNK])
def test_others_go_on(stock: Server, server: Server, new: int) -> None:
    prompts = [
        [*store_damaged(server, 1500, seed=50 + new), *random_tokens(new, seed=51)],
        [*store_damaged(server, 700, seed=52 + new), *random_tokens(11, seed=53)],
        [*server.store(600, seed=54 + new), *random_tokens(12, seed=55)],
        random_tokens(60, seed=56 + new),
    ]
    expected, actual = (
        own.generate_together(prompts, 16, return_logprob=True) for own in (stock, server)
    )
    assert_same(expected, actual, TOLERANCE)
    assert [report(own)["recomputed"] for own in actual] == [True, True, False, False]
    assert report(actual[2])["path"] == "ssd"
    server.flush()
    again = server.generate_together(prompts, 16, return_logprob=True)
    assert_same(expected, again, TOLERANCE)
    assert not any(report(own)["recomputed"] for own in again)


def test_a_stream_has_the_answer(stock: Server, server: Server) -> None:
    prompt = [*store_damaged(server, 400, seed=71), *random_tokens(10, seed=72)]
    response = server.ask(prompt, 4, stream=True)
    *_, last = [line for line in response.text.splitlines() if line.startswith("data: {")]
    answer = json.loads(last.removeprefix("data: "))
    assert answer["output_ids"][-4:] == stock.generate(prompt, 4)["output_ids"]
    assert answer["meta_info"]["impress"]["recomputed"] is True
