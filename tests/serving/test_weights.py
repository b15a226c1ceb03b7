"""Weights that are replaced while a server runs: no KV under a wrong identity.

Requests that are under way then; `test_random.py` has updates between them, without a flush, too,
and servers of other weights on the same store. SGLang's handler that releases memory does not run
on a CPU: `tests/integration/test_weights.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import Answer, assert_same, paths, report
from tests.serving.conftest import module_server
from tests.serving.harness import BENCH, Server
from tests.serving.test_jobs import NO_CACHES, loading
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

FLAGS = ("--impress-bits=exact", "--max-total-tokens=20000", *NO_CACHES)


def ask(server: Server, prompt: list[int]) -> Answer:
    return server.generate(prompt, 8, return_logprob=True)


shared = module_server("weights", *FLAGS, preload=BENCH)


@pytest.fixture
def server(shared: Server, tiny_llama: Path) -> Iterator[Server]:
    """A server with the first weights."""
    assert shared.stats()["suspended"] is None
    yield shared
    update(shared, tiny_llama)
    shared.flush()
    opened(shared)
    shared.assert_whole()


def update(server: Server, model: Path) -> dict[str, Any]:
    answer = server.post("/update_weights_from_disk", model_path=str(model))
    told: dict[str, Any] = answer.json()
    return told


def opened(server: Server) -> dict[str, Any]:
    """The statistics, once no store is being opened: that is done in the background."""
    wait_until(lambda: server.stats()["suspended"] != "opening")
    return server.stats()


@contextmanager
def paused_request(server: Server, prompt: list[int], mode: str) -> Iterator[list[Answer]]:
    """A request that is paused in the middle of decoding, as for an update; its answer comes after.

    Without a pause SGLang lets an update wait for requests.
    """
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(server.generate(prompt, 300)))
    known = len(server.log_text())
    thread.start()
    wait_until(lambda: "Prefill batch" in server.log_text()[known:], 60)
    assert server.post("/pause_generation", mode=mode).ok
    assert not answers, "the request was over before it was paused"
    try:
        yield answers
    finally:
        assert server.post("/continue_generation", torch_empty_cache=False).ok
        thread.join(120)
    assert answers


def test_request_that_runs_through_an_update(
    server: Server, tiny_llama: Path, other_llama: Path
) -> None:
    """What it computes is of no weights, and is not stored."""
    prompt = random_tokens(2000, seed=6)
    with paused_request(server, prompt, "in_place") as answers:
        refused = update(server, other_llama)
        assert not refused["success"] and "not flushed" in refused["message"]
        assert server.stats()["suspended"] == "update_weights_from_disk"
    assert server.stats()["suspended"] == "update_weights_from_disk"
    turn = [*prompt, *answers[0]["output_ids"], 7, 8]
    server.flush()
    assert paths([server.generate(turn, 1)]) == ["computed"]
    assert update(server, tiny_llama)["success"]
    assert opened(server)["suspended"] is None
    assert report(server.generate(turn, 1))["stored_tokens"] <= len(prompt)


def test_request_that_waits_for_its_prefix(
    server: Server, stock: Server, other_llama: Path, tiny_llama: Path
) -> None:
    """What a job has loaded of the old weights is used by nobody."""
    # Nobody has stored it with the other weights.
    prompt = server.store(700, seed=3)
    # Of exact KVs each layer takes 2 s.
    server.emulate_ssd(0.1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, prompt)
        try:
            wait_until(lambda: loading(server) > 0, 60)
            assert server.post("/pause_generation", mode="retract").ok
            assert update(server, other_llama)["success"]
        finally:
            server.emulate_ssd(0)
            assert server.post("/continue_generation", torch_empty_cache=False).ok
        answer = asked.result()
    assert paths([answer]) == ["computed"]
    assert update(stock, other_llama)["success"]
    assert_same([ask(stock, prompt)], [answer])
    assert update(stock, tiny_llama)["success"]


def test_request_that_is_taken_out_for_an_update(server: Server, other_llama: Path) -> None:
    """It is computed again with the new weights, from its beginning, and is stored as theirs."""
    prompt = random_tokens(2000, seed=7)
    with paused_request(server, prompt, "retract") as answers:
        assert update(server, other_llama)["success"]
        assert opened(server)["suspended"] is None
    turn = [*prompt, *answers[0]["output_ids"], 7, 8]
    server.flush()
    loaded = ask(server, turn)
    assert report(loaded)["stored_tokens"] >= len(prompt)
    computed = server.generate(turn, 8, return_logprob=True, extra_key="alone")
    assert paths([computed]) == ["computed"]
    assert_same([computed], [loaded])
