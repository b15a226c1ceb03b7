"""Files that are gone or damaged, and segments that are dropped."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.management.store import PrefixStore, StoreOutcome
from tests.unit import store_factory
from tests.unit.kv_factory import SequenceKVs, flip_byte
from tests.unit.reading import read_rows
from tests.unit.store_factory import (
    Gate,
    Workbench,
    check_rows,
    length,
    look_up,
    open_source,
    path_of,
    prompt,
    rows,
    three_prefixes,
)

bench = store_factory.bench
store = store_factory.store


def test_a_dropped_segment_is_gone_with_all_that_builds_on_it(bench: Workbench) -> None:
    store = three_prefixes(bench)
    first = look_up(store, prompt(1, 40)).spans[0].segment.segment_id

    store.drop(first)

    store.check_integrity()
    assert length(store, prompt(1, 40)) == 0
    check_rows(store, prompt(2, 8), namespace="salt")
    assert store.summary()["used_bytes"] == bench.one
    assert store.stats.segments_unreadable == 1
    bench.close(store)
    assert len(bench.files()) == 1


def test_a_drop_keeps_what_is_above(bench: Workbench) -> None:
    store = three_prefixes(bench)

    store.drop(look_up(store, prompt(1, 40)).spans[1].segment.segment_id)

    check_rows(store, prompt(1, 13))
    assert length(store, prompt(1, 40)) == 13


def test_dropping_twice_or_something_unknown_does_nothing(bench: Workbench) -> None:
    store = three_prefixes(bench)
    name = look_up(store, prompt(2, 8), "salt").spans[0].segment.segment_id

    store.drop("unknown")
    store.drop(name)
    store.drop(name)

    store.check_integrity()
    assert store.stats.segments_unreadable == 1


def test_a_segment_can_be_dropped_while_it_is_read(bench: Workbench) -> None:
    store = three_prefixes(bench)
    source = open_source(store, look_up(store, prompt(1, 40)), 0, 40)
    store.drop(source.segment_ids[0])
    store.check_integrity()
    bench.put(store, prompt(1, 40))

    expected = SequenceKVs(bench.shape, "", prompt(1, 40))
    assert torch.equal(rows(bench.shape, source, 1)[0], expected.keys(1))
    store.close_source(source)
    store.check_integrity()
    check_rows(store, prompt(1, 40))


def test_a_segment_can_be_dropped_while_it_is_written(bench: Workbench, store: PrefixStore) -> None:
    gate = Gate(SequenceKVs(bench.shape, "", prompt(1)))
    bench.offer(store, prompt(1), read_layers=gate)
    (segment,) = store.tree.segments()

    store.drop(segment.segment_id)
    store.check_integrity()
    assert store.summary()["used_bytes"] == bench.one, "its file is still being written"
    gate.opened.set()
    store.drain()

    store.check_integrity()
    assert bench.done == [prompt(1)]
    assert length(store, prompt(1)) == 0
    assert store.summary()["used_bytes"] == 0
    bench.close(store)
    assert bench.files() == set()


def test_a_prefix_can_be_offered_again_while_its_dropped_segment_is_written(
    bench: Workbench, store: PrefixStore
) -> None:
    gate = Gate(SequenceKVs(bench.shape, "", prompt(1)))
    bench.offer(store, prompt(1), read_layers=gate)
    store.drop(next(store.tree.segments()).segment_id)

    assert bench.offer(store, prompt(1)) is StoreOutcome.ACCEPTED
    gate.opened.set()
    store.drain()

    store.check_integrity()
    check_rows(store, prompt(1))


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_gone_is_unreadable_and_can_be_dropped(
    bench: Workbench, number: int
) -> None:
    store = three_prefixes(bench)
    match = look_up(store, prompt(1, 40))
    path_of(bench, match, number).unlink()
    descriptors = len(os.listdir("/proc/self/fd"))

    with pytest.raises(ChunkUnreadable) as caught:
        open_source(store, match, 0, 40)

    assert caught.value.segment_id == match.spans[number].segment.segment_id
    assert len(os.listdir("/proc/self/fd")) == descriptors, "the other file is closed again"
    store.check_integrity()
    store.drop(caught.value.segment_id)
    store.check_integrity()
    assert length(store, prompt(1, 40)) == (0, 13)[number]
    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))


def test_a_damaged_chunk_is_unreadable_and_the_rest_is_served(bench: Workbench) -> None:
    store = three_prefixes(bench)
    match = look_up(store, prompt(1, 40))
    path = path_of(bench, match, 1)
    flip_byte(path, path.stat().st_size - 4096)
    source = open_source(store, match, 0, 40)

    with pytest.raises(ChunkUnreadable) as caught:
        read_rows(source, 1, None, keys=False)

    assert caught.value.segment_id == path.stem
    store.drop(caught.value.segment_id)
    store.close_source(source)
    store.check_integrity()
    check_rows(store, prompt(1, 13))


def test_a_file_that_cannot_be_removed_is_logged(
    bench: Workbench,
    store: PrefixStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench.put(store, prompt(1))
    name = next(store.tree.segments()).segment_id

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    store.drop(name)
    bench.put(store, prompt(2))
    monkeypatch.undo()

    assert name in caplog.text
    check_rows(store, prompt(2))
