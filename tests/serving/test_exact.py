"""Exact KVs: whatever way a prefix comes back, the answer is stock SGLang's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.serving.compare import Answer, assert_same, paths, report
from tests.serving.conftest import CRAMPED, Serve
from tests.serving.damage import flip_value, segments
from tests.serving.harness import PLAIN_ATTENTION, PREFILLING, Server
from tests.serving.tiny_models import random_tokens

TOLERANCE = 1e-4
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
        assert_same(expected, exact.generate_together(batch, 24, return_logprob=True), TOLERANCE)
        exact.flush()
        from_ssd = exact.generate_together(batch, 24, return_logprob=True)
        assert_same(expected, from_ssd, TOLERANCE)
        assert_from_ssd(exact, from_ssd, [len(prompt) - 1 for prompt in batch])
        resident = exact.generate_together(batch, 24, return_logprob=True)
        assert_same(expected, resident, TOLERANCE)
    assert exact.is_calm != ("Testing retraction." in exact.log_text())


def test_passes_of_torch_native_are_its_own(serve: Serve, stock: Server) -> None:
    """Nothing that is loaded needs our attention on a CPU, which is there to be quick."""
    flags = ("--impress-bits=exact", "--attention-backend=torch_native")
    with serve("plain-attention", *flags, preload=PLAIN_ATTENTION) as server:
        assert "TorchNativeAttnBackend is left alone" in server.log_text()
        prefix = server.store(600, seed=31)
        prompts = [[*prefix, *random_tokens(30, seed=32 + number)] for number in range(3)]
        expected = stock.generate_together(prompts, 12, return_logprob=True)
        answers = server.generate_together(prompts, 12, return_logprob=True)
        assert_same(expected, answers, TOLERANCE)
        assert sorted(paths(answers)) == ["device", "device", "ssd"]
        server.assert_whole()


TRUNK = random_tokens(900, seed=21)
CUTS = (900, 650, 333, 64)
# What is stored, what is resident then, the prompts that are asked, and how much of each is cached.
WAYS: dict[str, tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]] = {
    "stored, new, and twice the same": (
        [random_tokens(700, seed=1)],
        [],
        [
            *([*random_tokens(700, seed=1), *random_tokens(90, seed=seed)] for seed in (2, 3, 3)),
            random_tokens(300, seed=4),
            random_tokens(30, seed=5),
        ],
        [],
    ),
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
    "a new part of several chunks of prefill": (
        [random_tokens(400, seed=31)],
        [],
        [[*random_tokens(400, seed=31), *random_tokens(3000, seed=32)]],
        [400],
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
    assert_same(expected, actual, TOLERANCE)
    if cached:
        assert_from_ssd(exact, actual, cached)


def test_extra_key_and_cache_salt_are_kept_apart(exact: Server) -> None:
    prompt = random_tokens(400, seed=51)
    exact.generate(prompt, 1, extra_key="alice")
    exact.generate(prompt, 1, cache_salt="pepper")
    exact.flush()
    assert paths([exact.generate(prompt, 1)]) == ["computed"]
    exact.flush()
    assert paths([exact.generate(prompt, 1, extra_key="bob")]) == ["computed"]
    assert paths([exact.generate(prompt, 1, extra_key="alice")]) == ["ssd"]
    assert paths([exact.generate(prompt, 1, cache_salt="pepper")]) == ["ssd"]
    assert paths([exact.generate(prompt, 1, extra_key="alice", cache_salt="pepper")]) == [
        "computed"
    ]


def test_logprobs_that_start_inside_the_prefix(stock: Server, exact: Server) -> None:
    prompt = exact.store(600, seed=61)
    fields = {"return_logprob": True, "logprob_start_len": 350}
    expected = stock.generate(prompt, 4, **fields)
    actual = exact.generate(prompt, 4, **fields)
    assert_same([expected], [actual], TOLERANCE)
    assert_from_ssd(exact, [actual], [350])
    left = expected["meta_info"]["input_token_logprobs"]
    right = actual["meta_info"]["input_token_logprobs"]
    assert len(left) == len(right) == 250
    assert max(abs(a[0] - b[0]) for a, b in zip(left[1:], right[1:], strict=True)) <= TOLERANCE


def test_aborts_in_every_phase(exact: Server) -> None:
    stored = exact.store(1200, seed=81)
    exact.abort_in_every_phase([[*stored, *random_tokens(600, seed=82 + i)] for i in range(8)])


def test_more_requests_than_the_pool_holds(stock: Server, exact: Server) -> None:
    """A pool under pressure evicts, sends back and loads again, and every answer is right."""
    stored = [random_tokens(1000, seed=200 + i) for i in range(4)]
    exact.store_prompts(*stored)
    prompts = [[*stored[i % 4], *random_tokens(60, seed=300 + i)] for i in range(16)]
    expected = stock.generate_together(prompts, 24, return_logprob=True)
    actual = exact.generate_together(prompts, 24, return_logprob=True)
    assert_same(expected, actual, TOLERANCE)


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
        assert_same([resident], [ask(prompt, "ssd")], 1e-4)
        before = segments(server)
        lost = random_tokens(900, seed=2)
        answer = ask(lost, "computed")
        server.flush()
        (stored,) = segments(server) - before
        flip_value(stored)
        assert_same([answer], [ask(lost, "computed")], 1e-4)
        server.assert_whole()
