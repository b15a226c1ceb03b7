"""Damage at rest: the helpers hit what they say."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.damage import (
    BLOCK_BYTES,
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
    bench = Workbench(root, SHAPES["head groups float32"])
    bench.put(bench.open(), prompt(1, 20))
    bench.close_all()
    return root


@pytest.fixture
def root(stored: Path, tmp_path: Path) -> Path:
    shutil.copytree(stored, tmp_path / "kv")
    return tmp_path / "kv"


def changed(stored: Path, root: Path) -> list[int]:
    """Places of the bytes of the only segment that are not what they were."""
    ((before,), (after,)) = (segments(folder) for folder in (stored, root))
    pairs = zip(before.read_bytes(), after.read_bytes(), strict=True)
    return [place for place, (was, is_) in enumerate(pairs) if was != is_]


def test_damage_of_data(stored: Path, root: Path) -> None:
    (segment,) = segments(root)
    flip_data_bit(segment, 1)
    assert changed(stored, root) == [header_bytes(segment) + BLOCK_BYTES + 17]


def test_a_block_of_zeros(stored: Path, root: Path) -> None:
    (segment,) = segments(root)
    zero_block(segment)
    places = changed(stored, root)
    start = header_bytes(segment)
    assert len(places) > 100 and start <= places[0] and places[-1] < start + BLOCK_BYTES


def test_damage_of_a_header(stored: Path, root: Path) -> None:
    (segment,) = segments(root)
    flip_header_bit(segment)
    assert changed(stored, root) == [100]
    assert 0 < header_bytes(segment) < segment.stat().st_size
    assert header_bytes(segment) % BLOCK_BYTES == 0


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
