"""Servers and replicas on one directory: each finds what any of them has stored."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import impress_flags
from tests.serving.harness import (
    Server,
    Zygote,
    launch,
    running,
    schedulers_of,
    wait_until_ready,
)
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

FLAGS = ("--impress-bits=exact", "--max-total-tokens=9000")
HITS_S = 1.0


def assert_hit(server: Server, prompt: list[int], stock: Server) -> None:
    """It is loaded, and the answer is right."""
    answer = server.generate([*prompt, 5, 6, 7], 4, return_logprob=True)
    assert report(answer)["path"] == "ssd", report(answer)["why"]
    expected = stock.generate([*prompt, 5, 6, 7], 4, return_logprob=True)
    assert_same([expected], [answer], 1e-4)


def test_two_servers(workdir: Path, tiny_llama: Path, zygote: Zygote, stock: Server) -> None:
    flags = impress_flags(workdir / "store-shared", *FLAGS)
    logs = [workdir / f"shared-{number}.log" for number in range(3)]
    first, second = (launch(tiny_llama, log, *flags, zygote=zygote) for log in logs[:2])
    try:
        for server in (first, second):
            wait_until_ready(server)
        folders = {server.stats()["store"]["directory"] for server in (first, second)}
        assert len(folders) == 2
        prompts = [random_tokens(300, seed=seed) for seed in range(71, 76)]
        first.store_prompts(prompts[0])
        time.sleep(HITS_S)
        assert_hit(second, prompts[0], stock)
        # What one has is not stored again, and what builds on it is found.
        second.store_prompts([*prompts[0], *prompts[1]])
        time.sleep(HITS_S)
        assert_hit(first, [*prompts[0], *prompts[1]], stock)
        # Of what both store at once, one is kept.
        files = len(_files(workdir))
        for server in (first, second):
            server.generate(prompts[3], 1)
        wait_until(lambda: all(_stored(server, prompts[3]) for server in (first, second)))
        wait_until(lambda: len(_files(workdir)) == files + 1)
        for server in (first, second):
            server.flush()
            assert_hit(server, prompts[3], stock)
        first.store_prompts(prompts[2])
        first.stop(signal.SIGKILL)
        time.sleep(HITS_S)
        assert_hit(second, prompts[2], stock)
        with running(tiny_llama, logs[2], *flags, zygote=zygote) as third:
            assert third.stats()["store"]["directory"] in folders
            second.flush()
            for prompt in (prompts[2], [*prompts[0], *prompts[1]]):
                assert_hit(third, prompt, stock)
            third.post("/impress/purge", input_ids=prompts[0]).raise_for_status()
            wait_until(lambda: not _stored(second, prompts[0]))
            assert _stored(second, prompts[2]) and not _stored(third, prompts[0])
            third.assert_quiet()
        second.assert_quiet()
    finally:
        for server in (first, second):
            server.stop()


def _files(workdir: Path) -> list[Path]:
    return list((workdir / "store-shared").rglob("*.kv"))


def _stored(server: Server, prompt: list[int]) -> int:
    answer = server.post("/impress/why", input_ids=prompt)
    answer.raise_for_status()
    return int(answer.json()["stored_tokens"])


def test_two_replicas(workdir: Path, tiny_llama: Path, zygote: Zygote, stock: Server) -> None:
    flags = impress_flags(
        workdir / "store-replicas", *FLAGS, "--impress-write-after=2", "--enable-metrics"
    )
    log = workdir / "replicas.log"
    with running(tiny_llama, log, *flags, zygote=zygote, replicas=2) as server:
        stats = server.stats()
        assert len({own["store"]["directory"] for own in stats["replicas"]}) == 2
        prompt = random_tokens(300, seed=81)
        # Each sees it once, and that is twice.
        for replica in (1, 0):
            stored = server.generate(prompt, 1, routed_dp_rank=replica)
            assert report(stored)["path"] == "computed"
            server.flush()
        wait_until(lambda: _stored(server, prompt))
        time.sleep(HITS_S)
        answer = server.generate([*prompt, 7, 8], 4, routed_dp_rank=1, return_logprob=True)
        assert paths([answer]) == ["ssd"]
        expected = stock.generate([*prompt, 7, 8], 4, return_logprob=True)
        assert_same([expected], [answer], 1e-4)
        assert server.post("/impress/pin", input_ids=prompt).json()["pins"]["prefixes"] == 1
        purged = server.post("/impress/purge", input_ids=prompt).json()
        assert purged["segments"] >= 1 and purged["unpinned"] == 2
        assert server.post("/impress/check").json() == {"integrity": "ok"}
        assert not _stored(server, prompt)
        server.assert_quiet()
        # SGLang lets the others go on without one.
        server.generate(prompt, 1, routed_dp_rank=0)
        wait_until(lambda: _stored(server, prompt))
        schedulers_of(server)[0].kill()
        time.sleep(HITS_S)
        answer = server.generate([*prompt, 7, 8], 4, routed_dp_rank=1, return_logprob=True)
        assert paths([answer]) == ["ssd"]
        assert_same([expected], [answer], 1e-4)
        server.stop(signal.SIGKILL)
