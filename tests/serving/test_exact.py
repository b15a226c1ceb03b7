"""Exact KVs: whatever way a prefix comes back, the answer is stock SGLang's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.serving.compare import Answer, assert_same, paths, report
from tests.serving.conftest import CRAMPED, Serve
from tests.serving.damage import flip_value, segments
from tests.serving.harness import PREFILLING, Server
from tests.serving.tiny_models import random_tokens

STAYS_WHOLE = "exact"
ONLY_EXACT = ("--impress-bits=exact", "--impress-keep=exact")


@pytest.fixture(scope="module", params=["overlap", "cramped"])
def exact(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Server]:
    """A roomy server with the overlap schedule, and one where everything is tight.

    There, slots are given in pages, and requests taken out and put back all the time.
    """
    if request.param == "overlap":
        yield request.getfixturevalue("roomy")
        return
    with serve("exact-cramped", *ONLY_EXACT, *CRAMPED, "--page-size=64", retracts=True) as server:
        server.is_calm = False
        yield server


def assert_from_ssd(server: Server, answers: list[Answer], cached: list[int]) -> None:
    """The prefixes came from SSD; where requests are put back, one may be resident by then."""
    if server.is_calm:
        assert paths(answers) == ["ssd"] * len(answers)
        assert [answer["meta_info"]["cached_tokens"] for answer in answers] == cached
    assert set(paths(answers)) <= {"ssd", "device"}


@pytest.fixture(scope="module")
def batches(stock: Server) -> list[tuple[list[list[int]], list[Answer]]]:
    """Prompts of 500 to 3,000 tokens in two batches, and stock's answers."""
    lengths = ((3000, 900, 500), (1300, 2300))
    prompts = [[random_tokens(length, seed=length) for length in batch] for batch in lengths]
    return [(batch, stock.generate_together(batch, 24, return_logprob=True)) for batch in prompts]


def test_prompts_computed_from_ssd_and_resident(
    batches: list[tuple[list[list[int]], list[Answer]]], exact: Server
) -> None:
    for batch, expected in batches:
        assert_same(expected, exact.generate_together(batch, 24, return_logprob=True))
        exact.flush()
        from_ssd = exact.generate_together(batch, 24, return_logprob=True)
        assert_same(expected, from_ssd)
        assert_from_ssd(exact, from_ssd, [len(prompt) - 1 for prompt in batch])
        resident = exact.generate_together(batch, 24, return_logprob=True)
        assert_same(expected, resident)
    assert exact.is_calm != ("Testing retraction." in exact.log_text())


TRUNK = random_tokens(900, seed=21)
CUTS = (900, 650, 333, 64)
# What is stored, what is resident then, the prompts that are asked, and how much of each is cached.
WAYS: dict[str, tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]] = {
    "the beginning is resident": (
        [random_tokens(1500, seed=11)],
        [[*random_tokens(1500, seed=11)[:600], *random_tokens(10, seed=12)]],
        [[*random_tokens(1500, seed=11), *random_tokens(50, seed=13)]],
        [1500],
    ),
    "branches that grow from a trunk": (
        [[*TRUNK[:cut], *random_tokens(200, seed=cut)] for cut in CUTS],
        [],
        [[*TRUNK[:cut], *random_tokens(200, seed=cut), *random_tokens(20, 99)] for cut in CUTS],
        [cut + 200 for cut in CUTS],
    ),
}


@pytest.mark.parametrize(("stored", "resident", "prompts", "cached"), WAYS.values(), ids=WAYS)
def test_whatever_is_stored_the_answers_are_those_of_stock(
    stock: Server,
    exact: Server,
    stored: list[list[int]],
    resident: list[list[int]],
    prompts: list[list[int]],
    cached: list[int],
) -> None:
    exact.store_prompts(*stored)
    for prompt in resident:
        exact.generate(prompt, 1)
    expected = stock.generate_together(prompts, 12, return_logprob=True)
    actual = exact.generate_together(prompts, 12, return_logprob=True)
    assert_same(expected, actual)
    assert_from_ssd(exact, actual, cached)


def test_extra_key_and_cache_salt_are_kept_apart(exact: Server) -> None:
    prompt = random_tokens(400, seed=51)
    alice, pepper = {"extra_key": "alice"}, {"cache_salt": "pepper"}
    exact.generate(prompt, 1, **alice)
    exact.generate(prompt, 1, **pepper)
    exact.flush()
    for fields in (alice, pepper):
        assert paths([exact.generate(prompt, 1, **fields)]) == ["ssd"]
    for fields in ({}, {"extra_key": "bob"}, alice | pepper):
        assert paths([exact.generate(prompt, 1, **fields)]) == ["computed"]


PREFILLS = (
    *("--disaggregation-mode=prefill", "--disaggregation-transfer-backend=nixl"),
    # Otherwise it would wait for an event of a GPU.
    *("--disable-overlap-schedule", "--max-total-tokens=9000"),
)


def test_a_prefill_server_stores_and_loads(serve: Serve) -> None:
    """What it sends reaches nobody here, and the first token is its whole answer."""
    prompt, rooms = random_tokens(1100, seed=1), itertools.count(1)
    with serve("prefill", *ONLY_EXACT, *PREFILLS, preload=PREFILLING) as server:

        def ask(prompt: Sequence[int], path: str) -> Any:
            answer = server.generate(prompt, 1, return_logprob=True, bootstrap_room=next(rooms))
            assert report(answer)["path"] == path
            return answer

        ask(prompt, "computed")
        resident = ask(prompt, "device")
        server.flush()
        assert_same([resident], [ask(prompt, "ssd")])
        before = segments(server)
        lost = random_tokens(900, seed=2)
        answer = ask(lost, "computed")
        server.flush()
        (stored,) = segments(server) - before
        flip_value(stored)
        assert_same([answer], [ask(lost, "computed")])
        server.assert_whole()
