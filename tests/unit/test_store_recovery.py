"""What happens around a disk that fails: while it is asked again, and when all is given back."""

from __future__ import annotations

import pytest

from impress_sglang.errors import StoreUnavailable
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory as stores
from tests.unit.reading import read_rows


def test_what_is_written_while_a_failed_disk_is_asked_is_not_lost(bench: stores.Workbench) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files)
    bench.put(store, stores.prompt(1))
    gate = bench.begin(store, stores.prompt(2))
    name = stores.name_of(store, stores.prompt(1))
    hang = Rule("hang", "open-write", "*/probe")
    files.faults.add(hang)
    store.report(StoreUnavailable(name, "a test"))
    stores.until(store, lambda: hang.hits)
    gate.opened.set()
    store.writes.drain()
    files.faults.clear()
    stores.recover(store)
    stores.look_again(store)
    store.check_integrity()
    assert [stores.length(store, stores.prompt(n)) for n in (1, 2)] == [8, 8]
    assert len(bench.files()) == 2


def test_a_file_that_cannot_be_closed_hurts_nobody(bench: stores.Workbench) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files)
    bench.put(store, stores.prompt(1))
    source = stores.open_source(store, stores.look_up(store, stores.prompt(1)))
    with files.faults.injected(Rule("EIO", "close", "*.kv")):
        store.close_source(source)
    store.check_integrity()


def test_an_engine_that_cannot_be_made_again_is_asked_for_later(bench: stores.Workbench) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files)
    bench.put(store, stores.prompt(1))
    source = stores.open_source(store, stores.look_up(store, stores.prompt(1)))
    files.faults.add(Rule("raise", "start", count=1), Rule("EMFILE", "engine", count=2))
    with pytest.raises(StoreUnavailable) as caught:
        read_rows(source, 0, None)
    store.report(caught.value)
    store.close_source(source)
    stores.recover(store)
    stores.look_again(store)
    stores.check_rows(store, stores.prompt(1))
