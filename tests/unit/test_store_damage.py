"""Files that are gone or damaged: second looks, quarantine, and holes that are filled again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import SegmentState
from impress_sglang.management.writing import StoreOutcome
from impress_sglang.storage.quality import Quality
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory
from tests.unit.kv_factory import SequenceKVs, flip_byte
from tests.unit.reading import read_rows
from tests.unit.store_factory import (
    QUARTER,
    Gate,
    Workbench,
    check_rows,
    gb,
    length,
    look_again,
    look_up,
    lose,
    open_source,
    path_of,
    prompt,
    recover,
    rows,
    three_prefixes,
)

bench = store_factory.bench
store = store_factory.store

TWICE = Quality(2, 0.25)


def name_of(store: PrefixStore, tokens: tuple[int, ...], number: int = 0, **options: object) -> str:
    return look_up(store, tokens, **options).spans[number].segment.segment_id  # type: ignore[arg-type]


def flip_last_block(path: Path) -> None:
    flip_byte(path, path.stat().st_size - 4096)


LOOKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "good": (lambda path: None, "segments_cleared"),
    "a damaged block": (flip_last_block, "segments_quarantined"),
    "a damaged header": (lambda path: flip_byte(path, 50), "segments_quarantined"),
    "cut off": (lambda path: os.truncate(path, path.stat().st_size - 1), "segments_quarantined"),
    "gone": (Path.unlink, "segments_gone"),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_second_look_decides_about_what_could_not_be_read(bench: Workbench, kind: str) -> None:
    damage, counter = LOOKS[kind]
    store = three_prefixes(bench)
    used = store.summary()["used_bytes"]
    path = path_of(bench, look_up(store, prompt(2, 8), "salt"))
    damage(path)

    store.report(SegmentUnreadable(path.stem, "a test"))

    assert store.summary()["segments_suspect"] == 1
    assert length(store, prompt(2, 8), namespace="salt") == 0, "not before it is found good"
    look_again(store)
    store.check_integrity()
    found = {name: getattr(store.stats, name) for _, name in LOOKS.values()}
    assert found == {name: int(name == counter) for name in found}
    assert store.stats.segments_unreadable == 1
    quarantined = [own.name for own in bench.root.glob("*/quarantine/*")]
    assert quarantined == ([path.name] if counter == "segments_quarantined" else [])
    check_rows(store, prompt(1, 40))
    if kind == "good":
        check_rows(store, prompt(2, 8), namespace="salt")
    else:
        assert length(store, prompt(2, 8), namespace="salt") == 0
        assert len(store.tree) == 2
        assert store.summary()["used_bytes"] == used - bench.one
        assert not path.exists()
        assert store.health.state == "ok", "one bad file is not a bad disk"
        store.check_index()


def test_a_look_that_sees_nothing_is_repeated(bench: Workbench) -> None:
    """An error of the device says nothing about what is stored."""
    files = FaultyFileSystem()
    store = bench.open(files=files)
    bench.put(store, prompt(1))
    name = name_of(store, prompt(1))
    with files.faults.injected(Rule("EIO", "read", "*.kv", count=1)):
        store.report(SegmentUnreadable(name, "a test"))
        look_again(store)

    assert (store.stats.segments_cleared, store.stats.segments_unreadable) == (1, 1)
    check_rows(store, prompt(1))


def test_a_lost_segment_ends_the_match_and_keeps_what_is_above(bench: Workbench) -> None:
    store = three_prefixes(bench)

    lose(bench, store, name_of(store, prompt(1, 40), 1))

    check_rows(store, prompt(1, 13))
    assert length(store, prompt(1, 40)) == 13
    assert len(store.tree) == 2, "nothing builds on it"


@pytest.mark.parametrize("gone", [False, True])
def test_what_builds_on_a_lost_segment_is_found_when_it_is_stored_again(
    bench: Workbench, gone: bool
) -> None:
    store = three_prefixes(bench)
    before = store.summary()["used_bytes"]
    lose(bench, store, name_of(store, prompt(1, 40)), gone=gone)
    assert length(store, prompt(1, 40)) == 0 and len(store.tree) == 3
    check_rows(store, prompt(2, 8), namespace="salt")
    gate = Gate(SequenceKVs(bench.shape, "", prompt(1, 40)))
    gate.opened.set()

    bench.put(store, prompt(1, 40), read_layers=gate)

    assert gate.starts == [0]
    check_rows(store, prompt(1, 40))
    assert store.stats.segments_written == 4
    assert store.summary()["used_bytes"] == before
    store.check_index()
    store = bench.reopen(store)
    check_rows(store, prompt(1, 40))
    assert len(bench.files()) == 3


def chain(bench: Workbench) -> PrefixStore:
    """13 exact tokens, 27 after a part of them, and 20 after a part of all those."""
    store = bench.open()
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40), quality=QUARTER)
    bench.put(store, prompt(1, 60), quality=TWICE)
    return store


def test_a_hole_in_approximate_kvs_is_filled_with_as_good_ones(bench: Workbench) -> None:
    store = chain(bench)
    lose(bench, store, name_of(store, prompt(1, 60), 1, quality=TWICE))
    assert length(store, prompt(1, 60), quality=TWICE) == 13

    bench.put(store, prompt(1, 40), quality=QUARTER)

    match = look_up(store, prompt(1, 60), quality=TWICE)
    assert [len(span) for span in match.spans] == [13, 27, 20]
    assert [span.segment.info.quality.depth for span in match.spans] == [0, 1, 2]
    source = open_source(store, match)
    for layer in range(bench.shape.num_layers):
        keys, _ = rows(bench.shape, source, layer)
        for start, stop, quality in ((13, 40, QUARTER), (40, 60, TWICE)):
            expected = SequenceKVs(bench.shape, "", prompt(1, 60), quality)
            assert torch.equal(keys[start:stop], expected.keys(layer)[start:stop])
    store.close_source(source)
    assert length(store, prompt(1, 60), quality=QUARTER) == 40
    assert length(store, prompt(1, 60)) == 13


def test_worse_kvs_are_stored_beside_a_hole(bench: Workbench) -> None:
    store = chain(bench)
    lose(bench, store, name_of(store, prompt(1, 13)))

    bench.put(store, prompt(1, 60), quality=QUARTER)
    assert length(store, prompt(1, 60), quality=QUARTER) == 60 and length(store, prompt(1, 60)) == 0
    bench.put(store, prompt(1, 60))

    check_rows(store, prompt(1, 13))
    assert length(store, prompt(1, 60), quality=TWICE) == 60


def test_a_hole_hides_no_worse_kvs(bench: Workbench) -> None:
    """Exact KVs stood beside approximate ones, and others build on the exact ones."""
    store = bench.open()
    bench.put(store, prompt(1, 13))
    bench.put(store, prompt(1, 40), quality=QUARTER)
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(1, 60))
    lose(bench, store, name_of(store, prompt(1, 60), 1))
    assert length(store, prompt(1, 60)) == 13

    assert length(store, prompt(1, 60), quality=QUARTER) == 40
    bench.put(store, prompt(1, 70), quality=QUARTER, available_from=40)
    assert length(store, prompt(1, 70), quality=QUARTER) == 70
    bench.put(store, prompt(1, 60))
    assert length(store, prompt(1, 60)) == 60


def test_exact_kvs_are_stored_beside_a_hole_in_approximate_ones(bench: Workbench) -> None:
    store = chain(bench)
    lose(bench, store, name_of(store, prompt(1, 40), 1, quality=QUARTER))

    bench.put(store, prompt(1, 40))

    check_rows(store, prompt(1, 40))
    check_rows(store, prompt(1, 40), quality=TWICE)


@pytest.mark.parametrize(
    ("tokens", "filled"),
    [(prompt(1, 12), 12), ((*prompt(1, 12), 7, 7), 12), (prompt(1, 40), 40)],
    ids=["a part", "a part and others", "all"],
)
def test_a_hole_is_filled_as_far_as_an_offer_has_its_tokens(
    bench: Workbench, tokens: tuple[int, ...], filled: int
) -> None:
    store = three_prefixes(bench)
    lose(bench, store, name_of(store, prompt(1, 40)))

    bench.put(store, tokens)

    check_rows(store, tokens)
    assert length(store, prompt(1, 40)) == filled
    if filled < 40:
        bench.put(store, prompt(1, 40), available_from=12)
    check_rows(store, prompt(1, 40))
    check_rows(store, tokens)
    store.check_index()
    store = bench.reopen(store)
    check_rows(store, prompt(1, 40))
    check_rows(store, tokens)


def test_an_offer_without_the_beginning_of_a_hole_does_not_fill_it(bench: Workbench) -> None:
    store = three_prefixes(bench)
    lose(bench, store, name_of(store, prompt(1, 40)))

    assert bench.offer(store, prompt(1, 40), available_from=1) is StoreOutcome.UNREACHABLE
    assert bench.done == [prompt(1, 13), prompt(1, 40), prompt(2, 8)]


@pytest.mark.parametrize(
    ("least", "expected"), [(12, StoreOutcome.ACCEPTED), (13, StoreOutcome.KNOWN)]
)
def test_a_short_part_of_a_hole_is_not_worth_a_file(
    bench: Workbench, least: int, expected: StoreOutcome
) -> None:
    store = three_prefixes(bench)
    lose(bench, store, name_of(store, prompt(1, 40)))

    assert bench.offer(store, prompt(1, 12), min_tokens=least) is expected


def test_what_branches_off_a_lost_segment_is_found_one_by_one(bench: Workbench) -> None:
    """A chat of which others went on from its middle; one of them comes back, and not the chat."""
    store = bench.open()
    chat, first, second = prompt(1, 40), (*prompt(1, 16), *prompt(5, 9)), prompt(1, 24)
    second = (*second, *prompt(6, 9))
    for tokens in (chat, first, second):
        bench.put(store, tokens)
    lose(bench, store, name_of(store, chat), gone=True)
    assert [length(store, tokens) for tokens in (chat, first, second)] == [0, 0, 0]

    bench.put(store, (*first, 7, 7))

    check_rows(store, first)
    assert [length(store, tokens) for tokens in (chat, second)] == [16, 16]
    bench.put(store, chat)
    for tokens in (chat, first, second):
        check_rows(store, tokens)
    assert len(bench.files()) == 4, "three, and the part of the lost one in two"


def test_a_hole_in_the_middle_needs_only_its_own_tokens(bench: Workbench) -> None:
    store = bench.open()
    for count in (13, 40, 60):
        bench.put(store, prompt(1, count))
    lose(bench, store, name_of(store, prompt(1, 60), 1))
    assert length(store, prompt(1, 60)) == 13

    assert bench.offer(store, prompt(1, 60), available_from=14) is StoreOutcome.UNREACHABLE
    bench.put(store, prompt(1, 60), available_from=13)

    check_rows(store, prompt(1, 60))


def test_holes_next_to_each_other_are_filled_by_one_file(bench: Workbench) -> None:
    store = bench.open()
    for count in (13, 40, 60, 70):
        bench.put(store, prompt(1, count))
    names = [name_of(store, prompt(1, 70), number) for number in (0, 1, 3)]
    for name in names:
        lose(bench, store, name)

    bench.put(store, prompt(1, 70))
    check_rows(store, prompt(1, 60))
    assert [len(span) for span in look_up(store, prompt(1, 70)).spans] == [40, 20]
    bench.put(store, prompt(1, 70))

    check_rows(store, prompt(1, 70))


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_hole_that_could_not_be_filled_stays(bench: Workbench, abandoned: bool) -> None:
    store = three_prefixes(bench)
    used = store.summary()["used_bytes"]
    lose(bench, store, name_of(store, prompt(1, 40)))
    gate = Gate(SequenceKVs(bench.shape, "", prompt(1, 13)))
    assert bench.offer(store, prompt(1, 13), read_layers=gate) is StoreOutcome.ACCEPTED
    assert bench.offer(store, prompt(1, 13)) is StoreOutcome.KNOWN, "it is being written"

    if abandoned:
        store.writes.abandon()
    else:
        gate.abandon()
    store.writes.drain()

    store.check_integrity()
    assert length(store, prompt(1, 40)) == 0 and len(store.tree) == 3
    bench.put(store, prompt(1, 13))
    check_rows(store, prompt(1, 40))
    assert store.summary()["used_bytes"] == used
    assert len(bench.files()) == 3


def test_holes_that_nothing_builds_on_any_more_are_forgotten(bench: Workbench) -> None:
    store = bench.open()
    for count in (13, 40, 60):
        bench.put(store, prompt(1, count))
    names = [name_of(store, prompt(1, 60), number) for number in range(3)]
    lose(bench, store, names[0])
    lose(bench, store, names[1])
    assert [s.state for s in store.tree.segments()].count(SegmentState.LOST) == 2

    lose(bench, store, names[2])

    assert len(store.tree) == 0
    assert store.summary()["used_bytes"] == 0


def test_a_hole_is_filled_although_what_builds_on_it_goes_for_that(bench: Workbench) -> None:
    """There is no other room for its file."""
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1, 8))
    bench.put(store, prompt(1, 16))
    # The quarantine counts as well.
    lose(bench, store, name_of(store, prompt(1, 16)), gone=True)
    bench.put(store, prompt(2, 8))
    source = open_source(store, look_up(store, prompt(2, 8)))

    bench.put(store, prompt(1, 8))

    check_rows(store, prompt(1, 8))
    store.close_source(source)
    assert len(store.tree) == 2


def test_what_is_read_can_be_lost(bench: Workbench) -> None:
    store = three_prefixes(bench)
    source = open_source(store, look_up(store, prompt(1, 40)), 0, 40)
    lose(bench, store, source.segment_ids[0], gone=True)
    bench.put(store, prompt(1, 40))
    store.check_integrity()

    expected = SequenceKVs(bench.shape, "", prompt(1, 40))
    assert torch.equal(rows(bench.shape, source, 1)[0], expected.keys(1))
    again = open_source(store, look_up(store, prompt(1, 40)))
    assert again.segment_ids[0] != source.segment_ids[0]
    store.close_source(source)
    store.close_source(again)
    store.check_integrity()
    check_rows(store, prompt(1, 40))


def test_a_report_of_what_cannot_be_lost_does_nothing(bench: Workbench) -> None:
    store = three_prefixes(bench)
    name = name_of(store, prompt(2, 8), namespace="salt")
    gate = Gate(SequenceKVs(bench.shape, "", prompt(3)))
    bench.offer(store, prompt(3), read_layers=gate)
    (pending,) = [s for s in store.tree.segments() if s.state is SegmentState.PENDING]

    for reported in ("unknown", pending.segment_id, name, name):
        store.report(SegmentUnreadable(reported, "a test"))

    store.check_integrity()
    assert store.stats.segments_unreadable == store.summary()["segments_suspect"] == 1
    gate.opened.set()
    store.writes.drain()
    look_again(store)
    check_rows(store, prompt(3))
    check_rows(store, prompt(2, 8), namespace="salt")


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_gone_is_unreadable(bench: Workbench, number: int) -> None:
    store = three_prefixes(bench)
    match = look_up(store, prompt(1, 40))
    path_of(bench, match, number).unlink()
    descriptors = len(os.listdir("/proc/self/fd"))

    with pytest.raises(SegmentUnreadable) as caught:
        open_source(store, match, 0, 40)

    assert caught.value.segment_id == match.spans[number].segment.segment_id
    assert len(os.listdir("/proc/self/fd")) == descriptors, "the other file is closed again"
    store.check_integrity()
    store.report(caught.value)
    look_again(store)
    store.check_integrity()
    assert length(store, prompt(1, 40)) == (0, 13)[number]
    bench.put(store, prompt(1, 40))
    check_rows(store, prompt(1, 40))


def test_a_damaged_chunk_is_unreadable_and_the_rest_is_served(bench: Workbench) -> None:
    store = three_prefixes(bench)
    match = look_up(store, prompt(1, 40))
    path = path_of(bench, match, 1)
    flip_last_block(path)
    source = open_source(store, match, 0, 40)

    with pytest.raises(SegmentUnreadable) as caught:
        read_rows(source, 1, None, keys=False)

    assert caught.value.segment_id == path.stem
    store.report(caught.value)
    store.close_source(source)
    look_again(store)
    store.check_integrity()
    check_rows(store, prompt(1, 13))
    assert length(store, prompt(1, 40)) == 13


def test_a_few_damaged_files_are_kept_and_counted(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(7 * bench.one))
    names = []
    for number in range(6):
        bench.put(store, prompt(number))
        names.append(name_of(store, prompt(number)))
    for number, name in enumerate(names):
        # Clocks of file systems are coarse.
        time.sleep(0.02)
        lose(bench, store, name)
        (path,) = bench.root.glob(f"*/quarantine/{name}.kv")
        os.utime(path, (100 - number, 100 - number))

    kept = sorted(path.stem for path in bench.root.glob("*/quarantine/*"))
    assert kept == sorted(names[-4:]), "those set aside last, whenever they were written"
    assert store.summary()["quarantined_bytes"] == 4 * bench.one
    for number in range(4):
        bench.put(store, prompt(number))
    assert [length(store, prompt(n)) for n in range(4)] == [0, 8, 8, 8], "they take room"
    store = bench.reopen(store)
    assert store.summary()["quarantined_bytes"] == 4 * bench.one


def test_a_file_that_cannot_be_removed_counts_until_it_is(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFileSystem()
    store = bench.open(files=files, ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    name = name_of(store, prompt(1))
    with files.faults.injected(Rule("EPERM", "unlink", "*.kv")):
        bench.put(store, prompt(3))
        assert store.health.state == "read-only"
        assert bench.offer(store, prompt(4)) is StoreOutcome.UNAVAILABLE
        assert store._quota.missing(0) == pytest.approx(bench.one, abs=1000)

    assert name in caplog.text
    recover(store)
    store.check_index()
    assert len(bench.files()) == 2
    check_rows(store, prompt(2))
    bench.put(store, prompt(5))
    assert store._quota.missing(0) <= 0
