"""What tests of several modules read with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from impress_sglang.storage.reader import BlockReader
from tests.unit.source_factory import reading


@pytest.fixture(scope="session")
def reader() -> Iterator[BlockReader]:
    """Of any files; it keeps nothing of one test for another but what reads take on average."""
    with reading() as reader:
        yield reader
