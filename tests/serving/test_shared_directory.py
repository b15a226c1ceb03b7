"""Servers and replicas on one directory: each finds what any of them has stored."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.serving.compare import assert_as_stock, assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.harness import Server, schedulers_of
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

FLAGS = ("--impress-bits=exact", "--max-total-tokens=9000")


def test_two_servers(workdir: Path, serve: Serve, stock: Server) -> None:
    def start(number: int) -> contextlib.AbstractContextManager[Server]:
        return serve(f"shared-{number}", *FLAGS, store="shared", waits=False, quiet=False)

    with start(1) as first, start(2) as second:
        for server in (first, second):
            server.wait_ready()
        folders = {server.stats()["store"]["directory"] for server in (first, second)}
        assert len(folders) == 2
        prompts = [random_tokens(300, seed=seed) for seed in range(71, 76)]
        first.store_prompts(prompts[0])
        wait_until(lambda: second.stored(prompts[0]))
        assert_as_stock(second, stock, prompts[0])
        # What one has is not stored again, and what builds on it is found.
        second.store_prompts([*prompts[0], *prompts[1]])
        wait_until(lambda: first.stored([*prompts[0], *prompts[1]]) == 600)
        assert_as_stock(first, stock, [*prompts[0], *prompts[1]])
        # Of what both store at once, one is kept.
        files = len(_files(workdir))
        for server in (first, second):
            server.generate(prompts[3], 1)
        wait_until(lambda: all(server.stored(prompts[3]) for server in (first, second)))
        wait_until(lambda: len(_files(workdir)) == files + 1)
        for server in (first, second):
            server.flush()
            assert_as_stock(server, stock, prompts[3])
        first.store_prompts(prompts[2])
        first.kill()
        wait_until(lambda: second.stored(prompts[2]))
        assert_as_stock(second, stock, prompts[2])
        with start(3) as third:
            third.wait_ready()
            assert third.stats()["store"]["directory"] in folders
            second.flush()
            for prompt in (prompts[2], [*prompts[0], *prompts[1]]):
                assert_as_stock(third, stock, prompt)
            third.post("/impress/purge", input_ids=prompts[0]).raise_for_status()
            wait_until(lambda: not second.stored(prompts[0]))
            assert second.stored(prompts[2]) and not third.stored(prompts[0])
            third.assert_quiet()
        second.assert_quiet()


def _files(workdir: Path) -> list[Path]:
    return list((workdir / "store-shared").rglob("*.kv"))


def all_have_it(server: Server) -> bool:
    """Each replica knows of the one prefix that is stored."""
    return all(replica["store"]["segments"] for replica in server.stats()["replicas"])


def test_two_replicas(serve: Serve, stock: Server) -> None:
    flags = (*FLAGS, "--impress-write-after=2", "--enable-metrics")
    with serve("replicas", *flags, replicas=2, quiet=False) as server:
        stats = server.stats()
        assert len({replica["store"]["directory"] for replica in stats["replicas"]}) == 2
        prompt = random_tokens(300, seed=81)
        # Each sees it once, and that is twice.
        for replica in (1, 0):
            stored = server.generate(prompt, 1, routed_dp_rank=replica)
            assert report(stored)["path"] == "computed"
            server.flush()
        wait_until(lambda: all_have_it(server))
        answer = server.generate([*prompt, 7, 8], 4, routed_dp_rank=1, return_logprob=True)
        assert paths([answer]) == ["ssd"]
        expected = stock.generate([*prompt, 7, 8], 4, return_logprob=True)
        assert_same([expected], [answer])
        assert server.post("/impress/pin", input_ids=prompt).json()["pins"]["prefixes"] == 1
        purged = server.post("/impress/purge", input_ids=prompt).json()
        assert purged["segments"] >= 1 and purged["unpinned"] == 2
        assert server.post("/impress/check").json() == {"integrity": "ok"}
        assert not server.stored(prompt)
        server.assert_quiet()
        # SGLang lets the others go on without one.
        server.generate(prompt, 1, routed_dp_rank=0)
        wait_until(lambda: all_have_it(server))
        schedulers_of(server)[0].kill()
        answer = server.generate([*prompt, 7, 8], 4, routed_dp_rank=1, return_logprob=True)
        assert paths([answer]) == ["ssd"]
        assert_same([expected], [answer])
        server.kill()
