"""Damage at rest: the helpers hit what they say."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage.segment import block_checksums, read_header
from tests.damage import (
    damage_index,
    flip_data_bit,
    flip_header_bit,
    header_bytes,
    put_back,
    segments,
    take_away,
    truncate,
    zero_block,
)
from tests.unit.store_factory import SHAPES, Workbench, prompt


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored") / "kv"
    bench = Workbench(root, SHAPES["sketch float32"])
    bench.put(bench.open(), prompt(1, 20))
    bench.close_all()
    return root


@pytest.fixture
def root(stored: Path, tmp_path: Path) -> Path:
    shutil.copytree(stored, tmp_path / "kv")
    return tmp_path / "kv"


def bad_blocks(segment: Path) -> list[int]:
    header = read_header(segment)
    body = memoryview(segment.read_bytes())[header.info.layout().header_bytes :]
    found = zip(block_checksums(body), header.checksums.tolist(), strict=True)
    return [number for number, (is_, should) in enumerate(found) if is_ != should]


def test_a_segment_is_whole_before(root: Path) -> None:
    (segment,) = segments(root)
    assert bad_blocks(segment) == []
    assert header_bytes(segment) == read_header(segment).info.layout().header_bytes


@pytest.mark.parametrize("damage", [flip_data_bit, zero_block])
def test_damage_of_data(root: Path, damage: Callable[[Path, int], None]) -> None:
    (segment,) = segments(root)
    damage(segment, 1)
    assert bad_blocks(segment) == [1]


def test_damage_of_a_header(root: Path) -> None:
    (segment,) = segments(root)
    flip_header_bit(segment)
    with pytest.raises(ChunkUnreadable, match="checksum"):
        read_header(segment)


def test_a_file_is_shorter(root: Path) -> None:
    (segment,) = segments(root)
    before = segment.stat().st_size
    truncate(segment, 5)
    assert segment.stat().st_size == before - 5


def test_damage_of_the_index(root: Path) -> None:
    connection = sqlite3.connect(damage_index(root))
    with pytest.raises(sqlite3.DatabaseError):
        assert connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok"
        raise sqlite3.DatabaseError("the check says so")
    connection.close()


def test_a_directory_goes_twice_and_comes_back(root: Path) -> None:
    for _ in range(2):
        take_away(root)
        assert not segments(root)
        (root / "new").mkdir(parents=True)
        put_back(root)
        assert len(segments(root)) == 1
