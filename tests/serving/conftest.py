"""Servers that tests share: each is started once, one at a time beside the stock server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from bench.core.servers import store_flags
from tests.serving.harness import STOCK, Server, Zygote, running
from tests.serving.tiny_models import make_model
from tests.serving.tiny_tokenizer import add_tokenizer

# All is tight: the pool, chunks of prefill, and no overlap of passes and scheduling.
CRAMPED = ("--max-total-tokens=9000", "--disable-overlap-schedule", "--chunked-prefill-size=512")
WORDLESS = "--skip-tokenizer-init"
# A busy machine would compute some, because blending took too long before.
BLENDS = (*("--impress-blend=0.15", "--impress-blend-min-tokens=128"), "--impress-blend-seconds=60")
TINY_FLAGS = ("--dtype=float32", WORDLESS, "--max-running-requests=16")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serving)
        if item.get_closest_marker("long") and not config.getoption("full_matrix"):
            item.add_marker(pytest.mark.skip(reason="it takes long, with --full-matrix"))


def long(*values: Any) -> Any:
    """Values of parameters that take long."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, models and stores of this test session."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    """Forks servers, so that SGLang is imported once and not three times for each."""
    return Zygote()


@pytest.fixture(scope="session")
def tiny_llama(workdir: Path) -> Path:
    model = make_model("llama", workdir / "llama")
    add_tokenizer(model)
    return model


@pytest.fixture(scope="session")
def other_llama(workdir: Path) -> Path:
    """Other weights of the same shape."""
    model = make_model("llama", workdir / "other-llama", initializer_range=0.13)
    add_tokenizer(model)
    return model


# Starts a server for the time of a `with` block.
Serve: TypeAlias = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def start(workdir: Path, tiny_llama: Path, zygote: Zygote) -> Serve:
    """Any server, with a log of this name; in the end nothing has gone wrong, unless it may."""

    @contextlib.contextmanager
    def start(
        name: str, *flags: str, model: Path | None = None, quiet: bool = True, **how: Any
    ) -> Iterator[Server]:
        log = workdir / f"{name}.log"
        with running(model or tiny_llama, log, *flags, zygote=zygote, **how) as server:
            yield server
            if quiet:
                server.assert_quiet()

    return start


@pytest.fixture(scope="session")
def serve(workdir: Path, start: Serve) -> Serve:
    """One of ours, with a store of its own or another server's. `words`: whether it tokenizes."""

    def serve(
        name: str, *flags: str, store: str | None = None, words: bool = False, **how: Any
    ) -> contextlib.AbstractContextManager[Server]:
        defaults = (
            *(flag for flag in TINY_FLAGS if not (words and flag == WORDLESS)),
            *store_flags(workdir / f"store-{store or name}"),
            "--impress-min-prefix-tokens=64",
            # Which are taken at the start.
            "--impress-device-gb=0.1",
            "--impress-host-gb=0.2",
        )
        return start(name, *defaults, *flags, **how)

    return serve


def module_server(name: str, *flags: str, **how: Any) -> Any:
    """A fixture: one of ours for all tests of a module, after which it is whole."""

    @pytest.fixture(scope="module")
    def server(serve: Serve) -> Iterator[Server]:
        with serve(name, *flags, **how) as server:
            yield server
            server.assert_whole()

    return server


@pytest.fixture(scope="session")
def stock(start: Serve) -> Iterator[Server]:
    """Stock SGLang with rectangular attention; the reference of every equality."""
    with start("stock", *TINY_FLAGS, preload=STOCK) as server:
        yield server


@pytest.fixture(scope="session")
def roomy(serve: Serve) -> Iterator[Server]:
    """Exact KVs, and caches that hold all of them."""
    with serve("roomy", "--impress-bits=exact") as server:
        yield server


@pytest.fixture(scope="session")
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
