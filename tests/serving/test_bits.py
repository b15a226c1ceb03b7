"""Prefixes in few bits on real servers, also by a basis: what answers get, what is read, and who
shares it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import assert_same, logprobs, paths, report
from tests.serving.conftest import Serve, module_server
from tests.serving.harness import Server
from tests.serving.tiny_models import make_basis, random_tokens
from tests.unit.waiting import wait_until

EXACT = {"impress_bits": "exact"}
STAYS_WHOLE = "impress"
FLAGS = ("--max-total-tokens=9000", "--impress-host-gb=0", "--impress-device-gb=0")
# Bits of a basis.
RATE, LOWER_RATE = 4.0, 3.0


impress = module_server("bits", *FLAGS)


def test_a_request_asks_for_an_exact_answer(impress: Server) -> None:
    prefix = random_tokens(700, seed=81)
    question = [*prefix, *random_tokens(20, seed=82)]
    computed = impress.generate(question, 12, return_logprob=True)
    impress.flush()
    # Somebody else has it in few bits by then.
    assert report(impress.generate(question, 4))["approximate"] is True
    exact = impress.generate(question, 12, return_logprob=True, **EXACT)
    assert_same([computed], [exact])
    said = report(exact)
    assert said["path"] == "ssd" and said["approximate"] is False and said["bits_mean"] == 16.0
    assert paths([impress.generate(question, 1, **EXACT)]) == ["device"]


def passes_of(
    server: Server, prompts: list[list[int]], new_tokens: list[int], aborted: str = ""
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Requests come in this order while a pass is under way, so that the next one sees them all.

    Returns their answers, and of each pass but that one how many begin in it and how many ran.
    """
    begun = len(server.log_text())
    greedy = {"temperature": 0, "ignore_eos": True, "custom_params": {"impress_bits": "exact"}}
    body = {
        "input_ids": prompts,
        "sampling_params": [{**greedy, "max_new_tokens": count} for count in new_tokens],
        "rid": [f"{begun}-{number}" for number in range(len(prompts))],
    }

    def found() -> list[tuple[str, str]]:
        begins = r"Prefill batch.*?#new-seq: (\d+).*?#running-req: (\d+)"
        return re.findall(begins, server.log_text()[begun:])[1:]

    with ThreadPoolExecutor(2) as pool:
        pool.submit(server.generate, random_tokens(3500, seed=begun), 1)
        time.sleep(0.5)
        asked = pool.submit(server.post, "/generate", **body)
        if aborted:
            wait_until(lambda: len(found()) >= 2)
            server.post("/abort_request", rid=f"{begun}-{aborted}").raise_for_status()
        return asked.result().json(), found()


def test_those_who_wait_for_prefixes_are_one_pass(impress: Server) -> None:
    """Two for each of three prefixes are queued behind a long pass, which loading does not wait
    for; none of them computes what is stored."""
    prefixes = [impress.store(500, seed=90 + number) for number in range(3)]
    questions = [
        [*prefix, *random_tokens(20, seed=95 + number)] for prefix in prefixes for number in (0, 1)
    ]
    answers, passes = passes_of(impress, questions, [4] * 6)
    assert sum(report(answer)["loaded_tokens"] for answer in answers) == 3 * 500
    assert all(report(answer)["prefix_tokens"] == 500 for answer in answers)
    assert sum(int(begin) for begin, _ in passes) == 6 and len(passes) <= 3


def test_who_does_not_fit_does_not_hold_up_those_who_wait(impress: Server) -> None:
    """SGLang admits nobody until a request ends once there was no room for one."""
    prefix = impress.store(500, seed=110)
    first, waits = ([*prefix, *random_tokens(20, seed=seed)] for seed in (111, 112))
    large = random_tokens(5000, seed=113)
    answers, passes = passes_of(impress, [first, waits, large], [800, 1, 3100], aborted="2")
    assert sum(int(begin) for begin, _ in passes[:2]) == 2, "both begin before there is room"
    assert [report(answer)["prefix_tokens"] for answer in answers[:2]] == [500, 500]


def test_the_same_history_gives_the_same_answers(impress: Server) -> None:
    prefix = impress.store(1300, seed=60)
    questions = [[*prefix, *random_tokens(20, seed=61 + number)] for number in range(3)]
    runs = []
    for _ in range(2):
        runs.append([impress.generate(question, 6, return_logprob=True) for question in questions])
        impress.flush()
    assert_same(*runs, 0.0)
    told = [[report(answer)["bits_mean"] for answer in run] for run in runs]
    assert told[0] == told[1]


@pytest.fixture(scope="module")
def basis(workdir: Path, tiny_llama: Path) -> Path:
    return make_basis(tiny_llama, workdir / "tiny.basis", ranks=2)


@pytest.fixture(scope="module")
def coded(serve: Serve, basis: Path) -> Iterator[Server]:
    with serve("basis", f"--impress-basis={basis}", *FLAGS) as server:
        yield server
        server.assert_whole()


@pytest.fixture(scope="module")
def two_ranks(serve: Serve, basis: Path) -> Iterator[Server]:
    """Each has a basis of its own heads, in more bits."""
    with serve("basis-ranks", f"--impress-basis={basis}", ranks=2) as server:
        yield server
        server.assert_whole()


@pytest.mark.parametrize(("name", "slack", "min_ratio"), [("coded", 0.0, 5), ("two_ranks", 1.0, 4)])
def test_a_prefix_comes_in_the_bits_of_the_basis(
    request: pytest.FixtureRequest, stock: Server, name: str, slack: float, min_ratio: int
) -> None:
    """In fewer bytes than exact KVs, and answers hardly differ."""
    server: Server = request.getfixturevalue(name)
    prefix = server.store(1200, seed=3)
    question = [*prefix, *random_tokens(25, seed=4)]
    right = stock.generate(question, 1, return_logprob=True)
    found = server.generate(question, 1, return_logprob=True)
    few = report(found)
    assert few["path"] == "ssd" and RATE <= few["bits_mean"] <= RATE + slack
    assert few["approximate"] is True and few["loaded_tokens"] == 1200
    assert abs(logprobs(found) - logprobs(right))[0] < 0.3
    exact = report(server.generate(question, 1, **EXACT))
    assert exact["bits_mean"] == 16.0 and min_ratio < exact["ssd_bytes"] / few["ssd_bytes"] < 8


@pytest.mark.parametrize("bits", [5, 6])
def test_who_asks_for_no_more_bits_than_it_is_worth_gets_it(coded: Server, bits: int) -> None:
    prefix = coded.store(300, seed=5)
    question = [*prefix, *random_tokens(9, seed=40 + bits)]
    said = report(coded.generate(question, 1, impress_bits=bits))
    assert said["path"] == "ssd" and said["bits_mean"] == RATE


def test_a_server_with_fewer_bits_takes_the_lower_rate(serve: Serve, basis: Path) -> None:
    """And exact KVs are computed where only codes are kept."""
    flags = (f"--impress-basis={basis}", "--impress-bits=5", "--impress-keep=codes")
    with serve("basis-5", *flags, stops=True) as server:
        prefix = server.store(400, seed=9)
        said = report(server.generate([*prefix, 7], 1))
        assert said["path"] == "ssd" and said["bits_mean"] == pytest.approx(LOWER_RATE, abs=0.02)
        for bits in (6, "exact"):
            said = report(server.generate([*prefix, 8], 1, impress_bits=bits))
            assert said["path"] == "computed" and said["why"]["reason"] == "quality"
            server.flush()
        warmed = random_tokens(300, seed=12)
        for outcomes in ({"stored", "being_written"}, {"stored_before"}):
            told = server.post("/impress/warm", input_ids=warmed).json()
            assert told["outcome"] in outcomes
            server.flush()
    with serve("basis-5", *flags) as server:
        said = report(server.generate([*random_tokens(400, seed=9), *random_tokens(9, seed=1)], 1))
        assert said["path"] == "ssd", "what was stored before a restart"
