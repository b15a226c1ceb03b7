"""A prefix that turns out damaged within a forward pass: computed there, or one request fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import assert_same, report
from tests.serving.conftest import impress_flags
from tests.serving.damage import segments, store, store_damaged
from tests.serving.harness import Server, Zygote, running
from tests.serving.tiny_models import random_tokens

TOLERANCE = 1e-4
CHUNK = 128
# Of the tiny model: 3 layers, keys and values of 2 heads of 16 numbers in float32.
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
MOST_TOKENS = 1500


@pytest.fixture(scope="module", params=["overlap", "plain"])
def server(
    request: pytest.FixtureRequest, workdir: Path, tiny_llama: Path, zygote: Zygote
) -> Iterator[Server]:
    """Blocks of 128 tokens, as prefill is cut, and host memory for 1,500 tokens."""
    flags = {"overlap": (), "plain": ("--disable-overlap-schedule",)}[request.param]
    with running(
        tiny_llama,
        workdir / f"unreadable-{request.param}.log",
        *impress_flags(
            workdir / f"store-unreadable-{request.param}",
            "--impress-bits=exact",
            "--impress-min-prefix-tokens=64",
            f"--impress-recompute-gb={MOST_TOKENS * TOKEN_BYTES / 1e9}",
            "--max-total-tokens=60000",
            f"--chunked-prefill-size={CHUNK}",
            *flags,
        ),
        zygote=zygote,
    ) as server:
        yield server
        server.assert_quiet()


@pytest.fixture(autouse=True)
def _stays_whole(server: Server) -> Iterator[None]:
    yield
    server.flush()
    stats = server.stats()
    assert stats["integrity"] == "ok" and stats["requests_live"] == 0
    pool = stats["device_pool"]
    assert pool["private_tokens"] == pool["held_tokens"] == pool["writing_tokens"] == 0
    server.assert_quiet()


def total(server: Server, name: str) -> int:
    return int(server.stats()["totals"][name])


def ask(server: Server, prompt: Sequence[int], tokens: int = 8, **fields: Any) -> tuple[int, Any]:
    """Status and answer."""
    response = server.post(
        "/generate",
        input_ids=list(prompt),
        sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        return_logprob=True,
        **fields,
    )
    return response.status_code, response.json()


@pytest.mark.parametrize("new", [20, 3 * CHUNK + 5])
def test_a_prefix_of_many_blocks_is_computed_again(stock: Server, server: Server, new: int) -> None:
    prefix = store_damaged(server, 11 * CHUNK + 17, seed=new)
    prompt = [*prefix, *random_tokens(new, seed=2)]
    recomputed = total(server, "requests_recomputed")
    expected = stock.generate(prompt, 16, return_logprob=True)
    actual = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [actual], TOLERANCE)
    assert report(actual)["recomputed"] is True and report(actual)["path"] == "ssd"
    assert report(actual)["why"]["reason"] == "damaged"
    assert total(server, "requests_recomputed") == recomputed + 1
    resident = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [resident], TOLERANCE)
    assert report(resident)["path"] == "device"
    assert report(resident)["why"]["reason"] == "resident"
    server.flush()
    again = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [again], TOLERANCE)


def test_after_a_resident_part(stock: Server, server: Server) -> None:
    prefix = store_damaged(server, 900, seed=31)
    server.generate([*prefix[:300], *random_tokens(5, seed=32)], 1)
    prompt = [*prefix, *random_tokens(30, seed=33)]
    expected = stock.generate(prompt, 16, return_logprob=True)
    actual = server.generate(prompt, 16, return_logprob=True)
    assert_same([expected], [actual], TOLERANCE)
    assert report(actual)["recomputed"] is True
    assert report(actual)["resident_tokens"] >= 300 or report(actual)["stored_tokens"] <= 600


def test_several_in_one_batch(stock: Server, server: Server) -> None:
    prefixes = [store_damaged(server, length, seed=length) for length in (500, 640, 410)]
    prompts = [[*prefix, *random_tokens(9, seed=41)] for prefix in prefixes]
    expected = stock.generate_together(prompts, 16, return_logprob=True)
    actual = server.generate_together(prompts, 16, return_logprob=True)
    assert_same(expected, actual, TOLERANCE)
    assert [report(answer)["recomputed"] for answer in actual] == [True] * 3


@pytest.mark.parametrize("new", [10, 5 * CHUNK])
def test_one_without_room_fails_alone_and_is_computed_when_sent_again(
    stock: Server, server: Server, new: int
) -> None:
    """`new` tokens in one chunk of prefill, and in several of which the later are not computed."""
    large = [*store_damaged(server, MOST_TOKENS + 40, seed=50 + new), *random_tokens(new, seed=51)]
    damaged = [*store_damaged(server, 700, seed=52 + new), *random_tokens(11, seed=53)]
    intact = [*store(server, 600, seed=54 + new), *random_tokens(12, seed=55)]
    others = [damaged, intact, random_tokens(60, seed=56 + new)]
    failed = total(server, "requests_failed")
    expected = stock.generate_together(others, 16, return_logprob=True)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, server, large)
        answers = server.generate_together(others, 16, return_logprob=True)
    status, body = asked.result()
    assert status == 503, body
    assert "--impress-recompute-gb" in str(body) and "send it again" in str(body)
    assert_same(expected, answers, TOLERANCE)
    assert total(server, "requests_failed") == failed + 1
    before = segments(server)
    wanted = stock.generate(large, 8, return_logprob=True)
    status, again = ask(server, large)
    assert status == 200
    assert_same([wanted], [again], TOLERANCE)
    assert report(again)["recomputed"] is False and report(again)["stored_tokens"] == 0
    assert total(server, "requests_failed") == failed + 1
    server.flush()
    assert segments(server) > before, "what was computed then is stored"
    assert_same([wanted], [ask(server, large)[1]], TOLERANCE)


def test_nothing_of_a_failed_request_is_kept(server: Server) -> None:
    large = [*store_damaged(server, MOST_TOKENS + 90, seed=61), *random_tokens(300, seed=62)]
    before, passes = segments(server), server.log_text().count("Prefill batch")
    assert ask(server, large)[0] == 503
    server.flush()
    assert server.log_text().count("Prefill batch") <= passes + 1, "later chunks are not computed"
    assert segments(server) < before, "the damaged segment is gone, and none came"
    (_, answer), stored = ask(server, large, tokens=1), server.stats()["totals"]
    assert report(answer)["prefix_tokens"] == 0 and report(answer)["path"] == "computed"
    assert stored["requests_failed"] >= 1


def test_a_stream_ends_with_the_error(server: Server) -> None:
    large = [*store_damaged(server, MOST_TOKENS + 60, seed=71), *random_tokens(10, seed=72)]
    response = server.post(
        "/generate",
        input_ids=large,
        sampling_params={"temperature": 0, "max_new_tokens": 4},
        stream=True,
    )
    assert '"status_code":503' in response.text.replace(" ", "")
