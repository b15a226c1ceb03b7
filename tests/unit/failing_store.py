"""A store on a disk that fails as a test says, and what a request sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.store.store import PrefixStore
from tests.faults import Faults, FaultyFileSystem
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, look_up, path_of, prompt, until


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults(seed=1)
    yield faults
    faults.clear()


@pytest.fixture
def store(bench: Workbench, faults: Faults) -> PrefixStore:
    return bench.open(files=FaultyFileSystem(faults), io_timeout=0.8)


def until_well(store: PrefixStore) -> None:
    until(store, lambda: store.health.state == "ok" and not store.health.suspects)


def read(store: PrefixStore, tokens: tuple[int, ...]) -> None:
    """What a request does with a stored prefix: right rows, or `PrefixUnreadable`, reported."""
    try:
        check_rows(store, tokens)
    except PrefixUnreadable as error:
        store.report(error)
        raise
    finally:
        check_store(store)


def shared_prefix(bench: Workbench, store: PrefixStore) -> tuple[Path, list[tuple[int, ...]]]:
    """A stored prefix and two that build on it; the file of the first."""
    first = prompt(1, 24)
    chats = [(*first, *prompt(number, 16)) for number in (7, 8)]
    for tokens in (first, *chats):
        bench.put(store, tokens)
    return path_of(bench, look_up(store, first)), chats
