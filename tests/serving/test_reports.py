"""Every answer says where its prompt came from, and every order what became of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.serving.compare import paths, report
from tests.serving.conftest import module_server
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

STAYS_WHOLE = "server"


FLAGS = (
    *("--impress-bits=exact", "--max-running-requests=1", "--chunked-prefill-size=128"),
    # So that who is waiting is known at once.
    "--load-snapshot-publish-interval=1",
)
# It has a tokenizer, serves one request at a time, and takes many passes for a prompt.
server = module_server("reporting", *FLAGS, words=True)


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """A request runs, so that others wait in the queue."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.ask, random_tokens(9, seed=1), 8000, rid="runs")
        wait_for(server, "num_running_reqs")
        try:
            yield
        finally:
            server.post("/abort_request", rid="runs")
            running.result(60)


def wait_for(server: Server, what: str, *, some: bool = True) -> None:
    """Until the scheduler has some of these requests, or none."""

    def is_so() -> bool:
        (load,) = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"]
        return bool(load[what]) == some

    wait_until(is_so, 60)


def parts(response: requests.Response) -> list[dict[str, Any]]:
    """Of a streaming answer."""
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_tokens(server: Server, stream: bool) -> None:
    prompt = random_tokens(500, seed=10 + stream)
    for path, source in (("computed", "computed"), ("device", "resident"), ("ssd", "loaded")):
        if path == "ssd":
            server.flush()
        response = server.ask(prompt, 0, stream=stream)
        (answer,) = parts(response) if stream else [response.json()]
        said = report(answer)
        assert answer["meta_info"]["completion_tokens"] == 0
        assert said["path"] == path and said["tokens"][source] >= 499
        assert (said["ssd_bytes"] > 0) == (path == "ssd") and said["why"] is not None


@pytest.mark.parametrize(("stream", "stored"), [(False, True), (True, False)])
def test_an_answer_that_is_given_up_in_the_queue(
    server: Server, stream: bool, stored: bool
) -> None:
    prompt = server.store(300, seed=20)
    prompt = [*prompt, 7] if stored else random_tokens(300, seed=21)
    before = server.stats()["totals"]
    with busy(server), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.ask, prompt, 8, rid="waits", stream=stream)
        wait_for(server, "num_waiting_reqs")
        server.post("/abort_request", rid="waits")
        (answer,) = parts(waiting.result(60)) if stream else [waiting.result(60).json()]
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    said = report(answer)
    assert said["path"] is None and said["why"]["reason"] == "not_admitted"
    assert not any(said["tokens"].values()) and said["ssd_bytes"] == said["prefix_tokens"] == 0
    assert server.stats()["totals"]["requests_ssd"] == before["requests_ssd"]


@pytest.mark.parametrize("stream", [False, True])
def test_samples_say_what_was_done_for_their_prompt(server: Server, stream: bool) -> None:
    """SGLang asks for the prompt alone first; all of them rest on what that loaded, once."""
    prompts = [server.store(600, seed=40 + number + 10 * stream) for number in range(2)]
    new = random_tokens(600, seed=60 + stream)
    before = server.stats()["totals"]

    response = server.ask([*prompts, new], 3, sampling_params={"n": 3}, stream=stream)  # type: ignore[list-item]

    answers = response.json() if not stream else last_parts(response)
    assert paths(answers) == ["ssd"] * 6 + ["computed"] * 3
    for answer in answers[:6]:
        said = report(answer)
        assert said["loaded_tokens"] == said["tokens"]["loaded"] == 599
        assert said["ssd_bytes"] > 0 and said["load_ms"] > 0
        assert said["why"]["reason"] == "loaded"
    assert all(report(answer)["tokens"]["computed"] == 600 for answer in answers[6:])
    totals = server.stats()["totals"]
    assert totals["requests_ssd"] == before["requests_ssd"] + 2
    assert totals["loaded_tokens"] == before["loaded_tokens"] + 2 * 599
    text = server.post("/v1/completions", model="m", prompt="abc", max_tokens=2).json()
    assert "impress" not in json.dumps(text)
    read = totals["ssd_bytes"] - before["ssd_bytes"]
    assert read == sum(report(answers[index])["ssd_bytes"] for index in (0, 3))


def last_parts(response: requests.Response) -> list[dict[str, Any]]:
    """The last of each answer; all of an answer say the same."""
    answers = dict[int, dict[str, Any]]()
    for part in parts(response):
        before = answers.setdefault(part["index"], part)
        assert report(part)["path"] == report(before)["path"]
        answers[part["index"]] = part
    return [answers[index] for index in sorted(answers)]
