"""A prefix that turns out damaged within a forward pass: computed there, or one request fails.

So it is where prefixes load in the pass; see `test_unreadable.py` for where they load beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.compare import assert_same, report
from tests.serving.conftest import Serve
from tests.serving.damage import segments, store_damaged
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

TOLERANCE = 1e-4
CHUNK = 128
# Of the tiny model: 3 layers, keys and values of 2 heads of 16 numbers in float32.
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
MOST_TOKENS = 1500
STAYS_WHOLE = "server"


@pytest.fixture(scope="module", params=["overlap", "plain"])
def server(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Server]:
    """Blocks of 128 tokens, as prefill is cut, and host memory for 1,500 tokens."""
    flags = {"overlap": (), "plain": ("--disable-overlap-schedule",)}[request.param]
    with serve(
        f"unreadable-{request.param}",
        "--impress-policy=paper",
        f"--impress-recompute-gb={MOST_TOKENS * TOKEN_BYTES / 1e9}",
        f"--chunked-prefill-size={CHUNK}",
        *flags,
    ) as server:
        yield server


def total(server: Server, name: str) -> int:
    return int(server.stats()["totals"][name])


@pytest.mark.parametrize("new", [20, 3 * CHUNK + 5])
def test_a_prefix_of_many_blocks_is_computed_again(stock: Server, server: Server, new: int) -> None:
    prefix = store_damaged(server, 11 * CHUNK + 17, seed=new)
    prompt = [*prefix, *random_tokens(new, seed=2)]
    recomputed = total(server, "requests_recomputed")
    expected, actual = (own.generate(prompt, 16, return_logprob=True) for own in (stock, server))
    assert_same([expected], [actual], TOLERANCE)
    assert report(actual)["recomputed"] is True and report(actual)["path"] == "ssd"
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
def test_one_without_room_fails_alone_and_is_computed_when_sent_again(
    stock: Server, server: Server, new: int
) -> None:
    """`new` tokens in one chunk of prefill, and in several of which the later are not computed."""
    large = [*store_damaged(server, MOST_TOKENS + 40, seed=50 + new), *random_tokens(new, seed=51)]
    damaged = [*store_damaged(server, 700, seed=52 + new), *random_tokens(11, seed=53)]
    intact = [*server.store(600, seed=54 + new), *random_tokens(12, seed=55)]
    others = [damaged, intact, random_tokens(60, seed=56 + new)]
    failed = total(server, "requests_failed")
    expected = stock.generate_together(others, 16, return_logprob=True)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.ask, large)
        answers = server.generate_together(others, 16, return_logprob=True)
    refused = asked.result()
    assert refused.status_code == 503, refused.text
    assert "--impress-recompute-gb" in refused.text and "send it again" in refused.text
    assert_same(expected, answers, TOLERANCE)
    assert total(server, "requests_failed") == failed + 1
    before = segments(server)
    wanted = stock.generate(large, 8, return_logprob=True)
    again = server.generate(large, 8, return_logprob=True)
    assert_same([wanted], [again], TOLERANCE)
    assert report(again)["recomputed"] is False and report(again)["stored_tokens"] == 0
    assert total(server, "requests_failed") == failed + 1
    server.flush()
    assert segments(server) > before, "what was computed then is stored"
    assert_same([wanted], [server.generate(large, 8, return_logprob=True)], TOLERANCE)


def test_nothing_of_a_failed_request_is_kept(server: Server) -> None:
    large = [*store_damaged(server, MOST_TOKENS + 90, seed=61), *random_tokens(300, seed=62)]
    before, passes = segments(server), server.log_text().count("Prefill batch")
    assert server.ask(large).status_code == 503
    server.flush()
    assert server.log_text().count("Prefill batch") <= passes + 1, "later chunks are not computed"
    wait_until(lambda: segments(server) < before)  # the damaged one goes, and none has come
    answer, stored = server.generate(large, 1), server.stats()["totals"]
    assert report(answer)["prefix_tokens"] == 0 and report(answer)["path"] == "computed"
    assert stored["requests_failed"] >= 1


def test_a_stream_ends_with_the_error(server: Server) -> None:
    large = [*store_damaged(server, MOST_TOKENS + 60, seed=71), *random_tokens(10, seed=72)]
    response = server.ask(large, 4, stream=True)
    assert '"status_code":503' in response.text.replace(" ", "")
