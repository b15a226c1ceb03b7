"""Weights that are replaced while a server runs: no KV under a wrong identity.

SGLang's handler that releases memory does not run on a CPU: `tests/integration/test_weights.py`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import Answer, assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.harness import BENCH, Server
from tests.serving.test_jobs import NO_CACHES, loading
from tests.serving.tiny_models import make_model, random_tokens
from tests.unit.waiting import wait_until

TOLERANCE = 1e-4
STORED = random_tokens(800, seed=1)
QUESTION = [*STORED, *random_tokens(40, seed=2)]
FRESH = random_tokens(700, seed=3)
FLAGS = ("--impress-bits=exact", "--max-total-tokens=20000", *NO_CACHES)


def ask(server: Server, prompt: list[int]) -> Answer:
    return server.generate(prompt, 8, return_logprob=True)


@pytest.fixture(scope="module")
def other(workdir: Path) -> Path:
    """Other weights of the same shape."""
    return make_model("llama", workdir / "other-weights", initializer_range=0.1)


@pytest.fixture(scope="module")
def old(stock: Server) -> dict[str, Answer]:
    """What stock SGLang answers with the weights that the server starts with."""
    return {"question": ask(stock, QUESTION), "fresh": ask(stock, FRESH)}


@pytest.fixture(scope="module")
def new(stock: Server, other: Path, tiny_llama: Path) -> dict[str, Answer]:
    """What it answers with the other weights."""
    assert update(stock, other)["success"]
    answers = {"question": ask(stock, QUESTION), "fresh": ask(stock, FRESH)}
    assert update(stock, tiny_llama)["success"]
    return answers


@pytest.fixture(scope="module")
def shared(serve: Serve) -> Iterator[Server]:
    with serve("weights", *FLAGS, preload=BENCH) as server:
        yield server


@pytest.fixture
def server(shared: Server, tiny_llama: Path) -> Iterator[Server]:
    """A server with the first weights, an empty pool, and a stored prefix."""
    shared.generate(STORED, 1)
    shared.flush()
    assert shared.stats()["suspended"] is None
    yield shared
    update(shared, tiny_llama)
    shared.flush()
    opened(shared)
    shared.assert_whole()


def update(server: Server, model: Path, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(
        "/update_weights_from_disk", model_path=str(model), **fields
    ).json()
    return answer


def opened(server: Server) -> dict[str, Any]:
    """The statistics, once no store is being opened: that is done in the background."""
    wait_until(lambda: server.stats()["suspended"] != "opening", 30)
    return server.stats()


def written(server: Server) -> set[Path]:
    """Files of all identities, once nothing is being written."""
    wait_until(lambda: not server.stats()["store"]["writes_pending"], 30)
    return set(Path(server.stats()["store"]["directory"]).parent.glob("*/segments/*/*"))


def test_update_without_a_flush_then_a_restart(
    server: Server,
    workdir: Path,
    tiny_llama: Path,
    other: Path,
    serve: Serve,
    old: dict[str, Answer],
    new: dict[str, Answer],
) -> None:
    """Nothing is read nor written until a flush, and nothing of the new weights is left behind."""
    answer = ask(server, QUESTION)
    assert paths([answer]) == ["ssd"]
    assert_same([old["question"]], [answer], TOLERANCE)
    server.flush()
    resident = random_tokens(600, seed=4)
    server.generate(resident, 1)
    files = written(server)
    assert update(server, other, flush_cache=False)["success"]
    assert server.stats()["suspended"] == "update_weights_from_disk"
    answers = [ask(server, QUESTION), ask(server, FRESH)]
    assert paths(answers) == ["computed", "computed"]
    assert_same([new["question"], new["fresh"]], answers, TOLERANCE)
    # As in stock SGLang, resident KVs of the old weights stay in use.
    assert paths([server.generate([*resident, 5], 1)]) == ["device"]
    assert written(server) == files
    server.flush()
    stats = opened(server)
    assert stats["suspended"] is None and stats["store"]["segments"] == 0
    for path in ("computed", "ssd"):
        answer = ask(server, QUESTION)
        assert paths([answer]) == [path]
        assert_same([new["question"]], [answer], TOLERANCE)
        server.flush()
    assert "is set aside (update_weights_from_disk)" in server.log_text()
    update(server, tiny_llama)
    # A server with the old weights on a copy of what is stored by now.
    source = Path(opened(server)["store"]["directory"]).parent
    shutil.copytree(source, workdir / "store-weights-again")
    with serve("weights-again", *FLAGS) as again:
        answers = [ask(again, QUESTION), ask(again, FRESH)]
        assert paths(answers) == ["ssd", "computed"]
        assert_same([old["question"], old["fresh"]], answers, TOLERANCE)


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


def test_request_that_runs_through_an_update(server: Server, tiny_llama: Path, other: Path) -> None:
    """What it computes is of no weights, and is not stored."""
    prompt = random_tokens(2000, seed=6)
    with paused_request(server, prompt, "in_place") as answers:
        refused = update(server, other)
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
    server: Server, other: Path, new: dict[str, Answer]
) -> None:
    """What a job has loaded of the old weights is used by nobody."""
    # Nobody has stored it with the other weights.
    server.store_prompts(FRESH)
    # Of exact KVs each layer takes 2 s.
    server.emulate_ssd(0.1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, FRESH)
        try:
            wait_until(lambda: loading(server) > 0, 60)
            assert server.post("/pause_generation", mode="retract").ok
            assert update(server, other)["success"]
        finally:
            server.emulate_ssd(0)
            assert server.post("/continue_generation", torch_empty_cache=False).ok
        answer = asked.result()
    assert_same([new["fresh"]], [answer], TOLERANCE)
    assert paths([answer]) == ["computed"]


def test_request_that_is_taken_out_for_an_update(server: Server, other: Path) -> None:
    """It is computed again with the new weights, from its beginning, and is stored as theirs."""
    prompt = random_tokens(2000, seed=7)
    with paused_request(server, prompt, "retract") as answers:
        assert update(server, other)["success"]
        assert opened(server)["suspended"] is None
    turn = [*prompt, *answers[0]["output_ids"], 7, 8]
    server.flush()
    loaded = ask(server, turn)
    assert report(loaded)["stored_tokens"] >= len(prompt)
    computed = server.generate(turn, 8, return_logprob=True, extra_key="alone")
    assert paths([computed]) == ["computed"]
    assert_same([computed], [loaded], TOLERANCE)
