"""What tests of several modules read with."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from impress_sglang.storage.reader import BlockReader
from tests.unit.source_factory import reading


@pytest.fixture(scope="session")
def reader() -> Iterator[BlockReader]:
    """Of any files; it keeps nothing of one test for another but what reads take on average."""
    with reading() as reader:
        yield reader


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> Iterator[None]:
    """A disk that failed is asked again soon, so that tests do not wait for its next chance."""
    with (
        mock.patch("impress_sglang.storage.health.FIRST_PAUSE_S", 0.05),
        mock.patch("impress_sglang.management.suspects.FIRST_PAUSE_S", 0.1),
    ):
        yield
