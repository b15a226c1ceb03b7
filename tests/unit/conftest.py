"""What tests of several modules read with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from impress_sglang.cost import ReadCost
from impress_sglang.storage import reader as reader_module
from impress_sglang.storage.reader import BlockReader
from tests.unit import store_factory
from tests.unit.kv_factory import BLOCK
from tests.unit.source_factory import CodedCase, Part
from tests.unit.step_engine import Step, reading, stepping

bench = store_factory.bench
store = store_factory.store


@pytest.fixture(scope="session")
def reader() -> Iterator[BlockReader]:
    """Of any files; it keeps nothing of one test for another but what reads take on average."""
    with reading() as reader:
        yield reader


@pytest.fixture
def step() -> Iterator[Step]:
    """4 reads in flight at most, which end when the test says so."""
    with stepping(4) as pair:
        yield pair


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> Iterator[None]:
    """A disk that failed is asked again soon, so that tests do not wait for its next chance."""
    with (
        mock.patch("impress_sglang.store.health.FIRST_PAUSE_S", 0.05),
        mock.patch("impress_sglang.store.health.FIRST_LOOK_S", 0.1),
    ):
        yield


@pytest.fixture
def no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only wanted blocks are read, so that bytes can be counted."""
    monkeypatch.setattr(ReadCost, "gap_bytes", 0)


@pytest.fixture
def single_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is a piece of its own."""
    monkeypatch.setattr(reader_module, "PIECE_BYTES", BLOCK)


@pytest.fixture
def coded(tmp_path: Path, reader: BlockReader) -> Iterator[Callable[..., CodedCase]]:
    made: list[CodedCase] = []

    def make(parts: Sequence[Part], **options: Any) -> CodedCase:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(CodedCase(folder, parts, reader, **options))
        return made[-1]

    yield make
    for case in made:
        case.close()
