"""Prefixes in few bits on real servers: what answers get, what is read, and who shares it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from impress_sglang.options import BITS, BITS_TEXT
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.open_segment import OpenSegment
from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import make_model, random_tokens
from tests.unit.waiting import wait_until

EXACT = {"impress_bits": "exact"}
STAYS_WHOLE = "impress"


@pytest.fixture(scope="module")
def impress(serve: Serve) -> Iterator[Server]:
    flags = ("--max-total-tokens=9000", "--impress-host-gb=0", "--impress-device-gb=0")
    with serve("bits", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def fewer(serve: Serve) -> Iterator[Server]:
    with serve("fewer-bits", "--impress-bits=5") as server:
        yield server


def add_key_bias(folder: Path, layer: int) -> None:
    """Give the first KV head of a layer large biases, one of which its queries see.

    Rotated, they widen the ranges of half of the channels.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        attention.k_proj.bias[: attention.head_dim // 4] = 5000.0
        # Four query heads share it.
        attention.q_proj.bias[2 :: attention.head_dim][:4] = 3.0
    model.save_pretrained(folder)


def test_a_head_with_a_large_key_bias_gets_more_bits(workdir: Path, serve: Serve) -> None:
    """As its ranges are wide, and queries look there."""
    folder = make_model("qwen2", workdir / "biased")
    add_key_bias(folder, layer=1)
    with serve("biased", model=folder) as server:
        prefix = server.store(1000, seed=21)
        said = report(server.generate([*prefix, *random_tokens(20, seed=22)], 1))
    assert said["path"] == "ssd" and said["bits_mean"] == 6.0
    (path,) = workdir.glob("store-biased/*/segments/*/*.kv")
    segment = OpenSegment(path, FileSystem(), direct=False)
    shape, pages = segment.layout.shape, segment.layout.codes[1]
    memory = AlignedMemory(pages.layer_bytes)
    segment.fill(memory, segment.layout.codes_offset(1))
    segment.close()
    groups = pages.groups_in(torch.frombuffer(memory.view, dtype=torch.uint8))[: pages.num_groups]
    begin, end = shape.group_layout.places[2:4]
    pairs = groups[:, begin:end].view(len(groups), shape.num_kv_heads, -1).float().mean((0, 2))
    assert pairs[0] > 1.2 > pairs.mean() == 1.0


def test_more_bits_are_nearer_to_what_was_computed(
    impress: Server, fewer: Server, stock: Server
) -> None:
    """On average; weights are random, so that codes do worse than on text."""
    prefix = random_tokens(1200, seed=3)
    questions = [[*prefix, *random_tokens(25, seed=seed)] for seed in range(40, 48)]
    right = [logprob(stock.generate(own, 1, return_logprob=True)) for own in questions]
    errors = []
    for number, server in ((5.0, fewer), (6.0, impress)):
        server.store(1200, seed=3)
        answers = [server.generate(own, 1, return_logprob=True) for own in questions]
        assert {report(own)["bits_mean"] for own in answers[:1]} == {number}
        errors.append(np.abs(np.subtract([logprob(own) for own in answers], right)).mean())
    assert errors[1] < 0.75 * errors[0]


def test_who_asks_for_more_bits_than_there_are_gets_exact_kvs(
    impress: Server, fewer: Server
) -> None:
    question = [*fewer.store(300, seed=5), *random_tokens(9, seed=6)]
    impress.store(300, seed=5)
    for server, bits, got in ((impress, 5, 6.0), (fewer, 5, 5.0), (fewer, 6, 16.0)):
        said = report(server.generate(question, 1, impress_bits=bits))
        assert said["path"] == "ssd" and said["bits_mean"] == got


def logprob(answer: dict[str, Any]) -> float:
    """Of the first token of an answer."""
    number: float = answer["meta_info"]["output_token_logprobs"][0][0]
    return number


def test_a_request_asks_for_an_exact_answer(impress: Server) -> None:
    prefix = random_tokens(700, seed=81)
    question = [*prefix, *random_tokens(20, seed=82)]
    computed = impress.generate(question, 12, return_logprob=True)
    impress.flush()
    # Somebody else has it in few bits by then.
    assert report(impress.generate(question, 4))["approximate"] is True
    exact = impress.generate(question, 12, return_logprob=True, **EXACT)
    assert_same([computed], [exact], 1e-4)
    said = report(exact)
    assert said["path"] == "ssd" and said["approximate"] is False and said["bits_mean"] == 16.0
    assert paths([impress.generate(question, 1, **EXACT)]) == ["device"]


def test_who_asks_alike_shares_and_who_asks_otherwise_loads(impress: Server) -> None:
    prefix = impress.store(1500, seed=55)
    told = [
        report(impress.generate([*prefix, *random_tokens(20, seed=6 + number)], 4, **wanted))
        for number, wanted in enumerate(({"impress_bits": 6}, EXACT, {"impress_bits": 5}, EXACT))
    ]
    assert [own["path"] for own in told] == ["ssd"] * 2 + ["device"] * 2
    assert [own["loaded_tokens"] for own in told] == [1500] * 2 + [0] * 2
    assert [own["bits_mean"] for own in told[:2]] == [6.0, 16.0]
    assert [own["approximate"] for own in told] == [True, False, True, False]
    few, exact, *resident = (own["ssd_bytes"] for own in told)
    assert few < exact / 2 and resident == [0, 0]
    assert all(own["resident_tokens"] == 1500 for own in told[2:])


def test_eight_at_once_load_a_prefix_once(impress: Server) -> None:
    """Of each class: what they wait for is read once, and they share it."""
    prefix = impress.store(1500, seed=8)
    questions = [[*prefix, *random_tokens(20, seed=20 + number)] for number in range(8)]
    alone = sum(
        report(impress.generate(questions[0], 4, **own))["ssd_bytes"] for own in ({}, EXACT)
    )
    impress.flush()
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(impress.generate, own, 4, **({}, EXACT)[number % 2])
            for number, own in enumerate(questions)
        ]
        said = [report(own.result()) for own in asked]
    assert sum(own["loaded_tokens"] for own in said) == 2 * 1500
    assert sum(own["ssd_bytes"] for own in said) == alone
    assert all(own["prefix_tokens"] == 1500 for own in said)
    loaded = sorted((own["bits"], own["bits_mean"]) for own in said if own["loaded_tokens"])
    assert loaded == [(6.0, 6.0), (16.0, 16.0)]


def test_samples_rest_on_what_was_loaded_for_their_prompt(impress: Server) -> None:
    prefix = impress.store(900, seed=10)
    before = impress.stats()["totals"]["loaded_tokens"]
    question = [*prefix, *random_tokens(20, seed=11)]
    answers: Any = impress.generate(question, 4, sampling_params={"n": 3})
    said = [report(answer) for answer in answers]
    assert paths(answers) == ["ssd"] * 3 and said[0] == said[1] == said[2]
    assert said[0]["loaded_tokens"] == 900 and said[0]["ssd_bytes"] > 0
    assert impress.stats()["totals"]["loaded_tokens"] == before + 900


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
        "sampling_params": [{**greedy, "max_new_tokens": own} for own in new_tokens],
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
            wait_until(lambda: len(found()) == 2)
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
    assert sum(report(own)["loaded_tokens"] for own in answers) == 3 * 500
    assert all(report(own)["prefix_tokens"] == 500 for own in answers)
    assert sum(int(begin) for begin, _ in passes) == 6 and len(passes) <= 3


def test_who_does_not_fit_does_not_hold_up_those_who_wait(impress: Server) -> None:
    """SGLang admits nobody until a request ends once there was no room for one."""
    prefix = impress.store(500, seed=110)
    first, waits = ([*prefix, *random_tokens(20, seed=seed)] for seed in (111, 112))
    large = random_tokens(5000, seed=113)
    answers, passes = passes_of(impress, [first, waits, large], [800, 1, 3100], aborted="2")
    assert sum(int(begin) for begin, _ in passes[:2]) == 2, "both begin before there is room"
    assert [report(own)["prefix_tokens"] for own in answers[:2]] == [500, 500]


def test_all_turns_of_a_conversation_are_read_back(impress: Server) -> None:
    chat = impress.store(300, seed=70)
    for number in range(5):
        prompt = [*chat, *random_tokens(90, seed=71 + number)]
        # As long as a chunk; fewer tokens are stored with the next turn.
        answer = impress.generate(prompt, 65)
        said = report(answer)
        # All but the last generated token, which was computed for nobody.
        assert said["path"] == "ssd" and said["prefix_tokens"] >= len(chat) - 1
        assert said["used_tokens"] == said["prefix_tokens"]
        chat = [*prompt, *answer["output_ids"]]
        impress.flush()


def test_the_same_history_gives_the_same_answers(impress: Server) -> None:
    prefix = impress.store(1300, seed=60)
    questions = [[*prefix, *random_tokens(20, seed=61 + number)] for number in range(3)]
    runs = []
    for _ in range(2):
        runs.append([impress.generate(own, 6, return_logprob=True) for own in questions])
        impress.flush()
    assert_same(*runs, 0.0)
    told = [[report(answer)["bits_mean"] for answer in run] for run in runs]
    assert told[0] == told[1]


@pytest.mark.parametrize("bits", [BITS[0] - 1, 6.5, BITS[-1] + 1, "six"])
def test_wrong_wishes_are_refused(impress: Server, bits: object) -> None:
    response = impress.ask([5, 6, 7], 1, impress_bits=bits)
    assert response.status_code == 400
    assert f"impress_bits must be {BITS_TEXT}, 'exact' or 'auto', got {bits!r}" in response.text
