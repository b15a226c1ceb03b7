"""What is stored are prompts: who else may read them, and what of a request is on the disk."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit import store_factory
from tests.unit.store_factory import Workbench, length, look_up, lose, name_of, path_of, prompt
from tests.unit.waiting import wait_until

SALT = "a-salt-that-nobody-must-see-b7d1"


def open_to_others(root: Path) -> list[str]:
    """What others can do something with, by name and mode."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}
    return [f"{name} {mode:o}" for name, mode in modes.items() if mode & 0o077]


def test_nothing_that_a_store_makes_is_open_to_others(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "kv"
    bench = Workbench(root, store_factory.SHAPES["probe heads"])
    # Of a process that does not care.
    before = os.umask(0)
    try:
        store = bench.open()
        bench.put_all(store, 1, 2)
        lose(bench, store, name_of(store, prompt(2)))
        gate = bench.begin(store, prompt(3))
        wait_until(lambda: list(root.rglob("*.kv.tmp")))
        assert list(root.glob("*/journal")) and list(root.glob("*/quarantine/*.kv"))
        assert open_to_others(tmp_path / "a") == []
        gate.opened.set()
        bench.close_all()
        assert open_to_others(tmp_path / "a") == []
    finally:
        os.umask(before)


def test_salts_are_nowhere_on_the_disk(bench: Workbench) -> None:
    """Nor can they be guessed from what is there, without the key, which is in the marker alone."""
    store = bench.open()
    bench.put(store, prompt(1), namespace=SALT)
    bench.put(store, prompt(1, 20), namespace=SALT)
    bench.put(store, prompt(2), namespace=SALT)
    lose(bench, store, name_of(store, prompt(2), namespace=SALT))
    store = bench.reopen(store)
    store_factory.check_rows(store, prompt(1, 20), namespace=SALT)
    for other in ("", SALT[:-1], store.namespace(SALT)):
        assert length(store, prompt(1, 20), namespace=other) == 0

    everything = {path: path.read_bytes() for path in bench.root.rglob("*") if path.is_file()}
    assert {"journal", "store.json"} <= {p.name for p in everything}
    assert sum(path.suffix == ".kv" for path in everything) == 3
    for path, content in everything.items():
        for form in (SALT.encode(), SALT.encode().hex().encode(), SALT.encode("utf-16-le")):
            assert form not in content, path
    name = store.namespace(SALT).encode()
    assert name in everything[path_of(bench, look_up(store, prompt(1), SALT))], "guards this test"
    key = store._disk.directory.key.hex().encode()
    assert [path.name for path, content in everything.items() if key in content] == ["store.json"]
