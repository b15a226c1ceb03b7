"""Servers that tests share: each is started once, one at a time beside the stock server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.serving.harness import Server, Zygote, running
from tests.serving.tiny_models import make_model

# All is tight: the pool, chunks of prefill, and no overlap of passes and scheduling.
CRAMPED = ("--max-total-tokens=9000", "--disable-overlap-schedule", "--chunked-prefill-size=512")
WORDLESS = "--skip-tokenizer-init"
TINY_FLAGS = ("--dtype=float32", WORDLESS, "--max-running-requests=16")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serving)


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, models and stores of this test session."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks servers, so that SGLang is imported once and not three times for each."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def tiny_llama(workdir: Path) -> Path:
    return make_model("llama", workdir / "llama")


@pytest.fixture(scope="session")
def stock(workdir: Path, tiny_llama: Path, zygote: Zygote) -> Iterator[Server]:
    """Stock SGLang with rectangular attention; the reference of every equality."""
    with running(
        tiny_llama,
        workdir / "stock.log",
        *TINY_FLAGS,
        "--max-total-tokens=60000",
        zygote=zygote,
        stock=True,
    ) as server:
        yield server


def impress_flags(store: Path, *flags: str, words: bool = False) -> tuple[str, ...]:
    """`words`: whether the model has a tokenizer."""
    return (
        *(own for own in TINY_FLAGS if not (words and own == WORDLESS)),
        "--enable-impress",
        "--impress-keep=both",
        "--impress-write-after=1",
        "--impress-load=always",
        "--impress-min-prefix-tokens=64",
        # Which are taken at the start.
        "--impress-device-gb=0.1",
        "--impress-host-gb=0.2",
        f"--impress-ssd-dir={store}",
        *flags,
    )


class Serve(Protocol):
    """Starts a server of ours for the time of a `with` block."""

    def __call__(
        self, name: str, *flags: str, model: Path | None = None, **how: Any
    ) -> contextlib.AbstractContextManager[Server]: ...


@pytest.fixture(scope="session")
def serve(workdir: Path, tiny_llama: Path, zygote: Zygote) -> Serve:
    """With a store and a log of this name; in the end nothing has gone wrong."""

    @contextlib.contextmanager
    def start(name: str, *flags: str, model: Path | None = None, **how: Any) -> Iterator[Server]:
        own = impress_flags(workdir / f"store-{name}", *flags)
        log = workdir / f"{name}.log"
        with running(model or tiny_llama, log, *own, zygote=zygote, **how) as server:
            yield server
            server.assert_quiet()

    return start


@pytest.fixture(scope="session")
def roomy(serve: Serve) -> Iterator[Server]:
    """Exact KVs, and caches that hold all of them."""
    with serve("roomy", "--impress-bits=exact") as server:
        yield server


@pytest.fixture
def at_length(request: pytest.FixtureRequest) -> bool:
    """Whether all is tried, `--full-matrix`, and not only what is usual."""
    return bool(request.config.getoption("full_matrix"))


@pytest.fixture(autouse=True)
def _stays_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that has it, the server that its module names is idle and holds nothing."""
    name = getattr(request.module, "STAYS_WHOLE", None)
    server = request.getfixturevalue(name) if name in request.fixturenames else None
    yield
    if server is not None:
        server.assert_whole()
