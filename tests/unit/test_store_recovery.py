"""What happens around a disk that fails: while it is asked again, and when all is given back."""

from __future__ import annotations

import pytest

from impress_sglang.errors import StoreUnavailable
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory
from tests.unit.kv_factory import SequenceKVs
from tests.unit.reading import read_rows
from tests.unit.store_factory import (
    Gate,
    Workbench,
    check_rows,
    length,
    look_again,
    look_up,
    open_source,
    prompt,
    recover,
)
from tests.unit.waiting import wait_until

bench = store_factory.bench


def test_what_is_written_while_a_failed_disk_is_asked_is_not_lost(bench: Workbench) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files)
    bench.put(store, prompt(1))
    gate = Gate(SequenceKVs(bench.shape, "", prompt(2)))
    bench.offer(store, prompt(2), read_layers=gate)
    name = look_up(store, prompt(1)).spans[0].segment.segment_id
    hang = Rule("hang", "open-write", "*/probe")
    files.faults.add(hang)
    store.report(StoreUnavailable(name, "a test"))

    def hangs() -> int:
        store.poll()
        return hang.hits

    wait_until(hangs)
    gate.opened.set()
    store.writes.drain()
    files.faults.clear()
    recover(store)
    look_again(store)
    store.check_integrity()
    assert [length(store, prompt(n)) for n in (1, 2)] == [8, 8]
    assert len(bench.files()) == 2


def test_a_file_that_cannot_be_closed_hurts_nobody(bench: Workbench) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files)
    bench.put(store, prompt(1))
    source = open_source(store, look_up(store, prompt(1)))
    with files.faults.injected(Rule("EIO", "close", "*.kv")):
        store.close_source(source)
    store.check_integrity()


def test_an_engine_that_cannot_be_made_again_is_asked_for_later(bench: Workbench) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files)
    bench.put(store, prompt(1))
    source = open_source(store, look_up(store, prompt(1)))
    files.faults.add(Rule("raise", "start", count=1), Rule("EMFILE", "engine", count=2))
    with pytest.raises(StoreUnavailable) as caught:
        read_rows(source, 0, None)
    store.report(caught.value)
    store.close_source(source)
    recover(store)
    look_again(store)
    check_rows(store, prompt(1))
