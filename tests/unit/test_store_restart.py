"""What a store finds after a restart, also of a directory that was damaged meanwhile."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.quality import EXACT
from impress_sglang.store.journal import Journal
from impress_sglang.store.store import PrefixStore
from tests.faults import FaultyFileSystem, Rule
from tests.unit import kv_factory as kv
from tests.unit import store_factory as stores
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, check_three_prefixes, look_up, prompt


def overwrite(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = os.urandom(len(data[start:stop]))
    path.write_bytes(data)


INDEX_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(20_000)),
    "text": lambda path: path.write_text("this is no journal\n" * 100),
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "torn": lambda path: os.truncate(path, path.stat().st_size - 10),
    "first line": lambda path: overwrite(path, 0, 10),
    "in the middle": lambda path: overwrite(path, 300, 310),
    "all zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_everything_is_found_without_the_index(bench: Workbench, damage: str) -> None:
    bench.close(stores.three_prefixes(bench))
    (index,) = bench.root.glob("*/journal")

    INDEX_DAMAGE[damage](index)

    store = bench.open()
    check_three_prefixes(store)
    check_three_prefixes(bench.reopen(store))
    assert not list(bench.root.glob("*/quarantine/*")), "it costs nothing that is right"


def is_served(store: PrefixStore, tokens: Sequence[int], namespace: str = "") -> bool:
    match = look_up(store, tokens, namespace)
    if not match.num_tokens:
        return False
    try:
        store.close_source(stores.open_source(store, match))
    except SegmentUnreadable as error:
        store.report(error)
        stores.look_again(store)
        check_store(store)
        return False
    return True


@pytest.mark.parametrize(
    ("damage", "asked"),
    [
        ({"tokens": kv.as_tokens(prompt(7, 13))}, prompt(7, 13)),
        ({"namespace": "salt"}, prompt(1, 13)),
        ({"quality": EXACT}, prompt(1, 13)),
    ],
)
def test_a_row_that_says_other_things_than_its_file_is_not_believed(
    bench: Workbench, store: PrefixStore, damage: dict[str, Any], asked: tuple[int, ...]
) -> None:
    """Even one whose checksum is right must not lend KVs to other tokens or tenants."""
    quality = stores.COARSE if "quality" in damage else EXACT
    bench.put(store, prompt(1, 13), quality=quality)
    assert is_served(store, prompt(1, 13)) == (quality == EXACT), "guards this test"
    namespace = damage.get("namespace", "")
    changes = damage | {"namespace": store.namespace(namespace)}
    bench.close(store)
    (segment,) = stores.index_of(bench).values()
    segment.info = dataclasses.replace(segment.info, **changes)
    (path,) = bench.root.glob("*/journal")
    Journal(FileSystem(), path.parent).record(segment)

    store = bench.open()

    assert not is_served(store, asked, namespace)


@pytest.mark.parametrize("change", [-1, -4096, 1, 4096, None])
@pytest.mark.parametrize("with_row", [True, False])
def test_a_file_that_is_gone_or_has_a_wrong_size(
    bench: Workbench, change: int | None, with_row: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.three_prefixes(bench)
    path = stores.path_of(bench, look_up(store, prompt(2, 8), "salt"))
    bench.close(store)
    if change is None:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + change)
    if not with_row:
        next(bench.root.glob("*/journal")).unlink()

    store = bench.open()

    check_store(store)
    assert stores.length(store, prompt(2, 8), namespace="salt") == 0
    assert len(store.tree) == 2 and not path.exists()
    aside = [path.name for path in bench.root.glob("*/quarantine/*")]
    assert aside == ([] if change is None else [path.name])
    check_rows(store, prompt(1, 40))
    assert (path.stem in caplog.text) == (with_row or change is not None)
    caplog.clear()
    bench.reopen(store)
    assert path.stem not in caplog.text, "said once"


@pytest.mark.parametrize("digits", ["07", "70"])
@pytest.mark.parametrize("unreadable", [False, True])
def test_of_two_files_in_one_place_the_newer_is_kept(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, digits: str, unreadable: bool
) -> None:
    """A power loss has brought one back that was removed, without its row."""
    names = [uuid.UUID(digit * 31 + "1") for digit in digits] + [uuid.uuid4() for _ in range(9)]
    monkeypatch.setattr("uuid.uuid4", lambda: names.pop(0))
    store = bench.open()
    bench.put(store, prompt(1, 13))
    older = stores.path_of(bench, look_up(store, prompt(1, 13)))
    content = older.read_bytes()
    stores.lose(bench, store, older.stem, gone=True)
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(2))
    newer = stores.path_of(bench, look_up(store, prompt(1, 13)))
    other = stores.path_of(bench, look_up(store, prompt(2)))
    bench.close(store)
    older.write_bytes(content)
    files = FaultyFileSystem()
    if unreadable:
        # Then what has no place stays, for nobody knows what builds on it; but this is known.
        assert stores.change_index(bench.root, lambda index: drop(index, other.stem)) == 1
        files.faults.add(Rule("EMFILE", "open", f"*{other.name}"))

    store = bench.open(files=files)

    check_rows(store, prompt(1, 40))
    bench.close(store)
    assert bench.files() >= {newer.name, other.name} and len(bench.files()) == 3
    check_rows(bench.open(), prompt(1, 40))


def drop(record: dict[str, Any], segment_id: str) -> dict[str, Any] | None:
    return None if record.get("add", {}).get("segment_id") == segment_id else record


@pytest.mark.parametrize("caches", [{}, {"device_gb": 0.01}, {"host_gb": 0.01}])
def test_another_chunk_size_after_a_restart(bench: Workbench, caches: dict[str, float]) -> None:
    """Each segment keeps the chunks that it was written with."""
    store = stores.three_prefixes(bench, **caches)

    store = bench.reopen(store, chunk_tokens=24, **caches)

    for _ in range(2):
        check_three_prefixes(store)
    bench.put(store, prompt(1, 100))
    check_rows(store, prompt(1, 100))
