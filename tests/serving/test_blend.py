"""Stored text that is no prefix, reused by real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bench.traffic.clients import Stream
from tests.serving.compare import Answer, assert_same, gaps_between, logprob_distance, report
from tests.serving.conftest import CRAMPED, Serve
from tests.serving.damage import flip_code, segment_of
from tests.serving.harness import SLOW_BLENDS, Server
from tests.serving.tiny_models import random_tokens

TOLERANCE = 1e-4
# All tokens are computed again, but not by way of SGLang's own pass.
ALL = 0.99999


@pytest.fixture(scope="module", params=["roomy", "cramped"])
def blending(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Server]:
    """In the second one all is tight, as in `test_exact.py`."""
    name = request.param
    # Or else some would be computed on a busy machine, because blending took too long before.
    bound = "--impress-blend-seconds=60"
    blends = ("--impress-blend=0.15", "--impress-blend-min-tokens=128", bound)
    flags = CRAMPED if name == "cramped" else ()
    with serve(f"blend-{name}", *blends, *flags, retracts=name == "cramped") as server:
        yield server
        server.assert_whole()


cramped = pytest.mark.parametrize("blending", ["cramped"], indirect=True)


def documents(seed: int, *lengths: int) -> list[list[int]]:
    return [random_tokens(length, seed=1000 * seed + own) for own, length in enumerate(lengths)]


def joined(documents: Sequence[Sequence[int]], order: Sequence[int], seed: int) -> list[int]:
    """Documents in some order, something short between them, and a question."""
    prompt = random_tokens(5, seed=seed)
    for number in order:
        prompt += [*documents[number], *random_tokens(3, seed=seed + number)]
    return prompt + random_tokens(20, seed=seed)


def store(server: Server, *prompts: list[int]) -> None:
    """On SSD only."""
    for prompt in prompts:
        server.generate(prompt, 1, **asking("off"))
    server.flush()


def asking(blend: float | str, **fields: Any) -> dict[str, Any]:
    return {"return_logprob": True, "impress_blend": blend, **fields}


def test_all_computed_again_is_stock(
    request: pytest.FixtureRequest, stock: Server, blending: Server
) -> None:
    """In batches and alone; documents come from several prompts, and reach over prefill chunks."""
    is_cramped = request.node.callspec.params["blending"] == "cramped"
    own = documents(1, 300, 700, 200, 450)
    store(blending, joined(own, [0, 1], 1), joined(own, [2, 3, 0], 2))
    batch = [joined(own, order, 3) for order in ([3, 1, 0, 2], [1, 2], [2, 1, 3])]
    expected = stock.generate_together(batch, 16, return_logprob=True)

    asked = asking(ALL, impress_store=False)
    together = blending.generate_together(batch, 16, **asked)
    blending.flush()
    alone = [blending.generate(prompt, 16, **asked) for prompt in batch]

    assert_same(expected, together, TOLERANCE)
    assert_same(expected, alone, TOLERANCE)
    for answer in (*together, *alone):
        told = report(answer)
        # Who was put back begins again behind what it had blended.
        ways = ("ssd", "device") if is_cramped else ("ssd",)
        assert told["path"] in ways and told["approximate"], told
        assert told["blended_tokens"] or told["path"] == "device"


def blended(answers: Sequence[Answer]) -> list[int]:
    return [report(answer)["blended_tokens"] for answer in answers]


def test_a_share_is_nearer_than_none(stock: Server, blending: Server) -> None:
    own = documents(2, 400, 400, 400)
    store(blending, joined(own, [0, 1, 2], 1))
    # No other prompt of this module begins so, so that there is no exact head.
    prompt = joined(own, [2, 1, 0], 31)
    expected = stock.generate(prompt, 1, return_logprob=True)

    found = {share: blending.generate(prompt, 1, **asking(share)) for share in (0.0, 0.5, 0.95)}

    for share, answer in found.items():
        told = report(answer)
        assert told["path"] == "ssd" and told["approximate"]
        assert told["used_tokens"] == len(prompt) - 23 and told["why"]["reason"] == "blended"
        if share == 0.0:
            assert told["blended_tokens"] == 1200 - 11
            tokens = told["tokens"]
            assert tokens["blended"] == 1200 - 11
            assert sum(tokens.values()) == answer["meta_info"]["prompt_tokens"]
    distances = [logprob_distance(expected, answer) for answer in found.values()]
    assert distances[2] < distances[0]


def question_distance(left: Answer, right: Answer) -> float:
    """Of the log-probabilities of the last tokens of a prompt, on average."""
    scores = [
        [own[0] for own in answer["meta_info"]["input_token_logprobs"][1:]]
        for answer in (left, right)
    ]
    return float(np.abs(np.subtract(*scores)).mean())


def test_what_was_blended_is_loaded_by_who_would_blend_as_much(
    stock: Server, blending: Server
) -> None:
    """With other questions, too; who has an exact one does not use it."""
    own = documents(3, 400, 400)
    store(blending, joined(own, [0, 1], 1))
    prompt = joined(own, [1, 0], 3)
    other = prompt[:-20] + random_tokens(20, seed=99)
    scored = {"logprob_start_len": len(prompt) - 20}
    expected = stock.generate(prompt, 8, return_logprob=True, **scored)

    def ask(tokens: list[int], blend: float | str, **custom: Any) -> Answer:
        return blending.generate(tokens, 8, **scored, **asking(blend, **custom))

    first = ask(prompt, 0.25)
    blending.flush()
    again = [ask(prompt, 0.25), ask(other, 0.0)]

    assert blended([first])[0] > 300 and not any(blended(again))
    for told in map(report, again):
        assert told["approximate"] and told["why"]["reason"] in ("loaded", "shared")
        assert told["prefix_tokens"] == len(prompt) - 20
    # Few bits of random weights err, too, but by less than text that stands elsewhere.
    assert question_distance(first, again[0]) < question_distance(expected, first)
    ask(prompt, "off")
    blending.flush()
    last = ask(prompt, 0.25)
    assert question_distance(expected, last) < question_distance(expected, first)


@cramped
def test_a_text_that_is_half_known_is_warmed_for_others(stock: Server, blending: Server) -> None:
    """It does not blend: its new document is reused elsewhere then. Several are one call."""
    own = documents(9, 300, 300, 300)
    store(blending, joined(own, [0], 51))
    half, new = joined(own, [1, 0], 52), joined(own, [2], 53)
    assert blending.generate(half, 1, **asking(0.0, impress_store=False))
    response = blending.post("/impress/warm", input_ids=[half, new])
    response.raise_for_status()
    told = response.json()
    assert [own["tokens"] for own in told] == [len(half), len(new)]
    assert all(own["outcome"] in ("being_written", "stored") for own in told)
    blending.flush()

    other = joined(own, [2, 1], 54)
    found = blending.generate(other, 1, **asking(0.0, impress_store=False))
    assert blended([found]) == [600 - 11]
    # As a prefix it is there for those who take nothing but exact KVs.
    prompt = [*half, *random_tokens(9, seed=55)]
    expected = stock.generate(prompt, 8, return_logprob=True)
    exact = blending.generate(prompt, 8, **asking("off", impress_bits="exact"))
    assert report(exact)["stored_tokens"] == len(half)
    assert_same([expected], [exact], TOLERANCE)


@cramped
def test_of_several_documents_only_the_damaged_one_is_computed(blending: Server) -> None:
    """The request that finds that is planned again without it, as the next one is."""
    own = documents(8, 540, 540)
    prompts = joined(own, [0], 41), joined(own, [1], 42)
    store(blending, *prompts)
    flip_code(segment_of(blending, prompts[0]))
    other = joined(own, [1, 0], 43)
    asked = asking(0.0, impress_store=False)
    told = []
    for _ in range(2):
        told.append(report(blending.generate(other, 8, **asked)))
        blending.flush()
    assert [own["why"]["reason"] for own in told] == ["blended", "blended"]
    # No prompt began so before: the head is computed.
    assert [own["blended_tokens"] for own in told] == [540 - 11] * 2


@pytest.fixture(scope="module")
def slow(serve: Serve) -> Iterator[Server]:
    """Its blocks have 32 tokens and sleep for 50 ms each; the drive can be slowed down as well."""
    flags = ("--impress-blend=0.15", "--impress-blend-seconds=60", "--impress-blend-min-tokens=128")
    with serve("blend-slow", *flags, preload=SLOW_BLENDS) as server:
        yield server
        server.assert_whole()


def test_others_go_on_while_a_blend_is_computed(slow: Server) -> None:
    """A block runs between two of their tokens: no gap is longer than a few blocks of dozens."""
    own = documents(20, 600, 600)
    store(slow, joined(own, [0, 1], 1))
    prompt = joined(own, [1, 0], 3)
    other = Stream(slow, random_tokens(40, seed=5), 500)
    other.wait(6)
    began = time.perf_counter()
    told = report(slow.generate(prompt, 1, **asking(0.5, impress_store=False)))
    ended = time.perf_counter()
    assert told["why"]["reason"] == "blended" and told["blended_tokens"] == 1200 - 11
    blocks = 1200 // 32
    assert ended - began > blocks * 0.05
    gaps = gaps_between([own.at for own in other.join()], began, ended)
    assert len(gaps) > blocks / 2, "somebody waited for several blocks"
    assert max(gaps) < (ended - began) / 5, sorted(gaps)[-5:]


@pytest.mark.parametrize("phase", ["read", "computed"])
def test_who_goes_away_leaves_a_blend_at_once(slow: Server, phase: str) -> None:
    """Meanwhile nothing is flushed; then nothing is held, and the next one blends."""
    own = documents(22 + (phase == "read"), 900, 900)
    store(slow, joined(own, [0, 1], 1))
    prompt = joined(own, [1, 0], 3)
    slow.emulate_ssd(0.05 if phase == "read" else 0)
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(slow.ask, prompt, 400, rid="gone", **asking(0.5))
        time.sleep(0.7)
        assert not slow.post("/flush_cache").ok, "slots are being filled"
        assert slow.stats()["device_pool"]["loading_tokens"] >= 1800
        began = time.monotonic()
        slow.post("/abort_request", rid="gone").raise_for_status()
        answer = gone.result(60)
        # All of it would take longer, on any machine.
        assert time.monotonic() - began < 10 * 0.05 * 1800 / 32 / 4
    meta = answer.json().get("meta_info")
    assert meta is None or meta["finish_reason"]["type"] == "abort"
    slow.emulate_ssd(0)
    slow.assert_whole()
    told = report(slow.generate(prompt, 1, **asking(0.0, impress_store=False)))
    assert told["why"]["reason"] == "blended"
