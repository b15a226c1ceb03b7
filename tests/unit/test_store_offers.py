"""Writing prefixes to the store: what is accepted, and when it is found."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading

import pytest
from torch import Tensor

from impress_sglang.management import store as store_module
from impress_sglang.management.store import PrefixStore, StoreOutcome
from tests.unit import store_factory
from tests.unit.kv_factory import SequenceKVs, as_tokens
from tests.unit.store_factory import Gate, Workbench, check_rows, length, prompt

bench = store_factory.bench
store = store_factory.store


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 200])
def test_an_offered_prefix_is_found_and_its_rows_are_right(
    bench: Workbench, store: PrefixStore, count: int
) -> None:
    tokens = prompt(1, count)

    assert bench.offer(store, tokens) is StoreOutcome.ACCEPTED
    store.drain()

    store.check_integrity()
    check_rows(store, tokens)
    assert length(store, [*tokens, 7, 8]) == count
    assert length(store, [9999, *tokens]) == 0


def test_a_prefix_that_is_still_written_is_not_found(bench: Workbench, store: PrefixStore) -> None:
    tokens = prompt(1)
    gate = Gate(SequenceKVs(bench.shape, "", tokens))

    assert bench.offer(store, tokens, read_layers=gate) is StoreOutcome.ACCEPTED

    assert store.is_writing
    assert length(store, tokens) == 0
    assert bench.done == []
    gate.opened.set()
    store.drain()
    assert not store.is_writing
    assert bench.done == [tokens]
    check_rows(store, tokens)


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
    store.offer(
        "",
        as_tokens(kvs.tokens),
        kvs.read_from,
        lambda: threads.append(threading.get_ident()),
        approximate=False,
        min_tokens=1,
    )
    store.drain()
    store.poll()
    store.drain()

    assert threads == [threading.get_ident()]


def test_a_prefix_that_is_stored_is_known(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1, 20))

    for known in (prompt(1, 20), prompt(1, 19), prompt(1, 3)):
        assert bench.offer(store, known) is StoreOutcome.KNOWN
    assert len(bench.files()) == 1
    assert bench.done == [prompt(1, 20)], "a refused offer has no callback"


def test_two_offers_of_one_prefix_are_one_write(bench: Workbench, store: PrefixStore) -> None:
    tokens = prompt(1)
    gate = Gate(SequenceKVs(bench.shape, "", tokens))

    first = bench.offer(store, tokens, read_layers=gate)
    second = bench.offer(store, tokens, read_layers=gate)
    gate.opened.set()
    store.drain()

    assert (first, second) == (StoreOutcome.ACCEPTED, StoreOutcome.KNOWN)
    assert gate.starts == [0], "the second reader was never made"
    assert len(bench.files()) == 1
    assert store.stats.segments_written == 1


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


def test_an_extension_of_a_prefix_that_is_still_written(
    bench: Workbench, store: PrefixStore
) -> None:
    gate = Gate(SequenceKVs(bench.shape, "", prompt(1, 13)))
    bench.offer(store, prompt(1, 13), read_layers=gate)

    assert bench.offer(store, prompt(1, 40), available_from=13) is StoreOutcome.ACCEPTED
    assert length(store, prompt(1, 40)) == 0
    gate.opened.set()
    store.drain()

    check_rows(store, prompt(1, 40))


def test_a_write_that_fails_is_counted_logged_and_forgotten(
    bench: Workbench, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(layer: int) -> tuple[Tensor, Tensor]:
        raise OSError(errno.EIO, "the device is gone")

    outcome = bench.offer(store, prompt(1), read_layers=lambda start: fail)
    assert outcome is StoreOutcome.ACCEPTED
    with caplog.at_level(logging.WARNING):
        store.drain()

    store.check_integrity()
    assert "the device is gone" in caplog.text
    assert store.stats.segments_failed == 1
    assert store.stats.segments_written == 0
    assert bench.done == [prompt(1)], "its KVs are not needed any more"
    assert length(store, prompt(1)) == 0
    assert store.summary()["used_bytes"] == 0
    bench.put(store, prompt(1))
    check_rows(store, prompt(1))


def test_what_builds_on_a_failed_write_is_given_up_too(
    bench: Workbench, store: PrefixStore
) -> None:
    entered, opened = threading.Event(), threading.Event()

    def fail(layer: int) -> tuple[Tensor, Tensor]:
        entered.set()
        assert opened.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    bench.offer(store, prompt(1, 13), read_layers=lambda start: fail)
    assert entered.wait(30)
    assert bench.offer(store, prompt(1, 40)) is StoreOutcome.ACCEPTED
    assert bench.offer(store, prompt(2)) is StoreOutcome.ACCEPTED
    opened.set()
    store.drain()

    store.check_integrity()
    assert bench.done == [prompt(1, 13), prompt(1, 40), prompt(2)]
    assert length(store, prompt(1, 40)) == 0
    check_rows(store, prompt(2))
    store = bench.reopen(store)
    assert [len(s.info.tokens) for s in store.tree.segments()] == [8]
    assert len(bench.files()) == 1


def test_a_row_that_cannot_be_recorded_is_a_failed_write(
    bench: Workbench, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store_module.Catalog, "add", full)
    bench.offer(store, prompt(1))
    store.drain()
    monkeypatch.undo()

    store.check_integrity()
    assert store.stats.segments_failed == 1
    assert length(store, prompt(1)) == 0
    bench.close(store)
    assert bench.files() == set()


def test_closing_waits_for_writes(bench: Workbench, store: PrefixStore) -> None:
    for number in range(5):
        bench.offer(store, prompt(number))

    store = bench.reopen(store)

    assert sorted(bench.done) == sorted(prompt(number) for number in range(5))
    for number in range(5):
        check_rows(store, prompt(number))
