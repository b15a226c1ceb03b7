"""The quota and the free-space floor: what is evicted, and what never is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.management.lookahead import LookAhead
from impress_sglang.management.quota import Quota
from impress_sglang.management.stored import StoredSegment
from impress_sglang.management.tree import StoredTree
from impress_sglang.management.wear import WriteBudget
from impress_sglang.management.writing import StoreOutcome
from tests.unit import store_factory
from tests.unit.kv_factory import SequenceKVs, make_info, make_shape
from tests.unit.store_factory import (
    Gate,
    Room,
    Workbench,
    check_rows,
    gb,
    length,
    look_up,
    lose,
    open_source,
    prompt,
    rows,
    use,
)

bench = store_factory.bench


def test_the_least_recently_used_prefix_goes_first(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(3 * bench.one))
    for number in (1, 2, 3):
        bench.put(store, prompt(number))
    use(store, prompt(1))

    bench.put(store, prompt(4))

    assert [length(store, prompt(n)) for n in (1, 2, 3, 4)] == [8, 0, 8, 8]
    assert store.stats.segments_evicted == 1
    use(store, prompt(3))
    bench.put(store, prompt(5))
    assert [length(store, prompt(n)) for n in (1, 3, 4, 5)] == [0, 8, 8, 8]
    bench.close(store)
    assert len(bench.files()) == 3


def test_only_reading_counts_as_use(bench: Workbench) -> None:
    """A look-up happens for every waiting request, again and again."""
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    for _ in range(5):
        look_up(store, prompt(1))

    bench.put(store, prompt(3))

    assert [length(store, prompt(n)) for n in (1, 2, 3)] == [0, 8, 8]


def test_a_prefix_that_others_build_on_goes_after_them(bench: Workbench) -> None:
    """a <- b, and c, which is the latest: b goes first, although a is as old; then a."""
    store = bench.open(ssd_gb=gb(3 * bench.one))
    a, b, c = prompt(1, 8), prompt(1, 16), prompt(3)
    bench.put(store, a)
    bench.put(store, b)
    bench.put(store, c)

    bench.put(store, prompt(4))

    assert [length(store, tokens) for tokens in (b, c, prompt(4))] == [8, 8, 8]
    bench.put(store, prompt(5))
    assert [length(store, t) for t in (b, c, prompt(4), prompt(5))] == [0, 8, 8, 8]


def test_a_large_offer_evicts_several(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(4 * bench.one))
    for number in (1, 2, 3, 4):
        bench.put(store, prompt(number))

    # 16 tokens are two chunks a column: 13 disk blocks, almost two of the small segments.
    bench.put(store, prompt(5, 16))

    assert [length(store, prompt(n)) for n in (1, 2, 3, 4)] == [0, 0, 8, 8]
    check_rows(store, prompt(5, 16))


def test_the_prefix_that_an_offer_extends_is_not_evicted_for_it(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1, 8))
    bench.put(store, prompt(2))

    bench.put(store, prompt(1, 16))

    check_rows(store, prompt(1, 16))
    assert length(store, prompt(2)) == 0


def test_nothing_that_is_read_is_evicted(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    first = open_source(store, look_up(store, prompt(1)), 0, 8)
    again = open_source(store, look_up(store, prompt(1)), 0, 8)

    bench.put(store, prompt(3))
    assert [length(store, prompt(n)) for n in (1, 2, 3)] == [8, 0, 8]
    store.close_source(first)
    bench.put(store, prompt(4))
    assert [length(store, prompt(n)) for n in (1, 3, 4)] == [8, 0, 8], "one reader is left"
    expected = SequenceKVs(bench.shape, "", prompt(1)).values(1)
    assert torch.equal(rows(bench.shape, again, 1)[1], expected)
    store.close_source(again)
    use(store, prompt(4))
    bench.put(store, prompt(5))
    assert [length(store, prompt(n)) for n in (1, 4, 5)] == [0, 8, 8]


def test_nothing_that_is_written_is_evicted(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(bench.one))
    gate = Gate(SequenceKVs(bench.shape, "", prompt(1)))
    bench.offer(store, prompt(1), read_layers=gate)

    assert bench.offer(store, prompt(2)) is StoreOutcome.NO_SPACE
    gate.opened.set()
    store.writes.drain()

    check_rows(store, prompt(1))
    bench.put(store, prompt(2))
    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]


def test_an_offer_without_space_is_a_value(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(bench.one))
    made: list[int] = []

    outcome = bench.offer(store, prompt(1, 9), read_layers=lambda start: made.append(start))  # type: ignore[arg-type,return-value]

    assert outcome is StoreOutcome.NO_SPACE
    assert store.stats.offers_without_space == 1
    assert made == [] and bench.done == []
    assert store.summary()["used_bytes"] == 0
    assert bench.files() == set()


def test_an_offer_that_can_never_fit_evicts_nothing(bench: Workbench) -> None:
    """One huge prompt must not cost all others their stored prefixes, and then be refused."""
    store = bench.open(ssd_gb=gb(3 * bench.one))
    for number in (1, 2, 3):
        bench.put(store, prompt(number))

    assert bench.offer(store, prompt(9, 1000)) is StoreOutcome.NO_SPACE

    assert [length(store, prompt(n)) for n in (1, 2, 3)] == [8, 8, 8]


def test_an_offer_that_does_not_fit_in_the_end_evicts_nothing(bench: Workbench) -> None:
    """What is being written stays, and so does what it builds on."""
    store = bench.open(ssd_gb=gb(4 * bench.one))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2, 8))
    gate = Gate(SequenceKVs(bench.shape, "", prompt(2, 16)))
    bench.offer(store, prompt(2, 16), read_layers=gate)

    # All but the segment that is being written would be enough.
    assert bench.offer(store, prompt(3, 24)) is StoreOutcome.NO_SPACE

    assert [length(store, prompt(n)) for n in (1, 2)] == [8, 8]
    gate.opened.set()
    store.writes.drain()
    assert length(store, prompt(2, 16)) == 16


def test_the_quota_holds_over_a_long_run(bench: Workbench) -> None:
    """Prompts of several lengths come back in turns; extensions, evictions and misses mix."""
    quota = 5 * bench.one + 3 * 4096
    store = bench.open(ssd_gb=gb(quota))
    outcomes = []
    for number in range(30):
        outcomes.append(bench.offer(store, prompt(number % 11, 5 + number % 13)))
        store.writes.drain()
        store.check_integrity()
        assert store.summary()["used_bytes"] <= quota + 1000
    bench.close(store)

    assert outcomes.count(StoreOutcome.ACCEPTED) > 20
    assert store.stats.segments_evicted > 10
    on_disk = sum(path.stat().st_size for path in bench.root.rglob("*.kv"))
    assert on_disk == store.summary()["used_bytes"]


def test_the_free_space_floor_is_kept(bench: Workbench) -> None:
    files = Room(1_000_000 + bench.one - 1)
    store = bench.open(min_free_gb=0.001, files=files)
    assert bench.offer(store, prompt(1)) is StoreOutcome.NO_SPACE

    files.leave(store, 1_000_000 + bench.one)

    assert bench.offer(store, prompt(1)) is StoreOutcome.ACCEPTED
    assert store.stats.offers_without_space == 1


def test_bytes_that_are_still_written_are_not_free(bench: Workbench) -> None:
    store = bench.open(files=Room(2 * bench.one))
    gates = [Gate(SequenceKVs(bench.shape, "", prompt(n))) for n in (1, 2, 3)]

    outcomes = [
        bench.offer(store, prompt(n), read_layers=gate)
        for n, gate in zip((1, 2, 3), gates, strict=True)
    ]
    for gate in gates:
        gate.opened.set()

    assert outcomes == [StoreOutcome.ACCEPTED, StoreOutcome.ACCEPTED, StoreOutcome.NO_SPACE]


def test_a_full_file_system_makes_room_by_eviction(bench: Workbench) -> None:
    files = Room()
    store = bench.open(files=files)
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    files.leave(store, 100)

    assert bench.offer(store, prompt(3)) is StoreOutcome.ACCEPTED

    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]


def test_a_rewritten_segment_takes_the_place_of_the_old_one() -> None:
    """Free space is what was measured last, and what is known to have changed since."""
    disk = SimpleNamespace(free_bytes=100)
    quota = Quota(ImpressConfig(), StoredTree(), Any, disk, {}, bool, int, WriteBudget())  # type: ignore[arg-type]
    segment = StoredSegment(make_info(make_shape(), prompt(1)), 30)
    quota.begin(segment)
    quota.end(segment, written=True)
    segment.file_bytes = 20
    quota.replace(segment, 30)
    assert (quota.used_bytes, disk.free_bytes) == (20, 80)


def test_what_a_request_waits_for_stays_and_a_new_prompt_is_declined(bench: Workbench) -> None:
    lookahead = LookAhead()
    store = bench.open(ssd_gb=gb(2 * bench.one), lookahead=lookahead)
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    lookahead.wait("waits", look_up(store, prompt(1)).spans)
    bench.put(store, prompt(3))
    assert [length(store, prompt(n)) for n in (1, 2, 3)] == [8, 0, 8], "1 is the oldest"

    lookahead.wait("too", look_up(store, prompt(3)).spans)
    assert bench.offer(store, prompt(4)) is StoreOutcome.NO_SPACE

    lookahead.stop_waiting("waits")
    bench.put(store, prompt(4))
    assert [length(store, prompt(n)) for n in (1, 3, 4)] == [0, 8, 8]


def test_quarantine_leaves_before_anything_else(bench: Workbench) -> None:
    store = bench.open(ssd_gb=gb(3 * bench.one))
    for number in (1, 2, 3):
        bench.put(store, prompt(number))
    for number in (1, 2):
        lose(bench, store, look_up(store, prompt(number)).spans[0].segment.segment_id)
    assert store.summary()["quarantined_bytes"] == 2 * bench.one

    for number in (4, 5):
        bench.put(store, prompt(number))

    assert [length(store, prompt(number)) for number in (3, 4, 5)] == [8, 8, 8]
    assert store.summary()["quarantined_bytes"] == store.stats.segments_evicted == 0
    assert not list(bench.root.glob("*/quarantine/*"))
    bench.put(store, prompt(6))
    assert store.stats.segments_evicted == 1


def test_a_namespace_makes_room_among_its_own(bench: Workbench) -> None:
    """Its least recently used prefix goes, not what nobody has used for longer elsewhere."""
    store = bench.open(ssd_gb=gb(9 * bench.one), namespace_gb=gb(2 * bench.one))
    bench.put(store, prompt(1), namespace="other")
    for number in (2, 3):
        bench.put(store, prompt(number), namespace="own")
    store.tree.touch(look_up(store, prompt(2), "own"))

    bench.put(store, prompt(4), namespace="own")

    assert [length(store, prompt(n), namespace="own") for n in (2, 3, 4)] == [8, 0, 8]
    assert length(store, prompt(1), namespace="other") == 8
    assert bench.offer(store, prompt(5, 40), namespace="own") is StoreOutcome.NO_SPACE
    assert [length(store, prompt(n), namespace="own") for n in (2, 4)] == [8, 8]
    bench.put(store, prompt(5), namespace="third")
    source = open_source(store, look_up(store, prompt(2), "own"))
    bench.put(store, prompt(6), namespace="own")
    assert [length(store, prompt(n), namespace="own") for n in (2, 4, 6)] == [8, 0, 8]
    store.close_source(source)


def test_who_has_more_than_it_may_goes_first(bench: Workbench) -> None:
    """As after a restart with less for each; nobody is asked for more than is too much."""
    store = bench.open(ssd_gb=gb(4 * bench.one))
    bench.put(store, prompt(1), namespace="other")
    for number in (2, 3, 4):
        bench.put(store, prompt(number), namespace="own")
    small = {"ssd_gb": gb(4 * bench.one), "namespace_gb": gb(2 * bench.one)}
    store = bench.reopen(store, **small)

    bench.put(store, prompt(5), namespace="third")

    assert [length(store, prompt(n), namespace="own") for n in (2, 3, 4)] == [0, 8, 8]
    assert length(store, prompt(1), namespace="other") == 8
    bench.put(store, prompt(6), namespace="third")
    assert length(store, prompt(1), namespace="other") == 0
    assert [length(store, prompt(n), namespace="own") for n in (3, 4)] == [8, 8]


def test_a_prefix_may_take_the_place_of_its_own_tail(bench: Workbench) -> None:
    """As without namespaces: what shares little with it goes, and what both begin with stays."""
    store = bench.open(namespace_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))
    bench.put(store, (*prompt(1), *prompt(7)))
    bench.put(store, (*prompt(1), 700, *prompt(8)[1:]))
    assert length(store, (*prompt(1), *prompt(7))) == 9
    assert length(store, (*prompt(1), 700, *prompt(8)[1:])) == 16
