"""Writing prefixes to the store: what is accepted, and when it is found."""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
import threading
from collections.abc import Callable

import pytest
from torch import Tensor

from impress_sglang.management.store import PrefixStore
from impress_sglang.management.writing import Offer, StoreOutcome
from impress_sglang.storage.writer import LayerReader
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory
from tests.unit.kv_factory import SequenceKVs, as_tokens
from tests.unit.store_factory import Gate, Workbench, check_rows, length, prompt, recover
from tests.unit.waiting import wait_until

bench = store_factory.bench
store = store_factory.store


def test_finished_writes_are_taken_in_by_a_later_match(
    bench: Workbench, store: PrefixStore
) -> None:
    """Nobody calls `drain` while serving."""
    tokens = prompt(1)
    bench.offer(store, tokens)
    deadline = threading.Event()
    for _ in range(2000):
        if length(store, tokens):
            break
        deadline.wait(0.005)

    check_rows(store, tokens)
    assert bench.done == [tokens]


def test_the_callback_runs_once_on_the_callers_thread(bench: Workbench, store: PrefixStore) -> None:
    threads: list[int] = []
    kvs = SequenceKVs(bench.shape, "", prompt(1))
    store.writes.offer(
        "",
        Offer(
            as_tokens(kvs.tokens),
            kvs.read_from,
            lambda: threads.append(threading.get_ident()),
            lambda: None,
            min_tokens=1,
        ),
    )
    store.writes.drain()
    store.poll()
    store.writes.drain()

    assert threads == [threading.get_ident()]


@pytest.mark.parametrize(("new", "expected"), [(4, StoreOutcome.KNOWN), (5, StoreOutcome.ACCEPTED)])
def test_a_short_rest_is_not_worth_a_file(
    bench: Workbench, store: PrefixStore, new: int, expected: StoreOutcome
) -> None:
    bench.put(store, prompt(1, 20))

    assert bench.offer(store, prompt(1, 20 + new), min_tokens=5) is expected


def test_kvs_that_the_reader_lacks_must_be_stored(bench: Workbench, store: PrefixStore) -> None:
    """The request has KVs from token 8 on only."""
    tokens = prompt(1, 20)

    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.UNREACHABLE
    assert bench.files() == set() and bench.done == []
    bench.put(store, prompt(1, 7))
    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.UNREACHABLE
    bench.put(store, prompt(1, 8))
    bench.put(store, tokens, available_from=8)
    check_rows(store, tokens)


def test_a_write_that_fails_is_counted_logged_and_forgotten(
    bench: Workbench, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(layer: int) -> tuple[Tensor, Tensor]:
        raise OSError(errno.EIO, "the device is gone")

    outcome = bench.offer(store, prompt(1), read_layers=lambda start: fail)
    assert outcome is StoreOutcome.ACCEPTED
    with caplog.at_level(logging.WARNING):
        store.writes.drain()

    store.check_integrity()
    assert "the device is gone" in caplog.text
    assert store.stats.segments_failed == 1
    assert store.stats.segments_written == 0
    assert bench.done == [prompt(1)], "its KVs are not needed any more"
    assert length(store, prompt(1)) == 0
    assert store.summary()["used_bytes"] == 0
    assert bench.offer(store, prompt(1)) is StoreOutcome.UNAVAILABLE
    assert store.stats.offers_while_unavailable == 1
    recover(store)
    bench.put(store, prompt(1))
    check_rows(store, prompt(1))


def failing(error: Exception) -> tuple[threading.Event, Callable[[int], LayerReader]]:
    """Readers that fail as soon as the event is set."""
    opened = threading.Event()

    def fail(layer: int) -> tuple[Tensor, Tensor]:
        assert opened.wait(30)
        raise error

    return opened, lambda start: fail


def test_what_builds_on_a_failed_write_is_removed_by_the_next_start(
    bench: Workbench, store: PrefixStore
) -> None:
    """Nobody knows its tokens then."""
    gate, reader = failing(OSError(errno.ENOSPC, "No space left on device"))
    bench.offer(store, prompt(1, 13), read_layers=reader)
    bench.offer(store, prompt(1, 40))
    gate.set()
    store.writes.drain()

    store = bench.reopen(store)

    assert length(store, prompt(1, 40)) == 0 and len(store.tree) == 0
    bench.close(store)
    assert bench.files() == set()


def test_a_row_that_cannot_be_recorded_waits(bench: Workbench) -> None:
    """The file is what counts."""
    files = FaultyFileSystem()
    store = bench.open(files=files)
    with files.faults.injected(Rule("ENOSPC", "sql.insert")):
        bench.put(store, prompt(1))
        check_rows(store, prompt(1))
        assert bench.offer(store, prompt(2)) is StoreOutcome.UNAVAILABLE
        assert index_of(bench) == set()

    recover(store)
    bench.put(store, prompt(2))

    store.check_index()
    assert len(index_of(bench)) == 2
    assert store.stats.segments_failed == 0


def test_a_row_that_is_never_recorded_is_found_at_the_next_start(bench: Workbench) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files)
    with files.faults.injected(Rule("ENOSPC", "sql.insert")):
        bench.put(store, prompt(1))
        bench.forget(store)
        store.close()

    check_rows(bench.open(), prompt(1))


def index_of(bench: Workbench) -> set[str]:
    (path,) = bench.root.glob("*/catalog.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT segment_id FROM segments")}


def gates(bench: Workbench, store: PrefixStore, *numbers: int) -> list[Gate]:
    """Accepted writes that wait."""
    found = [Gate(SequenceKVs(bench.shape, "", prompt(number))) for number in numbers]
    for number, gate in zip(numbers, found, strict=True):
        assert bench.offer(store, prompt(number), read_layers=gate) is StoreOutcome.ACCEPTED
    return found


def test_writes_are_abandoned_latest_first_until_there_is_enough(
    bench: Workbench, store: PrefixStore
) -> None:
    """Their slots are wanted back: from now on nobody reads them."""
    opened = gates(bench, store, 1, 2, 3, 4)

    store.writes.abandon(lambda: len(bench.abandoned) >= 2)

    assert bench.abandoned == bench.done == [prompt(4), prompt(3)]
    store.check_integrity()
    store.writes.abandon(lambda: len(bench.abandoned) >= 2)
    assert bench.abandoned == [prompt(4), prompt(3)]
    for gate in opened:
        gate.opened.set()
    store.writes.drain()
    store.check_integrity()
    assert bench.done == [prompt(n) for n in (4, 3, 1, 2)], "each one once"
    assert [length(store, prompt(n)) for n in (1, 2, 3, 4)] == [8, 8, 0, 0]
    assert (store.stats.segments_abandoned, store.stats.segments_failed) == (2, 0)
    assert store.health.state == "ok"
    assert store.summary()["used_bytes"] == 2 * bench.one
    bench.close(store)
    assert len(bench.files()) == 2


def test_a_write_that_frees_nothing_is_only_abandoned_with_all(
    bench: Workbench, store: PrefixStore
) -> None:
    gates(bench, store, 1)
    gate = Gate(SequenceKVs(bench.shape, "", prompt(2)))
    bench.offer(store, prompt(2), read_layers=gate, holder="a request")

    store.writes.abandon(frees=lambda holder: holder != "a request")
    assert bench.abandoned == [prompt(1)]
    store.writes.abandon()
    assert bench.abandoned == [prompt(1), prompt(2)]


def test_a_write_that_has_read_everything_is_published_although_it_is_abandoned(
    bench: Workbench, store: PrefixStore
) -> None:
    bench.offer(store, prompt(1))
    wait_until(store.writes._writes[0].future.done)

    store.writes.abandon()

    store.writes.drain()
    assert bench.done == [prompt(1)]
    check_rows(store, prompt(1))
    assert store.stats.segments_abandoned == 0


def test_nobody_waits_longer_than_the_timeout_for_writes(bench: Workbench) -> None:
    store = bench.open(io_timeout=0.3)
    gates(bench, store, 1, 2)

    store.writes.drain()

    assert bench.abandoned == bench.done == [prompt(2), prompt(1)]
    assert store.health.state == "read-only"
    recover(store)
    assert not store.writes
    bench.put(store, prompt(1))


def test_closing_waits_for_writes(bench: Workbench, store: PrefixStore) -> None:
    for number in range(5):
        bench.offer(store, prompt(number))

    store = bench.reopen(store)

    assert sorted(bench.done) == sorted(prompt(number) for number in range(5))
    for number in range(5):
        check_rows(store, prompt(number))
